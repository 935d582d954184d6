//! Sixteen rows whose scales were chosen before the loop.

use microscale_formats::{BlockEvents, block};

use super::loop_state::{LoopParams, Place, TaskRows, finish, group_of};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// Quantizes `N` columns of sixteen rows, after all columns before them were applied.
///
/// `chosen` is `[rows, blocks]`. Columns of one block need not be neighbours. Writes the weights
/// that were rounded to `rounded_from`, which is `[groups, columns]`.
#[inline(always)]
pub(super) fn quantize_columns<V: Products, const N: usize>(
    simd: V,
    params: &LoopParams<'_>,
    chosen: &[u8],
    task: &mut TaskRows<'_>,
    place: Place<'_, N>,
    updated: &[Lanes<f32>; N],
    rounded_from: &mut [Lanes<f32>],
) {
    let order = &params.factor.order;
    let poisoned = place.poisoned(params, task);
    let weights = place.weights(params, &mut task.weights);
    let (group, _) = group_of(simd, place.factor, weights, updated, &poisoned);
    let first_row = place.group * LANES;
    let mut bytes = [[0; LANES]; N];
    for (k, bytes) in bytes.iter_mut().enumerate() {
        let block = order.block_at(place.position + k);
        let of_rows = chosen[first_row * (order.len() / N)..].chunks(order.len() / N);
        bytes.iter_mut().zip(of_rows).for_each(|(byte, of_row)| *byte = of_row[block]);
    }
    let descent = group.descend_columns(&params.table, &bytes);
    let of_block = finish(simd, params, task, place, &poisoned, &descent);
    let of_group = &mut rounded_from[place.group * order.len()..];
    for (column, values) in order.columns()[place.position..].iter().zip(of_block) {
        of_group[*column] = values;
    }
}

/// Encodes all blocks of a task.
#[inline(always)]
pub(super) fn encode<B: VectorizedFormat<N>, const N: usize>(
    params: &LoopParams<'_>,
    format: &B,
    chosen: &[u8],
    task: &mut TaskRows<'_>,
    rounded_from: &[Lanes<f32>],
    tally: &mut Tally,
) {
    let positions = params.factor.order.len();
    let row_blocks = positions / N;
    for (i, codes) in task.codes.chunks_mut(N / 2).enumerate() {
        let (row, block) = (i / row_blocks, i % row_blocks);
        let (group, lane) = (row / LANES, row % LANES);
        if task.poisoned[group * row_blocks + block] >> lane & 1 != 0 {
            codes.fill(0);
            task.scales[i] = params.nan;
            continue;
        }
        let mut wide = [0.0; N];
        for (wide, values) in wide.iter_mut().zip(&rounded_from[group * positions + block * N..]) {
            *wide = values[lane];
        }
        let (scaling, events) = format.rescale::<f32>(block::amax_bits(&wide), chosen[i]);
        tally.add(BlockEvents { scale_saturated: false, ..events });
        format.encode(&wide, scaling, codes);
        task.scales[i] = chosen[i];
    }
}
