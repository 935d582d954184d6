//! Quantizes a batch of positions: sixteen lanes per row, two rows per warp.
//!
//! All lanes of a row compute the same, except in searches, where each tries another scale, and
//! when residuals are applied to the rest of the batch, where each has other columns.

use microscale_formats::{Ties, search};
use microscale_kernels_abi::ReportSlot;
use microscale_kernels_abi::gptq::{BatchParams, BlockBounds, FACTOR_TILE, ROW_LANES, ScaleTable};
use microscale_kernels_abi::launch::{THREADS, WARP};

use super::descent::{Candidate, Descent, Rounding, descend, feed_back, finite_or};
use super::factor::{BlockFactor, QUAD, entry};
use super::load::Matrices;
use super::row_search::{Block, RowSearch, candidate, lane_of_row, of_lane};
use crate::dtype::F32;
use crate::format::Searched;
use crate::hardware::{ptx, warp};

/// Addresses in global memory, besides the matrices.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) feedback: *const f32,
    pub(super) pivots: *const f32,
    /// The bounds of each block, by position.
    pub(super) bounds: *const BlockBounds,
    pub(super) table: *const ScaleTable,
    /// The block of the column at each position.
    pub(super) block_at: *const u32,
    /// `[rows, row_blocks]`.
    pub(super) scales: *mut u8,
    /// The squared error of each row.
    pub(super) errors: *mut f64,
}

/// The lane's row.
#[derive(Clone, Copy)]
struct Row {
    number: u32,
    exists: bool,
    weights: *mut f32,
    updated: *mut f32,
}

/// Loads the block at a position of a row.
///
/// # Safety
/// `row` points to the row, on 16 bytes. Writes to it happened before.
#[inline(always)]
unsafe fn load_block<const N: usize>(row: *const f32, position: u32) -> [f32; N] {
    let mut block = [0.0; N];
    let mut quad = 0;
    while quad < N / QUAD {
        let start = row.wrapping_add(position as usize + quad * QUAD);
        // SAFETY: 16 bytes of the row, on 16 bytes.
        let words = unsafe { ptx::load_16_written(start.cast()) };
        let mut i = 0;
        while i < QUAD {
            block[quad * QUAD + i] = f32::from_bits(words[i]);
            i += 1;
        }
        quad += 1;
    }
    block
}

/// Stores the block at a position of a row.
///
/// # Safety
/// `row` points to the row, on 16 bytes. No other lane uses the block meanwhile.
#[inline(always)]
unsafe fn store_block<const N: usize>(row: *mut f32, position: u32, block: &[f32; N]) {
    let mut quad = 0;
    while quad < N / QUAD {
        let start = row.wrapping_add(position as usize + quad * QUAD);
        let four =
            [block[quad * QUAD], block[quad * QUAD + 1], block[quad * QUAD + 2], block[quad * QUAD + 3]];
        // SAFETY: 16 bytes of the row, on 16 bytes.
        unsafe { ptx::store_16(start.cast(), four.map(f32::to_bits)) };
        quad += 1;
    }
}

/// Applies the columns of a block to each other: the updated weights, and their amax.
///
/// # Safety
/// As for [`descend`].
#[inline(always)]
unsafe fn apply_within<const N: usize>(
    factor: &BlockFactor<N>,
    weights: &[f32; N],
    mut updated: [f32; N],
) -> ([f32; N], f32) {
    let mut amax = 0.0f32;
    let mut k = 0;
    while k < N {
        // Columns of NaN blocks have weights of NaN.
        let nan_block = weights[k].is_nan();
        let value = if nan_block { 0.0 } else { finite_or(updated[k], weights[k]) };
        let change = if nan_block { 0.0 } else { value - weights[k] };
        // SAFETY: the same contract.
        unsafe { feed_back(factor, k, change, &mut updated) };
        updated[k] = value;
        amax = amax.max(value.abs());
        k += 1;
    }
    (updated, amax)
}

/// The scales of a block's columns where they are chosen already. Lane i of the row has the scales
/// of columns i and i + 16.
#[derive(Clone, Copy)]
struct ColumnScales([Candidate; 2]);

