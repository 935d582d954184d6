//! The work queue in shared memory: producer warps pass work tiles to consumer warps.
//!
//! Finding a work tile takes many divisions and loads. One producer thread does it for the thread
//! block.

use microscale_kernels_abi::gemm::stage::{QUEUE_ENTRIES, QUEUE_ENTRY_BYTES, QUEUE_OFFSET};

use super::tile_scheduler::{KRange, WorkTile};
use crate::hardware::shared;

/// One end of the queue. Each warp has its own.
pub(super) struct WorkQueue {
    /// The address of the entries in shared memory.
    shared: u32,
    /// Entries before the front.
    passed: u32,
}

impl WorkQueue {
    /// The queue's first entry, in shared memory that starts at `base`.
    #[inline(always)]
    pub(super) fn new(base: u32) -> Self {
        const { assert!(QUEUE_ENTRIES.is_power_of_two()) };
        Self { shared: base + QUEUE_OFFSET, passed: 0 }
    }

    /// The address of the front entry.
    #[inline(always)]
    fn front_address(&self) -> u32 {
        self.shared + (self.passed & (QUEUE_ENTRIES - 1)) * QUEUE_ENTRY_BYTES
    }

    /// Advances to the next entry.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.passed += 1;
    }

    /// Writes the front entry.
    ///
    /// # Safety
    /// One thread calls it. It has acquired the first stage of the work tile, so that all consumers
    /// have finished the work tile that was in this entry, and it arrives on that stage's full
    /// barrier afterwards.
    #[inline(always)]
    pub(super) unsafe fn push(
        &self,
        &WorkTile { k_range, expert, first_token, end_token, row_tile, token_tile, global_scale }: &WorkTile,
    ) {
        let KRange { tile, start, end, last } = k_range;
        // SAFETY: the entry has 48 bytes on 16 bytes, and no thread reads it before the stage is
        // committed.
        unsafe {
            shared::store_16(self.front_address(), [tile, start, end, last]);
            shared::store_16(self.front_address() + 16, [expert, first_token, end_token, row_tile]);
            shared::store_16(self.front_address() + 32, [token_tile, global_scale.to_bits(), 0, 0]);
        }
    }

    /// Reads the front entry. Each call reads it again, so that it takes no registers meanwhile.
    ///
    /// # Safety
    /// The first stage of the work tile is full, and the warp has not released its last one.
    #[inline(always)]
    pub(super) unsafe fn front(&self) -> WorkTile {
        // SAFETY: the entry has 48 bytes on 16 bytes; the full stage says that it was written.
        let load = |bytes| unsafe { shared::load_16(self.front_address() + bytes) };
        let [tile, start, k_end, last] = load(0);
        let [expert, first_token, end_token, row_tile] = load(16);
        let [token_tile, scale, ..] = load(32);
        let k_range = KRange { tile, start, end: k_end, last };
        let global_scale = f32::from_bits(scale);
        WorkTile { k_range, expert, first_token, end_token, row_tile, token_tile, global_scale }
    }

    /// Returns whether the front entry is the thread block's last.
    ///
    /// # Safety
    /// As for [`Self::front`].
    #[inline(always)]
    pub(super) unsafe fn front_is_last(&self) -> bool {
        // SAFETY: as in `front`.
        let [.., last] = unsafe { shared::load_16(self.front_address()) };
        last != 0
    }
}
