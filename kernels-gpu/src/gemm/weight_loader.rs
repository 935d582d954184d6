//! Loads codes and scales of a work tile to a stage, by copies that run ahead.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::stage::{ScalePieces, Stage};

use super::tile::Tile;
use super::tile_scheduler::KRange;
use crate::hardware::{ptx, shared};
use crate::product::operand::CHUNK_BYTES;
use crate::product::problem::Problem;
use crate::product::product_format::ProductFormat;

/// Scales of a row per K-iteration.
pub(super) const fn scales_per_k_iteration<F: ProductFormat, T: Tile>() -> u32 {
    T::CHUNKS * F::BLOCKS
}

/// The stage for a problem.
#[inline(always)]
pub(super) fn stage_for<F: ProductFormat, T: Tile>(problem: &Problem) -> Stage {
    let [address, blocks] = [problem.weights.scales.addr() as u64, problem.shape.blocks];
    let scales = ScalePieces::of(address, blocks as u32, const { scales_per_k_iteration::<F, T>() });
    T::CONFIG.stage(scales)
}

/// The position of chunk `chunk` among the chunks of row `row` in a stage (swizzled), so that lanes
/// that read several rows read from different banks. With two packs, the packs of odd rows are
/// swapped. FP4's chunks lie as in [packed activations](microscale_kernels_abi::gemm::fp4).
/// `Fp8Block` does both, so that lanes can also read one chunk of each of eight rows.
#[inline(always)]
pub(super) fn swizzled<T: Tile>(row: u32, chunk: u32) -> u32 {
    if const { T::CONFIG.mainloop.takes_fp4() } {
        chunk ^ row / 2 % QUAD
    } else if const { T::CONFIG.mainloop.loads_by_block() } {
        chunk ^ (row & 1) * QUAD ^ row / 2 % QUAD
    } else if T::PACKS == 2 {
        chunk ^ (row & 1) * QUAD
    } else {
        chunk
    }
}

/// The number of the last row that exists in a row tile.
#[inline(always)]
pub(super) fn last_row<T: Tile>(problem: &Problem, row_tile: u32) -> u32 {
    let rows = u64::from(T::M);
    (problem.shape.rows - 1 - u64::from(row_tile) * rows).min(rows - 1) as u32
}

/// Copies one thread's codes and scales, the same ones of each K-iteration. `THREADS` threads load
/// together. Rows past the last one repeat it.
pub(super) struct WeightLoader<F, T, const THREADS: u32> {
    thread: u32,
    /// The thread block's first row in the work tile.
    first_row: u32,
    /// The last row of the work tile that exists.
    last_row: u32,
    /// Rows that exist after the thread's first row of codes.
    rows_after: u32,
    /// Blocks per row.
    blocks: u32,
    /// The thread's first codes in the next K-iteration, in global memory.
    global_codes: *const u8,
    /// The number of their chunk.
    chunk: u32,
    /// Their offset in a stage.
    stage_codes: u32,
    /// The piece with the work tile's first scale, in global memory.
    global_scales: *const u8,
    /// The first scale of the next K-iteration, counted from `global_scales`.
    first_scale: u32,
    /// The end of the work tile's scales, counted from `global_scales`.
    end_scale: u32,
    /// The offset of scales in a stage.
    stage_scales: u32,
    pieces: ScalePieces,
    types: PhantomData<(F, T)>,
}

impl<F: ProductFormat, T: Tile, const THREADS: u32> WeightLoader<F, T, THREADS> {
    const SCALES: u32 = scales_per_k_iteration::<F, T>();
    /// Rows per step. Each thread copies one chunk per step. It is a multiple of eight, so that a
    /// thread's chunks have the same swizzle.
    const ROWS_PER_STEP: u32 = THREADS / T::CHUNKS;