impl ColumnScales {
    /// # Safety
    /// The contract of the kernels of columns; the block exists.
    #[inline(always)]
    unsafe fn load<const N: usize>(operands: &Operands, row: Row, position: u32, row_blocks: u32) -> Self {
        let of_column = |column: u32| {
            // SAFETY: the column is one of the block's.
            unsafe {
                let block = *operands.block_at.add((position + column) as usize);
                let at = u64::from(row.number) * u64::from(row_blocks) + u64::from(block);
                let byte = if row.exists { *operands.scales.add(at as usize) } else { 0 };
                candidate(operands.table, u32::from(byte))
            }
        };
        let first = of_column(lane_of_row());
        Self([first, if N > ROW_LANES as usize { of_column(lane_of_row() + ROW_LANES) } else { first }])
    }

    /// The scale of a column. All lanes of the warp call it.
    #[inline(always)]
    fn of(&self, column: usize) -> Candidate {
        let Candidate { factor, scaling } = self.0[column / ROW_LANES as usize];
        let lane = column as u32 % ROW_LANES;
        Candidate { factor: of_lane(factor, lane), scaling: of_lane(scaling, lane) }
    }
}

/// Counts of a lane's row.
#[derive(Clone, Copy, Default)]
struct Counts {
    saturated: u32,
    rescaled: u32,
    tried: u32,
}

/// Quantizes a batch of positions of the warp's rows.
///
/// # Safety
/// The contract of the kernels of columns.
#[inline(always)]
pub(super) unsafe fn columns<F: Searched, const N: usize>(
    format: &F,
    ties: Ties,
    matrices: Matrices,
    operands: &Operands,
    report: *mut ReportSlot,
    params: &BatchParams,
) {
    let warp_number = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    let number = warp_number * (WARP / ROW_LANES) + warp::lane() / ROW_LANES;
    let start = u64::from(number) * u64::from(params.pitch);
    let row = Row {
        number,
        exists: number < params.rows,
        weights: matrices.weights.wrapping_add(start as usize),
        updated: matrices.updated.wrapping_add(start as usize),
    };
    let rounding = Rounding { divides: N == 16 && params.divides != 0, ties };
    let sum = operands.errors.wrapping_add(number as usize);
    // SAFETY: there is a sum for each row.
    let mut row_error = if row.exists { unsafe { *sum } } else { 0.0 };
    let mut counts = Counts::default();
    let mut offset = 0;
    while offset < params.count {
        // SAFETY: the same contract; the block is in the batch.
        row_error += unsafe {
            one_block::<F, N>(format, rounding, row, operands, params, params.start + offset, &mut counts)
        };
        offset += N as u32;
    }
    if lane_of_row() == 0 && row.exists {
        // SAFETY: there is a sum for each row. All lanes of the row have loaded it, and this one
        // stores it.
        unsafe { *sum = row_error };
    }
    // Both rows of the warp.
    let both = |of_row: u32| of_row + warp::shuffle_xor(of_row, ROW_LANES);
    let saturated = both(counts.saturated);
    let [rescaled, tried] = [both(counts.rescaled), both(counts.tried)];
    if warp::lane() == 0 {
        // SAFETY: `report` points to the report's slots, whose fields only atomic operations use.
        unsafe {
            let slot = report.add(warp_number as usize % microscale_kernels_abi::REPORT_SLOTS);
            ptx::add_to_counter(&raw mut (*slot).scale_saturated, u64::from(saturated));
            ptx::add_to_counter(&raw mut (*slot).rescaled, u64::from(rescaled));
            ptx::add_to_counter(&raw mut (*slot).tried, u64::from(tried));
        }
    }
}

