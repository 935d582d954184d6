//! The tile scheduler: which work tiles a thread block has, and which K-iterations of each.
//!
//! A thread block first takes its whole work tiles, then its parts of the split ones
//! ([`Schedule`](microscale_kernels_abi::gemm::schedule::Schedule)).

use core::marker::PhantomData;

use microscale_kernels_abi::experts::ExpertTile;

use super::params::{Launch, Params};
use super::tile::Tile;
use crate::hardware::warp;

/// The K-iterations of a work tile that a thread block has.
#[derive(Clone, Copy)]
pub(super) struct KRange {
    /// The work tile's number.
    pub(super) tile: u32,
    /// The first K-iteration.
    pub(super) start: u32,
    /// The end of the K-iterations.
    pub(super) end: u32,
    /// 1 if this is the thread block's last range.
    #[cfg_attr(not(microscale_wgmma), expect(dead_code, reason = "read from the work queue only"))]
    pub(super) last: u32,
}

impl KRange {
    /// Returns whether the range is the whole work tile.
    #[inline(always)]
    pub(super) fn is_whole(&self, launch: &Launch<'_>) -> bool {
        self.start == 0 && self.end == launch.k_iterations()
    }
}

/// A work tile: a thread block's K-iterations of it, its rows and tokens, and the global scale of
/// its weights.
#[derive(Clone, Copy)]
pub(super) struct WorkTile {
    pub(super) k_range: KRange,
    pub(super) expert: u32,
    pub(super) first_token: u32,
    pub(super) end_token: u32,
    pub(super) row_tile: u32,
    pub(super) token_tile: u32,
    pub(super) global_scale: f32,
}

impl Params<'_> {
    /// The packed activations of a work tile's first K-iteration.
    #[cfg(any(microscale_tcgen05, microscale_wgmma))]
    #[inline(always)]
    pub(super) fn packed_of<T: Tile>(&self, work_tile: &WorkTile) -> *const u8 {
        let WorkTile { token_tile, k_range, .. } = work_tile;
        let pack = u64::from(*token_tile) * self.launch.gemm.k_iterations.divisor + u64::from(k_range.start);
        let pack_bytes = const { T::CONFIG.pack_bytes() };
        self.packed.wrapping_add((pack * u64::from(pack_bytes)) as usize)
    }

    /// The global scale of an expert. For FP4 activations the packing kernel writes it, so it is
    /// there after `ptx::wait_for_previous_kernel`.
    ///
    /// # Safety
    /// The kernel's contract; there is a slot for the expert.
    #[inline(always)]
    pub(super) unsafe fn global_scale(&self, expert: u32) -> f32 {
        // SAFETY: the same contract.
        unsafe { (*self.problem.weights.global.wrapping_add(expert as usize)).scale }
    }

    /// The work tile of a range.
    #[inline(always)]
    pub(super) fn work_tile<T: Tile>(&self, k_range: KRange) -> WorkTile {
        let [row_tile, token_tile] = self.launch.schedule.row_and_token_tile(k_range.tile);
        // SAFETY: the schedule has only work tiles that exist, so the plan has the token tile, and
        // there is a slot for each expert in it.
        unsafe {
            let tokens = self.problem.routed.tile(token_tile, T::N, self.launch.gemm.tokens);
            let ExpertTile { expert, first, end, .. } = tokens;
            let global_scale = self.global_scale(expert);
            WorkTile {
                k_range,
                expert,
                first_token: first,
                end_token: end,
                row_tile,
                token_tile,
                global_scale,
            }
        }
    }
}

/// Hands out the ranges of a thread block, one after the other.
pub(super) struct TileScheduler<'a, T> {
    launch: Launch<'a>,
    /// Whole work tiles taken, then shared K-iterations taken.
    taken: u32,
    tile: PhantomData<T>,
}

impl<'a, T: Tile> TileScheduler<'a, T> {
    /// The scheduler before the first range.
    #[inline(always)]
    pub(super) fn new(launch: Launch<'a>) -> Self {
        Self { launch, taken: 0, tile: PhantomData }
    }

    /// The next range; `None` after the last.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<KRange> {
        let range = self.after(self.taken);
        (range.start < range.end).then_some(range)
    }

    /// The next range, which must exist. It is computed again, so that it takes no registers
    /// meanwhile.
    #[cfg(not(microscale_wgmma))]
    #[inline(always)]
    pub(super) fn recompute(&self) -> KRange {
        self.after(self.taken)
    }

    /// Advances past `range`, the next one.
    #[inline(always)]
    pub(super) fn advance(&mut self, range: &KRange) {
        self.taken += if self.taken < self.launch.schedule.waves { 1 } else { range.end - range.start };
    }

    /// The range after the first `taken`; empty after the last.
    #[inline(always)]
    fn after(&self, taken: u32) -> KRange {
        // The shuffle tells the assembler that the value is uniform, and hides from both compilers
        // that it was computed before.
        let taken = warp::shuffle(taken, 0);
        let Launch { gemm, schedule, .. } = self.launch;
        let (block, k_iterations) = (T::worker(), self.launch.k_iterations());
        let of_shared = taken.saturating_sub(schedule.waves);
        let next = schedule.first_shared_k_iteration(block) + of_shared;
        let left = schedule.first_shared_k_iteration(block + 1) - next;
        let (tile, start) = gemm.k_iterations.divide_32(next);
        let end = k_iterations.min(start + left);
        if taken < schedule.waves {
            let last = u32::from(taken + 1 == schedule.waves && left == 0);
            KRange { tile: taken * schedule.thread_blocks + block, start: 0, end: k_iterations, last }
        } else {
            KRange { tile: schedule.first_shared + tile, start, end, last: u32::from(start + left == end) }
        }
    }
}