    /// The loader of a work tile's K-iterations, for thread `thread` of `THREADS`.
    #[inline(always)]
    pub(super) fn new(
        problem: &Problem,
        stage: &Stage,
        row_tile: u32,
        k_range: &KRange,
        thread: u32,
    ) -> Self {
        const { assert!(Self::ROWS_PER_STEP % 8 == 0 && T::BLOCK_ROWS % Self::ROWS_PER_STEP == 0) };
        let blocks = problem.shape.blocks as u32;
        let last_row = last_row::<T>(problem, row_tile);
        let of_tile = problem.weights.row::<F>(u64::from(row_tile) * u64::from(T::M), u64::from(blocks));
        let lead = of_tile.scales.addr() as u32 % stage.scales.bytes;
        let (first_row, row, of_row) = (T::first_row(), thread / T::CHUNKS, thread % T::CHUNKS);
        let stage_codes = (row * T::CHUNKS + swizzled::<T>(row, of_row)) * CHUNK_BYTES;
        let row = first_row + row;
        let chunk = k_range.start * T::CHUNKS + of_row;
        let row_bytes = u64::from(blocks) * F::BLOCK_BYTES;
        let codes = u64::from(row.min(last_row)) * row_bytes + u64::from(chunk) * u64::from(CHUNK_BYTES);
        Self {
            thread,
            first_row,
            last_row,
            rows_after: last_row.saturating_sub(row),
            blocks,
            global_codes: of_tile.codes.wrapping_add(codes as usize),
            chunk,
            stage_codes,
            global_scales: of_tile.scales.wrapping_sub(lead as usize),
            first_scale: lead + k_range.start * Self::SCALES,
            end_scale: lead + (last_row + 1) * blocks,
            stage_scales: stage.scales_offset(),
            pieces: stage.scales,
            types: PhantomData,
        }
    }

    /// Starts to copy the next K-iteration to the stage at `stage`. Codes past the end of a row
    /// become zeros; scales past the end belong to the next row.
    ///
    /// # Safety
    /// The kernel's contract. There is a next K-iteration, and no thread reads or writes the stage.
    #[inline(always)]
    pub(super) unsafe fn copy(&mut self, stage: u32) {
        // SAFETY: the same contract.
        unsafe {
            self.copy_codes(stage);
            self.copy_scales(stage);
        }
        self.chunk += T::CHUNKS;
        self.first_scale += Self::SCALES;
        self.global_codes = self.global_codes.wrapping_add((T::CHUNKS * CHUNK_BYTES) as usize);
    }

    /// Starts to copy the next K-iteration's codes.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    #[inline(always)]
    unsafe fn copy_codes(&self, stage: u32) {
        let row_bytes = self.blocks * F::BLOCK_BYTES as u32;
        let bytes = if self.chunk * CHUNK_BYTES < row_bytes { CHUNK_BYTES } else { 0 };
        for i in 0..const { T::BLOCK_ROWS / Self::ROWS_PER_STEP } {
            let steps = (i * Self::ROWS_PER_STEP).min(self.rows_after);
            let from = ptx::offset_by(self.global_codes, steps, row_bytes);
            // SAFETY: the row exists, and `bytes` is 0 past its last chunk. Rows and chunks start
            // on 16 bytes.
            unsafe {
                shared::copy_16_once(stage + i * THREADS * CHUNK_BYTES + self.stage_codes, from, bytes)
            };
        }
    }

    /// Starts to copy the next K-iteration's scales.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    #[inline(always)]
    unsafe fn copy_scales(&self, stage: u32) {
        let ScalePieces { bytes, count } = self.pieces;
        for i in 0..const { T::BLOCK_ROWS.div_ceil(THREADS) } {
            let row = i * THREADS + self.thread;
            if T::BLOCK_ROWS % THREADS != 0 && row >= T::BLOCK_ROWS {
                break;
            }
            let first = (self.first_row + row).min(self.last_row) * self.blocks + self.first_scale;
            let piece = first & !(bytes - 1);
            let (from, left) = (self.global_scales.wrapping_add(piece as usize), self.end_scale - piece);
            let to = stage + self.stage_scales + row * self.pieces.all();
            // SAFETY: pieces start on a multiple of their bytes. `left` limits each copy to the
            // scales of the work tile. Bytes before its first scale belong to the previous row or
            // the previous expert; the first row of all starts a piece.
            unsafe {
                if bytes == 16 {
                    shared::copy_16_once(to, from, left.min(16));
                    if Self::SCALES == 16 && count == 2 {
                        shared::copy_16_once(to + 16, from.wrapping_add(16), left.saturating_sub(16).min(16));
                    }
                } else {
                    shared::copy_8(to, from, left.min(8));
                    shared::copy_8(to + 8, from.wrapping_add(8), left.saturating_sub(8).min(8));
                }
            }
        }
    }
}
