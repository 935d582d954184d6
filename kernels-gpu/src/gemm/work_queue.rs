//! The tasks of a thread block, and the ring in shared memory in which those who copy tell those who multiply.

#[cfg(microscale_wgmma)]
use microscale_kernels_abi::gemm::stage::{
    QUEUE_ENTRIES as TASKS, QUEUE_ENTRY_BYTES as TASK_BYTES, QUEUE_OFFSET as TASKS_OFFSET,
};

use super::scheduler::Share;
#[cfg(microscale_wgmma)]
use crate::shared;

/// A share of a work tile, its rows and tokens, and the global scale of their expert's weights.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) share: Share,
    pub(super) expert: u32,
    /// The first token, and the one behind the last.
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) row_tile: u32,
    pub(super) token_tile: u32,
    pub(super) scale: f32,
}

/// The ring of tasks, each given with its first stage: finding a share, its tokens and their scale takes long.
#[cfg(microscale_wgmma)]
pub(super) struct Tasks {
    /// The address of the first.
    ring: u32,
    number: u32,
}

#[cfg(microscale_wgmma)]
impl Tasks {
    /// The ring at an address of shared memory, whose first task is the next one.
    #[inline(always)]
    pub(super) fn new(base: u32) -> Self {
        const { assert!(TASKS.is_power_of_two()) };
        Self { ring: base + TASKS_OFFSET, number: 0 }
    }

    /// The address of the next task.
    #[inline(always)]
    fn address(&self) -> u32 {
        self.ring + (self.number & (TASKS - 1)) * TASK_BYTES
    }

    /// Goes on to the task behind it.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.number += 1;
    }

    /// Gives a task.
    ///
    /// # Safety
    /// One thread does so, and arrives afterwards on the barrier of the first stage of the task, for whose being empty it has waited: all
    /// have done with the task that was here.
    #[inline(always)]
    pub(super) unsafe fn give(
        &self,
        &Task { share, expert, first, end, row_tile, token_tile, scale }: &Task,
    ) {
        let Share { tile, start, end: share_end, last } = share;
        // SAFETY: the caller's promise.
        unsafe {
            shared::store_16(self.address(), [tile, start, share_end, last]);
            shared::store_16(self.address() + 16, [expert, first, end, row_tile]);
            shared::store_16(self.address() + 32, [token_tile, scale.to_bits(), 0, 0]);
        }
    }

    /// The next task. It is read again each time, so that it takes no registers in between.
    ///
    /// # Safety
    /// It was given: its first stage is full.
    #[inline(always)]
    pub(super) unsafe fn next(&self) -> Task {
        // SAFETY: the caller's promise.
        let load = |bytes| unsafe { shared::load_16(self.address() + bytes) };
        let [tile, start, share_end, last] = load(0);
        let [expert, first, end, row_tile] = load(16);
        let [token_tile, scale, ..] = load(32);
        let share = Share { tile, start, end: share_end, last };
        Task { share, expert, first, end, row_tile, token_tile, scale: f32::from_bits(scale) }
    }

    /// Returns whether no task comes behind the next one.
    ///
    /// # Safety
    /// As for [`Self::next`].
    #[inline(always)]
    pub(super) unsafe fn next_is_last(&self) -> bool {
        // SAFETY: the caller's promise.
        let [.., last] = unsafe { shared::load_16(self.address()) };
        last != 0
    }
}
