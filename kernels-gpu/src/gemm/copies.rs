//! Copies of K-iterations to a ring of stages, by mainloops whose warps copy for themselves.

use microscale_kernels_abi::gemm::stage::{FRONT_BYTES, Stage};

use super::params::Params;
use super::tile::Tile;
use super::tile_scheduler::WorkTile;
use super::weight_loader::WeightLoader;
use crate::hardware::{shared, warp};
use crate::product::problem::Problem;
use crate::product::product_format::ProductFormat;

/// Threads per thread block.
pub(super) const THREADS: u32 = 256;

/// The stages of a launch, in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    /// The address of the first stage.
    address: u32,
    stage_bytes: u32,
    /// The number of stages.
    pub(super) stages: u32,
}

impl Ring {
    /// The stages that fit into `bytes` bytes of shared memory.
    #[inline(always)]
    pub(super) fn new(stage: &Stage, bytes: u32) -> Self {
        let address = shared::address(warp::shared::<u128>().cast::<u8>()) + FRONT_BYTES;
        Self { address, stage_bytes: stage.bytes(), stages: stage.count(bytes) }
    }

    /// The address of a stage.
    #[inline(always)]
    pub(super) fn stage(&self, number: u32) -> u32 {
        self.address + number * self.stage_bytes
    }

    /// The stage after `stage`.
    #[inline(always)]
    pub(super) fn after(&self, stage: u32) -> u32 {
        if stage + 1 == self.stages { 0 } else { stage + 1 }
    }

    /// Waits for the oldest of the lane's `stages - 1` groups of copies.
    #[inline(always)]
    pub(super) fn wait_for_oldest(&self) {
        match self.stages {
            2 => shared::wait_for_copies::<0>(),
            3 => shared::wait_for_copies::<1>(),
            4 => shared::wait_for_copies::<2>(),
            5 => shared::wait_for_copies::<3>(),
            6 => shared::wait_for_copies::<4>(),
            7 => shared::wait_for_copies::<5>(),
            _ => shared::wait_for_copies::<6>(),
        }
    }
}

/// A thread's copies of a work tile.
pub(super) struct Copies<F, T> {
    weights: WeightLoader<F, T, THREADS>,
    /// The thread's first 16 bytes of the next K-iteration's activations, in global memory.
    activations: *const u8,
    /// K-iterations that are left.
    left: u32,
    /// The stage of the next K-iteration.
    stage: u32,
    ring: Ring,
}

impl<F: ProductFormat, T: Tile> Copies<F, T> {
    /// The copies of a work tile, whose expert's product is `problem`.
    #[inline(always)]
    pub(super) fn new(
        params: &Params<'_>,
        problem: &Problem,
        stage: &Stage,
        &WorkTile { row_tile, token_tile, k_range, .. }: &WorkTile,
        ring: Ring,
    ) -> Self {
        let pack = u64::from(token_tile) * params.launch.gemm.k_iterations.divisor + u64::from(k_range.start);
        let pack = pack * u64::from(stage.activation_bytes()) + u64::from(warp::thread() * 16);
        Self {
            weights: WeightLoader::new(problem, stage, row_tile, &k_range, warp::thread()),
            activations: params.packed.wrapping_add(pack as usize),
            left: k_range.end - k_range.start,
            stage: 0,
            ring,
        }
    }

    /// Starts to copy the next K-iteration, if there is one. Each call commits a group of copies.
    ///
    /// # Safety
    /// The kernel's contract. No thread reads or writes the next stage.
    #[inline(always)]
    pub(super) unsafe fn next(&mut self) {
        let pieces = const { T::STAGE.activation_bytes() / 16 };
        if self.left > 0 {
            let stage = self.ring.stage(self.stage);
            // SAFETY: the stage is free, by the caller's promise. The packed activations have the
            // bytes of a full token tile for each K-iteration.
            unsafe {
                self.weights.copy(stage);
                for i in 0..pieces.div_ceil(THREADS) {
                    let piece = i * THREADS + warp::thread();
                    if pieces % THREADS == 0 || piece < pieces {
                        let to = stage + const { T::STAGE.codes_bytes() } + piece * 16;
                        let from = self.activations.wrapping_add((i * THREADS * 16) as usize);
                        shared::copy_16_once(to, from, 16);
                    }
                }
            }
            self.activations = self.activations.wrapping_add((pieces * 16) as usize);
            self.left -= 1;
            self.stage = self.ring.after(self.stage);
        }
        shared::commit_copies();
    }
}