/// Quantizes the block of columns at a position. Returns the squared error.
///
/// # Safety
/// The contract of the kernels of columns; the block is in the batch.
#[inline(always)]
unsafe fn one_block<F: Searched, const N: usize>(
    format: &F,
    rounding: Rounding,
    row: Row,
    operands: &Operands,
    params: &BatchParams,
    position: u32,
    counts: &mut Counts,
) -> f64 {
    let factor = BlockFactor::<N>::of(operands.feedback, operands.pivots, position);
    let fixed = params.fixed != 0;
    // SAFETY: the block exists in the row, and lanes wrote it before the last synchronization.
    let (updated, amax) = unsafe {
        let weights = load_block::<N>(row.weights, position);
        apply_within(&factor, &weights, load_block::<N>(row.updated, position))
    };
    let (plain, _, events) = format.define::<F32>(amax.to_bits());
    let (larger, _, _) = format.define::<F32>((amax * 1.5).min(f32::MAX).to_bits());
    let unit = search::unit(amax.to_bits());
    // SAFETY: there are bounds for each block.
    let bounds = unsafe { *operands.bounds.add(position as usize / N) };
    let block = Block { plain, larger, amax: amax * unit, unit, bounds };
    // SAFETY: the table is in global memory. The same contract.
    let (mut search, scales) = unsafe {
        let kind = if fixed { 0 } else { params.search };
        let search = RowSearch::new::<F>(kind, operands.table, rounding, &block);
        // Scales of columns are only used where they are chosen already.
        let position = if fixed { position } else { params.start };
        (
            search,
            ColumnScales::load::<N>(
                operands,
                Row { exists: row.exists && fixed, ..row },
                position,
                params.row_blocks,
            ),
        )
    };
    while !search.all_done() {
        let of_lane = search.candidate();
        let round = |_, value| rounding.round(value, of_lane);
        // SAFETY: the block exists, and nothing writes the factor.
        let descent = unsafe { descend(&factor, &updated, unit, round, |_, _, _, _| ()) };
        search.take(&block, &descent);
    }
    let chosen = search.candidate();
    let round = |k: usize, value: f32| {
        let candidate = if fixed { scales.of(k) } else { chosen };
        rounding.round(value, candidate)
    };
    let (mut residuals, mut error, mut nan_first) = ([0.0; N], 0.0, false);
    let mut weights = [0.0; QUAD];
    let see = |k: usize, from: f32, dequantized: f32, pivot: f32| {
        if k % QUAD == 0 {
            // SAFETY: 16 bytes of the block, as above.
            weights = unsafe { load_block::<QUAD>(row.weights, position + k as u32) };
        }
        let weight = weights[k % QUAD];
        let nan_block = weight.is_nan();
        nan_first |= k == 0 && nan_block;
        residuals[k] = if nan_block { 0.0 } else { dequantized - weight };
        let rest = f64::from(from) - f64::from(dequantized);
        let weighted = if nan_block { 0.0 } else { rest * f64::from(pivot) };
        error += weighted * weighted;
    };
    // SAFETY: the block exists, and nothing writes the factor.
    let Descent { rounded_from, .. } = unsafe { descend(&factor, &updated, 1.0, round, see) };
    // All lanes of the row have loaded the block.
    warp::sync();
    if lane_of_row() == 0 {
        // SAFETY: the block exists, and this lane stores it after all lanes have loaded it.
        unsafe {
            store_block(row.weights, position, &residuals);
            store_block(row.updated, position, &rounded_from);
        }
        let nan_block = nan_first;
        if row.exists && !fixed {
            let byte = if nan_block { F::NAN_SCALE } else { search.chosen() };
            // SAFETY: there is a byte for each block of the row, which this lane has.
            unsafe {
                let of_row = u64::from(row.number) * u64::from(params.row_blocks);
                let block = *operands.block_at.add(position as usize);
                *operands.scales.add((of_row + u64::from(block)) as usize) = byte;
            }
            if !nan_block {
                counts.saturated += u32::from(events.scale_saturated);
                counts.rescaled += u32::from(search.chosen() != plain);
                counts.tried += search.tried;
            }
        }
    }
    // SAFETY: the same contract.
    unsafe { apply_to_batch(operands.feedback, row, params, position, &residuals) };
    // The next block's lanes load stores of this block's.
    warp::sync();
    error
}

/// Applies residuals to the later columns of the batch: a lane has every sixteenth.
///
/// # Safety
/// The contract of the kernels of columns.
#[inline(always)]
unsafe fn apply_to_batch<const N: usize>(
    feedback: *const f32,
    row: Row,
    params: &BatchParams,
    position: u32,
    residuals: &[f32; N],
) {
    let end = params.start + params.count;
    let mut col = position + N as u32 + lane_of_row();
    while col < end {
        let entries = entry(feedback, position, col);
        // SAFETY: the column is in the batch, and this lane has it. Rows of the factor before a
        // column exist.
        unsafe {
            let at = row.updated.wrapping_add(col as usize);
            let mut sum = *at;
            let mut k = 0;
            while k < N {
                sum = ptx::fma_f32(-residuals[k], *entries.wrapping_add(k * FACTOR_TILE as usize), sum);
                k += 1;
            }
            *at = sum;
        }
        col += ROW_LANES;
    }
}
