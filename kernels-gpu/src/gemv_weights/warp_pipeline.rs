//! The pipelined mainloop: a warp's k-iterations, work tile by work tile.
//!
//! All that a k-iteration needs is copied to shared memory one or two k-iterations before. The buffers of
//! these copies, stages, form a ring. Loads to registers would wait for later ones, too: the assembler has
//! but a few numbers to wait for, and caches answer in order.

use core::marker::PhantomData;

use microscale_kernels_abi::gemm::QUAD;
use microscale_kernels_abi::gemm::gemv::GemvParams as PipelinedGrid;

use super::copies::{ACTIVATION_BYTES, LaneCopies, Source};
use super::format::Format;
use super::multiply::Product;
use super::operand::{CHUNK_BYTES, Problem};
use super::scheduler::WorkTiles;
use crate::{shared, warp};

/// The number of a chunk behind every row's last. Copies from there fill a stage with zeros.
const NO_CHUNK: u32 = 1 << 30;

/// The mainloop of a warp: its k-iterations, work tile by work tile.
pub(crate) struct Mainloop<'a, F, P, const TILES: usize> {
    problem: &'a Problem,
    activations: *const u8,
    work_tiles: WorkTiles,
    lane: LaneCopies<TILES>,
    product: P,
    /// Chunks from one of the warp's k-iterations to the next.
    chunk_stride: u32,
    /// K-iterations that the warp has of each work tile.
    each: u32,
    /// The source of the next copy, its work tile, and how many k-iterations of it are left to copy.
    from: Source,
    copied: u32,
    to_copy: u32,
    /// The work tile that is added to next, how many k-iterations of it are left to add, and how many chunks
    /// the next one is behind the warp's first.
    added: u32,
    to_add: u32,
    chunk: u32,
    format: PhantomData<F>,
}

impl<'a, F: Format, P: Product<F, TILES>, const TILES: usize> Mainloop<'a, F, P, TILES> {
    const STAGES: u32 = P::KERNEL.gemv_stages();
    const STAGE_BYTES: u32 = P::KERNEL.gemv_stage_bytes();

    /// Makes the mainloop of a warp, given its slice of K and the address of its shared memory, and the
    /// activations of the token or of the first of a token tile.
    #[inline(always)]
    pub(crate) fn new(
        problem: &'a Problem,
        grid: &PipelinedGrid,
        work_tiles: WorkTiles,
        [slice, address]: [u32; 2],
        activations: *const u8,
        product: P,
    ) -> Self {
        let segment_bits = P::KERNEL.gemv_segment_bits(grid.token_tile_bits);
        let rows = work_tiles.rows.min(u64::from(work_tiles.each)) as u32;
        // Kernels for one token take others, too.
        let whole_words = P::KERNEL.tile_n > 1 || F::BLOCKS > 1 || problem.shape.blocks % 4 == 0;
        // Slices take turns at the row's k-iterations. Each warp has one at least, even if there is nothing
        // in it.
        let each = ((grid.k_iterations + (1 << grid.slice_bits) - 1 - slice) >> grid.slice_bits).max(1);
        Self {
            problem,
            activations,
            work_tiles,
            lane: LaneCopies::new::<F>(problem, rows, segment_bits, slice, address, whole_words),
            product,
            chunk_stride: QUAD << segment_bits << grid.slice_bits,
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

    /// The source of a work tile's first k-iteration. Behind the last work tile it holds no chunk, so that
    /// zeros are copied.
    #[inline(always)]
    fn source(problem: &Problem, activations: *const u8, work_tiles: WorkTiles, work_tile: u32) -> Source {
        let [first, _] = work_tiles.starts(work_tile);
        let row = problem.weights.row::<F>(first, problem.shape.blocks);
        let chunk = if work_tile < work_tiles.count { 0 } else { NO_CHUNK };
        Source { codes: row.codes, scales: row.scales, activations, chunk }
    }

    /// Starts to copy the next k-iteration to a stage.
    ///
    /// # Safety
    /// The contract of the kernels; nobody reads or writes the stage.
    #[inline(always)]
    unsafe fn copy(&mut self, stage: u32) {
        let (stage, from) = (stage * Self::STAGE_BYTES, &mut self.from);
        // SAFETY: the caller's promise.
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

    /// Adds the k-iteration in a stage, while a later one is copied. Returns whether there is another one.
    ///
    /// # Safety
    /// The contract of [`Self::run`]; the stage holds the next k-iteration.
    #[inline(always)]
    unsafe fn k_iteration(&mut self, stage: u32) -> bool {
        const { assert!(Self::STAGES == 2 || Self::STAGES == 3) };
        if Self::STAGES == 2 {
            shared::wait_for_copies::<0>()
        } else {
            shared::wait_for_copies::<1>()
        }
        // Now the other lanes' copies have arrived too, and nobody reads the stage any more that is filled
        // next.
        warp::sync();
        // SAFETY: the stage that is filled is that of the k-iteration before, which all lanes have finished;
        // all copies to this one have arrived.
        unsafe {
            self.copy((stage + Self::STAGES - 1) % Self::STAGES);
            self.product.add(&self.lane, stage * Self::STAGE_BYTES, self.chunk);
        }
        self.chunk += self.chunk_stride;
        self.to_add -= 1;
        if self.to_add == 0 {
            // SAFETY: the caller's promise.
            unsafe { self.product.end(self.added) };
            self.to_add = self.each;
            self.chunk = 0;
            self.added += 1;
        }
        self.added < self.work_tiles.count
    }

    /// Runs all k-iterations, and returns the product, whose results are in shared memory.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, there is a work tile, and the shared memory is the
    /// warp's.
    #[inline(always)]
    pub(crate) unsafe fn run(mut self) -> P {
        for stage in 0..Self::STAGES - 1 {
            // SAFETY: nobody reads or writes the stage yet.
            unsafe { self.copy(stage) };
        }
        // SAFETY: stages are filled and added in turn, so that each holds the next k-iteration. There is no
        // third one if there are two.
        while unsafe {
            self.k_iteration(0) && self.k_iteration(1) && (Self::STAGES == 2 || self.k_iteration(2))
        } {}
        // Drain the copies of k-iterations behind the last work tile, which nobody reads.
        shared::wait_for_copies::<0>();
        self.product
    }
}
