//! The tile scheduler: whole work tiles first, then shares of those that are left.

use microscale_kernels_abi::gemm::GemmGrid;

use crate::warp;

/// A thread block's part of a work tile.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// The work tile's number.
    pub(super) tile: u32,
    /// Its first k-iteration, and the one behind its last.
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Share {
    /// Returns whether this is all of the work tile.
    #[inline(always)]
    pub(super) fn is_whole(&self, grid: &GemmGrid) -> bool {
        self.start == 0 && self.end == grid.k_iterations.divisor as u32
    }
}

/// What a thread block has to do, and how much of it was taken: whole work tiles and shared k-iterations.
pub(super) struct Shares<'a> {
    grid: &'a GemmGrid,
    taken: u32,
}

impl<'a> Shares<'a> {
    /// All that the thread block has.
    #[inline(always)]
    pub(super) fn new(grid: &'a GemmGrid) -> Self {
        Self { grid, taken: 0 }
    }

    /// The next share.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<Share> {
        let share = self.behind(self.taken);
        (share.start < share.end).then_some(share)
    }

    /// [`Self::next`] once more, where there is one: computed anew, so that it takes no registers in between.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn again(&self) -> Share {
        self.behind(self.taken)
    }

    /// Takes the next share.
    #[inline(always)]
    pub(super) fn take(&mut self, share: &Share) {
        self.taken += if self.taken < self.grid.waves { 1 } else { share.end - share.start };
    }

    /// The share behind what was taken; none of its k-iterations if that is all.
    #[inline(always)]
    fn behind(&self, taken: u32) -> Share {
        // The same in all lanes, which a shuffle tells the assembler; and neither it nor the compiler knows that it is the same
        // as before.
        let taken = warp::shuffle(taken, 0);
        let (block, k_iterations) = (warp::thread_block(), self.grid.k_iterations.divisor as u32);
        let of_shared = taken.saturating_sub(self.grid.waves);
        let next = self.grid.first_shared_k_iteration(block) + of_shared;
        let left = self.grid.first_shared_k_iteration(block + 1) - next;
        let (tile, start) = self.grid.k_iterations.divide_32(next);
        let end = k_iterations.min(start + left);
        if taken < self.grid.waves {
            Share { tile: taken * self.grid.thread_blocks + block, start: 0, end: k_iterations }
        } else {
            Share { tile: self.grid.first_shared + tile, start, end }
        }
    }
}

/// The first and the last of the thread blocks that have shares of a work tile.
#[inline(always)]
pub(super) fn sharers(grid: &GemmGrid, tile: u32) -> [u32; 2] {
    let k_iterations = grid.k_iterations.divisor as u32;
    let first = (tile - grid.first_shared) * k_iterations;
    [first, first + k_iterations - 1].map(|k_iteration| grid.sharer(k_iteration))
}

/// The number of the place for the sums that a thread block leaves of a shared work tile. It has two: the first
/// for the tile in which it begins, the second for another that it does not finish.
#[inline(always)]
pub(super) fn place(grid: &GemmGrid, tile: u32, block: u32) -> u32 {
    let begins_in_tile = (tile - grid.first_shared) * (grid.k_iterations.divisor as u32)
        <= grid.first_shared_k_iteration(block);
    2 * block + u32::from(!begins_in_tile)
}
