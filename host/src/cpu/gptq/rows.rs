//! The loop over columns, for a few groups of sixteen rows.

use microscale_formats::{BlockEvents, Search, block, search};

use super::block::{BlockFactor, ScaleRange};
use super::factor::GptqFactor;
use super::lanes::{Group, ScaleTable, finite_or, magnitude};
use super::products::{CHUNK, TILE, subtract_products, tile_at};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::VectorizedFormat;
use crate::cpu::simd::products::Products;
use crate::cpu::simd::{LANES, Lanes};

/// Columns per batch: all earlier columns are applied to a batch at once.
pub(super) const BATCH: usize = 128;

/// The parameters of the loop, which all tasks share.
pub(in crate::cpu) struct LoopParams<'a> {
    pub(super) factor: &'a GptqFactor,
    pub(super) table: ScaleTable,
    pub(super) range: ScaleRange,
    pub(super) search: Search,
    /// The scale byte of a NaN block.
    pub(super) nan: u8,
}

/// The rows of a task, padded to whole groups, and their output.
pub(in crate::cpu) struct TaskRows<'a> {
    /// Rows, without padding.
    pub(super) rows: usize,
    /// `[groups, positions]`: the weights, and the residuals of the columns that are done.
    pub(super) weights: Vec<Lanes<f32>>,
    /// `[groups, blocks]`: bit `i` is set if the block of lane `i` is a NaN block.
    pub(super) poisoned: Vec<u16>,
    /// `[rows, blocks]`: scales that are chosen already.
    pub(super) chosen: Option<&'a [u8]>,
    /// `[rows, blocks, block bytes]`.
    pub(super) codes: &'a mut [u8],
    /// `[rows, blocks]`.
    pub(super) scales: &'a mut [u8],
    /// The squared errors of each row, in the factor's unit.
    pub(super) errors: &'a mut [f64],
}

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
                let place = Place { group, position, block: params.factor.order.block_at(position) };
                let factor = &blocks[position / N];
                quantize_blocks(simd, params, factor, format, task, place, updated, &mut tally);
            }
        }
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
            for tile in 0..count / TILE {
                let factors = &tiles[tile][first..last];
                subtract_products(simd, tile_at(updated, tile * TILE), factors, &residuals[first..last]);
            }
        }
    }
}

/// The place of sixteen blocks.
#[derive(Clone, Copy)]
struct Place {
    group: usize,
    /// The position of their first column.
    position: usize,
    /// The block of columns, in the order of the matrix.
    block: usize,
}

/// Quantizes sixteen blocks, to which all columns before them are applied.
#[inline(always)]
fn quantize_blocks<V: Products, B: VectorizedFormat<N>, const N: usize>(
    simd: V,
    params: &LoopParams<'_>,
    factor: &BlockFactor<N>,
    format: &B,
    task: &mut TaskRows<'_>,
    place: Place,
    updated: &[Lanes<f32>; N],
    tally: &mut Tally,
) {
    let positions = params.factor.order.len();
    let row_blocks = positions / N;
    let poisoned = task.poisoned[place.group * row_blocks + place.block];
    let weights: &mut [Lanes<f32>; N] =
        &mut task.weights[place.group * positions..][place.position..].as_chunks_mut().0[0];
    let (group, amax) = group_of(simd, factor, weights, updated, poisoned);

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
    if let Some(chosen) = task.chosen {
        for lane in 0..lanes {
            bytes[lane] = chosen[(first_row + lane) * row_blocks + place.block];
        }
    } else if params.search != Search::None {
        let chosen = group.search(&params.table, &params.range, &plain, &larger);
        bytes = chosen.bytes;
        for lane in 0..lanes {
            if poisoned >> lane & 1 == 0 {
                let found = search::Found { byte: bytes[lane], tried: chosen.tried[lane] };
                tally.add_search(found, plain[lane]);
            }
        }
    }
    let descent = group.descend(&params.table, &bytes);
    let (mut rounded_from, mut dequantized) = ([[0.0; LANES]; N], [[0.0; LANES]; N]);
    for k in 0..N {
        rounded_from[k] = simd.store(descent.rounded_from[k]);
        dequantized[k] = simd.store(descent.dequantized[k]);
        let residual = simd.sub(descent.dequantized[k], simd.load(&weights[k]));
        weights[k] = simd.store(simd.select(poisoned, simd.splat(0.0), residual));
    }

    let columns = &params.factor.order.columns()[place.position..][..N];
    let block_bytes = N / 2;
    for lane in 0..lanes {
        let block = (first_row + lane) * row_blocks + place.block;
        let codes = &mut task.codes[block * block_bytes..][..block_bytes];
        if poisoned >> lane & 1 != 0 {
            codes.fill(0);
            task.scales[block] = params.nan;
            continue;
        }
        let mut wide = [0.0; N];
        for (k, column) in columns.iter().enumerate() {
            wide[column % N] = rounded_from[k][lane];
        }
        let scale_saturated = saturated[lane] && task.chosen.is_none();
        let (scaling, events) = format.rescale::<f32>(block::amax_bits(&wide), bytes[lane]);
        tally.add(BlockEvents { scale_saturated, ..events });
        format.encode(&wide, scaling, codes);
        task.scales[block] = bytes[lane];
        let mut error = 0.0;
        for k in 0..N {
            let rest = f64::from(rounded_from[k][lane]) - f64::from(dequantized[k][lane]);
            let weighted = rest * f64::from(factor.pivots[k]);
            error += weighted * weighted;
        }
        task.errors[first_row + lane] += error;
    }
}

/// Applies the columns of a block to each other: the updated weights, and the amax of each block.
#[inline(always)]
fn group_of<'a, V: Products, const N: usize>(
    simd: V,
    factor: &'a BlockFactor<N>,
    weights: &[Lanes<f32>; N],
    updated: &[Lanes<f32>; N],
    poisoned: u16,
) -> (Group<'a, V, N>, Lanes<f32>) {
    let zero = simd.splat(0.0);
    let mut of_group = [zero; N];
    for k in 0..N {
        of_group[k] = simd.load(&updated[k]);
    }
    let mut amax = zero;
    for k in 0..N {
        let original = simd.load(&weights[k]);
        let values = finite_or(simd, of_group[k], original);
        let change = simd.sub(values, original);
        for m in k + 1..N {
            let product = simd.mul(change, simd.splat(factor.feedback[k][m]));
            of_group[m] = simd.sub(of_group[m], product);
        }
        of_group[k] = simd.select(poisoned, zero, values);
        amax = simd.max(magnitude(simd, of_group[k]), amax);
    }
    let amax = simd.store(amax);
    let (mut units, mut in_units) = ([1.0; LANES], amax);
    for lane in 0..LANES {
        units[lane] = search::unit(amax[lane].to_bits());
        in_units[lane] *= units[lane];
    }
    (Group { simd, factor, updated: of_group, units, amax: in_units }, amax)
}
