//! The parameters of the kernels that multiply packed activations.

use microscale_kernels_abi::experts::Plan;
use microscale_kernels_abi::gemm::params::GemmParams;
use microscale_kernels_abi::gemm::schedule::Schedule;
use microscale_kernels_abi::gemm::stage::PLAN_OFFSET;

use crate::hardware::warp;
use crate::product::problem::{Problem, Routed};

/// A kernel's parameters. All pointers are to global memory.
pub(super) struct Params<'a> {
    /// Weights, results and their routing.
    pub(super) problem: &'a Problem,
    /// Sizes and the schedule.
    pub(super) launch: Launch<'a>,
    /// The packed activations.
    pub(super) packed: *const u8,
    /// One semaphore per tile of 16 rows of the split work tiles.
    pub(super) semaphores: *mut u32,
    /// The workspace for partial sums of split work tiles.
    pub(super) partial_sums: *mut u8,
    /// The generic address of the tensor map of the weights' codes, for kernels that have one.
    #[cfg(microscale_tcgen05)]
    pub(super) weights_map: u64,
}

/// The sizes of a launch, with the schedule as the kernel reads it.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    pub(super) gemm: &'a GemmParams,
    /// The schedule, in shared memory.
    pub(super) schedule: &'a Schedule,
}

impl<'a> Launch<'a> {
    /// The launch with the schedule in shared memory. [`Self::write_plan`] must come before it is
    /// read.
    #[inline(always)]
    pub(super) fn new(gemm: &'a GemmParams) -> Self {
        // SAFETY: the plan's bytes lie before the stages in the shared memory of the launch, which
        // lives as long as the kernel, and are aligned. `write_plan` fills them before anything
        // reads them.
        let plan = unsafe { &*Self::shared_plan() };
        Self { gemm, schedule: &plan.schedule }
    }

    /// The plan's address in shared memory.
    #[inline(always)]
    fn shared_plan() -> *mut Plan {
        warp::shared::<u128>().wrapping_byte_add(PLAN_OFFSET as usize).cast()
    }

    /// Writes the plan to shared memory: the experts' plan, or one from the launch's own schedule.
    /// A barrier of the thread block must follow.
    ///
    /// # Safety
    /// The kernel's contract. One warp calls it, with all lanes.
    #[inline(always)]
    pub(super) unsafe fn write_plan(&self, routed: &Routed) {
        let lane = warp::lane() as usize;
        // SAFETY: `shared_plan` has room for a plan, which no thread reads before the barrier. The
        // experts' plan is global memory, by the kernel's contract. Both are multiples of 16 bytes
        // on 16 bytes.
        unsafe {
            if !routed.plan.is_null() {
                // 16 bytes per lane: a copy by one lane would be compiled to single bytes.
                if lane < size_of::<Plan>() / 16 {
                    let piece = *routed.plan.cast::<u128>().wrapping_add(lane);
                    *Self::shared_plan().cast::<u128>().wrapping_add(lane) = piece;
                }
            } else if lane == 0 {
                *Self::shared_plan() = Plan { schedule: self.gemm.schedule, tiles: 0 };
            }
        }
    }

    /// K-iterations per work tile.
    #[inline(always)]
    pub(super) fn k_iterations(&self) -> u32 {
        self.gemm.k_iterations.divisor as u32
    }
}
