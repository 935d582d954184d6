//! The rows of a task by the reference.

use microscale_formats::search::Found;
use microscale_formats::{BlockEvents, Search, block};

use super::loop_state::{Blocks, LoopParams, TaskRows};
use super::reference::{Definition, quantize_row};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::simd::LANES;

/// Quantizes the rows of a task, one after the other.
pub(super) fn quantize(
    params: &LoopParams<'_>,
    definition: &Definition,
    blocks: &Blocks,
    task: &mut TaskRows<'_>,
) -> Tally {
    match blocks {
        Blocks::Mxfp4(format, _) => rows(params, definition, format, task),
        Blocks::Nvfp4(format, _) => rows(params, definition, format, task),
    }
}

fn rows<B: VectorizedFormat<N>, const N: usize>(
    params: &LoopParams<'_>,
    definition: &Definition,
    format: &B,
    task: &mut TaskRows<'_>,
) -> Tally {
    let order = &params.factor.order;
    let (positions, row_blocks) = (order.len(), order.len() / N);
    let mut tally = Tally::default();
    for row in 0..task.rows {
        let (group, lane) = (row / LANES, row % LANES);
        let weights: Vec<f32> =
            task.weights[group * positions..][..positions].iter().map(|lanes| lanes[lane]).collect();
        let is_poisoned =
            |position: usize| task.poisoned[group * row_blocks + order.block_at(position)] >> lane & 1 != 0;
        let chosen =
            |start: usize| task.chosen.map(|chosen| chosen[row * row_blocks + order.block_at(start)]);
        let of_row = quantize_row::<N>(
            definition,
            params.factor,
            (&params.range, params.search),
            &weights,
            chosen,
            is_poisoned,
        );
        let mut rounded_from = vec![0.0; positions];
        for result in &of_row {
            for (column, value) in order.columns()[result.start..].iter().zip(result.rounded_from) {
                rounded_from[*column] = value;
            }
            task.errors[row] += result.error;
            let block = row * row_blocks + order.block_at(result.start);
            if task.chosen.is_none() {
                task.scales[block] = result.byte;
            }
            if task.chosen.is_none() && !is_poisoned(result.start) {
                let scale_saturated = format.scale::<f32>(result.amax).2.scale_saturated;
                tally.add(BlockEvents { scale_saturated, ..BlockEvents::default() });
                if params.search != Search::None {
                    tally.add_search(Found { byte: result.byte, tried: result.tried }, result.plain);
                }
            }
        }
        for (i, values) in rounded_from.as_chunks::<N>().0.iter().enumerate() {
            let block = row * row_blocks + i;
            let codes = &mut task.codes[block * (N / 2)..][..N / 2];
            codes.fill(0);
            if task.poisoned[group * row_blocks + i] >> lane & 1 != 0 {
                task.scales[block] = params.nan;
                continue;
            }
            let byte = task.chosen.map_or(task.scales[block], |chosen| chosen[block]);
            task.scales[block] = byte;
            for (k, value) in values.iter().enumerate() {
                codes[k / 2] |= definition.code(*value, byte) << (k % 2 * 4);
            }
            let (_, events) = format.rescale::<f32>(block::amax_bits(values), byte);
            tally.add(BlockEvents { scale_saturated: false, ..events });
        }
    }
    tally
}
