//! Sixteen blocks whose scales are chosen in the loop.

use microscale_formats::{BlockEvents, Search, block, search};

use super::loop_state::{LoopParams, Place, TaskRows, finish, group_of};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// Quantizes sixteen blocks, after all columns before them were applied.
#[inline(always)]
pub(super) fn quantize_blocks<V: Products, B: VectorizedFormat<N>, const N: usize>(
    simd: V,
    params: &LoopParams<'_>,
    format: &B,
    task: &mut TaskRows<'_>,
    place: Place<'_, N>,
    updated: &[Lanes<f32>; N],
    tally: &mut Tally,
) {
    let order = &params.factor.order;
    let poisoned = place.poisoned(params, task);
    let weights = place.weights(params, &mut task.weights);
    let (group, amax) = group_of(simd, place.factor, weights, updated, &poisoned);

    let first_row = place.group * LANES;
    let lanes = LANES.min(task.rows - first_row);
    let (mut plain, mut larger) = ([0; LANES], [0; LANES]);
    let mut saturated = [false; LANES];
    for lane in 0..LANES {
        let (byte, _, events) = format.scale::<f32>(amax[lane].to_bits());
        (plain[lane], larger[lane], saturated[lane]) = (byte, byte, events.scale_saturated);
        if params.search == Search::FourSix {
            larger[lane] = format.scale::<f32>((amax[lane] * 1.5).min(f32::MAX).to_bits()).0;
        }
    }
    let mut bytes = plain;
    if params.search != Search::None {
        let chosen = group.search(&params.table, &params.range, &plain, &larger);
        bytes = chosen.bytes;
        for lane in 0..lanes {
            if poisoned[0] >> lane & 1 == 0 {
                let found = search::Found { byte: bytes[lane], tried: chosen.tried[lane] };
                tally.add_search(found, plain[lane]);
            }
        }
    }
    let descent = group.descend(&params.table, &bytes);
    let rounded_from = finish(simd, params, task, place, &poisoned, &descent);

    let columns = &order.columns()[place.position..][..N];
    for lane in 0..lanes {
        let block = (first_row + lane) * (order.len() / N) + order.block_at(place.position);
        let codes = &mut task.codes[block * (N / 2)..][..N / 2];
        if poisoned[0] >> lane & 1 != 0 {
            codes.fill(0);
            task.scales[block] = params.nan;
            continue;
        }
        let mut wide = [0.0; N];
        for (k, column) in columns.iter().enumerate() {
            wide[column % N] = rounded_from[k][lane];
        }
        let (scaling, events) = format.rescale::<f32>(block::amax_bits(&wide), bytes[lane]);
        tally.add(BlockEvents { scale_saturated: saturated[lane], ..events });
        format.encode(&wide, scaling, codes);
        task.scales[block] = bytes[lane];
    }
}
