//! The tile scheduler: whole work tiles first, then shares of those that are left.

use microscale_kernels_abi::experts::Plan;
use microscale_kernels_abi::gemm::params::GemmParams as GemmGrid;
use microscale_kernels_abi::gemm::schedule::Schedule;
use microscale_kernels_abi::gemm::stage::PLAN_OFFSET;

use crate::product::operand::Routed;
use crate::warp;

/// All the work of a launch: the product, and its plan in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) grid: &'a GemmGrid,
    pub(super) schedule: &'a Schedule,
    /// Tokens of the largest token tile.
    #[cfg(microscale_wgmma)]
    pub(super) most_tokens: &'a u32,
}

impl<'a> Work<'a> {
    /// The work of a grid. [`Self::write_plan`] must come before the plan is read.
    #[inline(always)]
    pub(super) fn new(grid: &'a GemmGrid) -> Self {
        // SAFETY: in the front of shared memory, which the launch gives, and aligned. It is written before it is read.
        let plan = unsafe { &*Self::place() };
        Self {
            grid,
            schedule: &plan.schedule,
            #[cfg(microscale_wgmma)]
            most_tokens: &plan.most_tokens,
        }
    }

    /// The place of the plan in shared memory.
    #[inline(always)]
    fn place() -> *mut Plan {
        warp::shared::<u128>().wrapping_byte_add(PLAN_OFFSET as usize).cast()
    }

    /// Brings the plan to shared memory: that of experts' rows, or the grid's for a token tile. A barrier must follow.
    ///
    /// # Safety
    /// The contract of the kernels; one warp of the block does so, with all lanes.
    #[inline(always)]
    pub(super) unsafe fn write_plan(&self, routed: &Routed, tile_n: u32) {
        let lane = warp::lane() as usize;
        // SAFETY: the place is in shared memory, and nobody reads it yet. Plans are whole pieces of 16 bytes on multiples of 16.
        unsafe {
            if !routed.plan.is_null() {
                // A piece a lane: copied by one lane, it would be copied byte by byte.
                if lane < size_of::<Plan>() / 16 {
                    let piece = *routed.plan.cast::<u128>().wrapping_add(lane);
                    *Self::place().cast::<u128>().wrapping_add(lane) = piece;
                }
            } else if lane == 0 {
                let most_tokens = self.grid.most_tokens(tile_n);
                *Self::place() = Plan { schedule: self.grid.schedule, most_tokens, tiles: 0 };
            }
        }
    }

    /// K-iterations of a work tile.
    #[inline(always)]
    pub(super) fn k_iterations(&self) -> u32 {
        self.grid.k_iterations.divisor as u32
    }
}

/// A thread block's part of a work tile.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// The work tile's number.
    pub(super) tile: u32,
    /// Its first k-iteration, and the one behind its last.
    pub(super) start: u32,
    pub(super) end: u32,
    /// 1 if the thread block has no other behind it.
    #[cfg_attr(not(microscale_wgmma), expect(dead_code, reason = "only warps that are told of shares ask"))]
    pub(super) last: u32,
}

impl Share {
    /// Returns whether this is all of the work tile.
    #[inline(always)]
    pub(super) fn is_whole(&self, work: &Work<'_>) -> bool {
        self.start == 0 && self.end == work.k_iterations()
    }
}

/// The work of a thread block, and how much of it was taken: whole work tiles and shared k-iterations.
pub(super) struct Shares<'a> {
    work: Work<'a>,
    taken: u32,
}

impl<'a> Shares<'a> {
    /// All that the thread block has.
    #[inline(always)]
    pub(super) fn new(work: Work<'a>) -> Self {
        Self { work, taken: 0 }
    }

    /// The next share.
    #[inline(always)]
    pub(super) fn next(&self) -> Option<Share> {
        let share = self.behind(self.taken);
        (share.start < share.end).then_some(share)
    }

    /// [`Self::next`] once more, where there is one: computed anew, so that it takes no registers in between.
    #[inline(always)]
    pub(super) fn again(&self) -> Share {
        self.behind(self.taken)
    }

    /// Takes the next share.
    #[inline(always)]
    pub(super) fn take(&mut self, share: &Share) {
        self.taken += if self.taken < self.work.schedule.waves { 1 } else { share.end - share.start };
    }

    /// The share behind what was taken; none of its k-iterations if that is all.
    #[inline(always)]
    fn behind(&self, taken: u32) -> Share {
        // The same in all lanes, which a shuffle tells the assembler; and neither it nor the compiler knows that it is the same
        // as before.
        let taken = warp::shuffle(taken, 0);
        let Work { grid, schedule, .. } = self.work;
        let (block, k_iterations) = (warp::thread_block(), self.work.k_iterations());
        let of_shared = taken.saturating_sub(schedule.waves);
        let next = schedule.first_shared_k_iteration(block) + of_shared;
        let left = schedule.first_shared_k_iteration(block + 1) - next;
        let (tile, start) = grid.k_iterations.divide_32(next);
        let end = k_iterations.min(start + left);
        if taken < schedule.waves {
            let last = u32::from(taken + 1 == schedule.waves && left == 0);
            Share { tile: taken * schedule.thread_blocks + block, start: 0, end: k_iterations, last }
        } else {
            Share { tile: schedule.first_shared + tile, start, end, last: u32::from(start + left == end) }
        }
    }
}

/// The first and the last of the thread blocks that have shares of a work tile.
#[inline(always)]
pub(super) fn sharers(work: &Work<'_>, tile: u32) -> [u32; 2] {
    let k_iterations = work.k_iterations();
    let first = (tile - work.schedule.first_shared) * k_iterations;
    [first, first + k_iterations - 1].map(|k_iteration| work.schedule.sharer(k_iteration))
}

/// The number of the place for the sums that a thread block leaves of a shared work tile. It has two: the first
/// for the tile in which it begins, the second for another that it does not finish.
#[inline(always)]
pub(super) fn place(work: &Work<'_>, tile: u32, block: u32) -> u32 {
    let begins_in_tile = (tile - work.schedule.first_shared) * work.k_iterations()
        <= work.schedule.first_shared_k_iteration(block);
    2 * block + u32::from(!begins_in_tile)
}
