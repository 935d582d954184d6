//! The pipeline of a warp: its K-iterations, work tile by work tile.
//!
//! The operands of a K-iteration are copied to shared memory one or two K-iterations ahead, in a
//! ring of stages. Loads to registers would also wait for later loads: a warp has six scoreboards,
//! and caches answer in order.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::gemv::GemvParams;

use super::lane_copies::{ACTIVATION_BYTES, CopySource, LaneCopies};
use super::multiply::Product;
use super::work_tiles::WorkTiles;
#[cfg(microscale_sm90)]
use crate::hardware::ptx;
use crate::hardware::{shared, warp};
use crate::product::operand::CHUNK_BYTES;
use crate::product::problem::Problem;
use crate::product::product_format::ProductFormat;

/// A chunk past the end of every row. Copies from there fill a stage with zeros.
const NO_CHUNK: u32 = 1 << 30;

/// The pipeline of a warp.
pub(super) struct WarpPipeline<'a, F, P, const TILES: usize> {
    problem: &'a Problem,
    activations: *const u8,
    work_tiles: WorkTiles,
    lane: LaneCopies<TILES>,
    product: P,
    /// Chunks from one of the warp's K-iterations to the next.
    chunk_stride: u32,
    /// The warp's K-iterations per work tile.
    each: u32,
    /// The source of the next copy.
    from: CopySource,
    /// The work tile of the next copy.
    copied: u32,
    /// K-iterations of that work tile that are left to copy.
    to_copy: u32,
    /// The work tile of the next multiplication.
    added: u32,
    /// K-iterations of that work tile that are left to multiply.
    to_add: u32,
    /// Chunks from the warp's first K-iteration to the next one.
    chunk: u32,
    format: PhantomData<F>,
}

impl<'a, F: ProductFormat, P: Product<F, TILES>, const TILES: usize> WarpPipeline<'a, F, P, TILES> {
    const STAGES: u32 = P::CONFIG.gemv_stages();
    const STAGE_BYTES: u32 = P::CONFIG.gemv_stage_bytes();

    /// The pipeline of a warp with slice `slice` of K. `address` points to the warp's shared
    /// memory, and `activations` to the origin of the token tile.
    #[inline(always)]
    pub(super) fn new(
        problem: &'a Problem,
        params: &GemvParams,
        work_tiles: WorkTiles,
        [slice, address]: [u32; 2],
        activations: *const u8,
        product: P,
    ) -> Self {
        let segment_bits = P::CONFIG.gemv_segment_bits(params.token_tile_bits);
        let rows = work_tiles.rows.min(u64::from(work_tiles.each)) as u32;
        // The kernels for one token also take other rows of scales.
        let whole_words = P::CONFIG.tile_n > 1 || F::BLOCKS > 1 || problem.shape.blocks % 4 == 0;
        // Slices take turns at the row's K-iterations. Each warp has at least one, which may be
        // empty.
        let each = ((params.k_iterations + (1 << params.slice_bits) - 1 - slice) >> params.slice_bits).max(1);
        Self {
            problem,
            activations,
            work_tiles,
            lane: LaneCopies::new::<F>(problem, rows, segment_bits, slice, address, whole_words),
            product,
            chunk_stride: QUAD << segment_bits << params.slice_bits,
            each,
            from: Self::source(problem, activations, work_tiles, 0),
            copied: 0,
            to_copy: each,
            added: 0,
            to_add: each,
            chunk: 0,
            format: PhantomData,
        }
    }

    /// The source of a work tile's first K-iteration. After the last work tile it has no chunks, so
    /// zeros are copied.
    #[inline(always)]
    fn source(
        problem: &Problem,
        activations: *const u8,
        work_tiles: WorkTiles,
        work_tile: u32,
    ) -> CopySource {
        let [first, _] = work_tiles.starts(work_tile);
        let row = problem.weights.row::<F>(first, problem.shape.blocks);
        let chunk = if work_tile < work_tiles.count { 0 } else { NO_CHUNK };
        CopySource { codes: row.codes, scales: row.scales, activations, chunk }
    }

    /// Starts to copy the next K-iteration to a stage.
    ///
    /// # Safety
    /// The kernel's contract. No lane reads or writes the stage.
    #[inline(always)]
    unsafe fn copy(&mut self, stage: u32) {
        let (stage, from) = (stage * Self::STAGE_BYTES, &mut self.from);
        // SAFETY: the stage is free, by the caller's promise.
        unsafe {
            self.lane.copy::<F>(*from, stage);
            self.product.copy(from.activations, from.chunk, stage);
        }
        shared::commit_copies();
        from.codes = from.codes.wrapping_add((self.chunk_stride * CHUNK_BYTES) as usize);
        from.scales = from.scales.wrapping_add((self.chunk_stride * F::BLOCKS) as usize);
        from.activations = from.activations.wrapping_add((self.chunk_stride * ACTIVATION_BYTES) as usize);
        from.chunk += self.chunk_stride;
        self.to_copy -= 1;
        if self.to_copy == 0 {
            self.to_copy = self.each;
            self.copied += 1;
            self.from = Self::source(self.problem, self.activations, self.work_tiles, self.copied);
        }
    }

    /// Multiplies the K-iteration in a stage while a later one is copied. Returns whether there is
    /// another.
    ///
    /// # Safety
    /// The contract of [`Self::run`]. The stage holds the next K-iteration.
    #[inline(always)]
    unsafe fn k_iteration(&mut self, stage: u32) -> bool {
        const { assert!(Self::STAGES == 2 || Self::STAGES == 3) };
        if Self::STAGES == 2 {
            shared::wait_for_copies::<0>()
        } else {
            shared::wait_for_copies::<1>()
        }
        // Now the other lanes' copies have completed too, and no lane reads the stage that is
        // filled next.
        warp::sync();
        // SAFETY: the stage that is filled held the previous K-iteration, which all lanes have
        // finished. All copies to this one have completed.
        unsafe {
            self.copy((stage + Self::STAGES - 1) % Self::STAGES);
            self.product.add(&self.lane, stage * Self::STAGE_BYTES, self.chunk);
        }
        self.chunk += self.chunk_stride;
        self.to_add -= 1;
        if self.to_add == 0 {
            // SAFETY: only this warp uses its shared memory; all lanes are here.
            unsafe { self.product.end(self.added) };
            self.to_add = self.each;
            self.chunk = 0;
            self.added += 1;
        }
        self.added < self.work_tiles.count
    }

    /// Runs all K-iterations. The results are then in shared memory.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it, there is a work tile, and only this warp uses the
    /// shared memory.
    #[inline(always)]
    pub(super) unsafe fn run(mut self) -> P {
        for stage in 0..Self::STAGES - 1 {
            // SAFETY: no lane uses the ring yet.
            unsafe { self.copy(stage) };
        }
        // SAFETY: stages are filled and multiplied in turn, so each holds the next K-iteration. A
        // ring of two stages has no third.
        while unsafe {
            self.k_iteration(0) && self.k_iteration(1) && (Self::STAGES == 2 || self.k_iteration(2))
        } {}
        #[cfg(microscale_sm90)]
        ptx::start_next_kernel();
        // Wait for the copies after the last work tile, which no lane reads.
        shared::wait_for_copies::<0>();
        self.product
    }
}
