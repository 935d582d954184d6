//! The loop over columns, for a few groups of sixteen rows.

use super::block::BlockFactor;
use super::factor::GptqFactor;
use super::loop_state::{LoopParams, Place, TaskRows};
use super::products::{CHUNK, TILE, subtract_products, tile_at};
use super::{fixed, in_loop};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// Columns per batch: all earlier columns are applied to a batch at once.
pub(super) const BATCH: usize = 128;

/// Quantizes the rows of a task.
#[inline(always)]
pub(super) fn quantize<V: Products, B: VectorizedFormat<N>, const N: usize>(
    simd: V,
    params: &LoopParams<'_>,
    blocks: &[BlockFactor<N>],
    format: &B,
    task: &mut TaskRows<'_>,
) -> Tally {
    let positions = params.factor.order.len();
    let groups = task.weights.len() / positions;
    let mut tally = Tally::default();
    let mut updated = vec![[0.0; LANES]; groups * BATCH];
    // Under scales chosen before, the columns of a block may be apart, so blocks are encoded last.
    let kept = if task.chosen.is_some() { task.weights.len() } else { 0 };
    let mut rounded_from = vec![[0.0; LANES]; kept];
    for start in (0..positions).step_by(BATCH) {
        let count = BATCH.min(positions - start);
        for (updated, weights) in updated.chunks_mut(BATCH).zip(task.weights.chunks(positions)) {
            updated[..count].copy_from_slice(&weights[start..][..count]);
        }
        subtract_earlier(simd, params.factor, &task.weights, &mut updated, start, count);
        for (group, updated) in updated.chunks_mut(BATCH).enumerate() {
            for offset in (0..count).step_by(N) {
                let position = start + offset;
                let residuals = &task.weights[group * positions..][start..position];
                for tile in 0..N / TILE {
                    let factors = &params.factor.feedback.0[position / TILE + tile][start..position];
                    subtract_products(simd, tile_at(updated, offset + tile * TILE), factors, residuals);
                }
                let updated: &[Lanes<f32>; N] = &updated[offset..].as_chunks().0[0];
                let place = Place { factor: &blocks[position / N], group, position };
                match task.chosen {
                    None => in_loop::quantize_blocks(simd, params, format, task, place, updated, &mut tally),
                    Some(chosen) => {
                        fixed::quantize_columns(
                            simd,
                            params,
                            chosen,
                            task,
                            place,
                            updated,
                            &mut rounded_from,
                        );
                    }
                }
            }
        }
    }
    if let Some(chosen) = task.chosen {
        fixed::encode(params, format, chosen, task, &rounded_from, &mut tally);
    }
    tally
}

/// Subtracts the products of all columns before a batch from the batch.
#[inline(always)]
pub(super) fn subtract_earlier<V: Products>(
    simd: V,
    factor: &GptqFactor,
    residuals: &[Lanes<f32>],
    updated: &mut [Lanes<f32>],
    start: usize,
    count: usize,
) {
    let positions = factor.order.len();
    let tiles = &factor.feedback.0[start / TILE..];
    for first in (0..start).step_by(CHUNK) {
        let last = start.min(first + CHUNK);
        for (updated, residuals) in updated.chunks_mut(BATCH).zip(residuals.chunks(positions)) {
            for (tile, factors) in tiles.iter().take(count / TILE).enumerate() {
                let sums = tile_at(updated, tile * TILE);
                subtract_products(simd, sums, &factors[first..last], &residuals[first..last]);
            }
        }
    }
}
