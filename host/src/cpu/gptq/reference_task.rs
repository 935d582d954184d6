//! The rows of a task by the reference.

use microscale_formats::search::Found;
use microscale_formats::{BlockEvents, Search, block};

use super::reference::{BlockResult, Definition, quantize_row};
use super::rows::{LoopParams, TaskRows};
use super::tasks::Blocks;
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
            |start: usize| task.poisoned[group * row_blocks + order.block_at(start)] >> lane & 1 != 0;
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
        for result in of_row {
            let block = row * row_blocks + order.block_at(result.start);
            let codes = &mut task.codes[block * (N / 2)..][..N / 2];
            if is_poisoned(result.start) {
                codes.fill(0);
                task.scales[block] = params.nan;
                continue;
            }
            let columns = &order.columns()[result.start..][..N];
            write(definition, &result, columns, codes);
            task.scales[block] = result.byte;
            task.errors[row] += result.error;
            let (_, events) = format.rescale::<f32>(block::amax_bits(&result.rounded_from), result.byte);
            tally.add(BlockEvents {
                scale_saturated: task.chosen.is_none() && format.scale::<f32>(result.amax).2.scale_saturated,
                ..events
            });
            if task.chosen.is_none() && params.search != Search::None {
                tally.add_search(Found { byte: result.byte, tried: result.tried }, result.plain);
            }
        }
    }
    tally
}

/// Encodes a block, in the order of its columns.
fn write<const N: usize>(
    definition: &Definition,
    result: &BlockResult<N>,
    columns: &[usize],
    codes: &mut [u8],
) {
    codes.fill(0);
    for (value, column) in result.rounded_from.iter().zip(columns) {
        let i = column % N;
        codes[i / 2] |= definition.code(*value, result.byte) << (i % 2 * 4);
    }
}
