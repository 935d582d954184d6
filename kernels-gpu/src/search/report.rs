//! Counts that a search adds to the report.

use microscale_formats::BlockEvents;
use microscale_kernels_abi::ReportSlot;
use microscale_kernels_abi::launch::WARP;

use crate::hardware::{ptx, warp};

/// What happened in blocks that did not get the NaN scale.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    clipped: u32,
    flushed: u32,
    scale_saturated: u32,
    rescaled: u32,
    tried: u32,
}

impl Counts {
    /// Adds a block.
    #[inline(always)]
    pub(super) fn add(&mut self, events: BlockEvents, changed: bool, tried: u32) {
        self.clipped += u32::from(events.clipped);
        self.flushed += u32::from(events.flushed);
        self.scale_saturated += u32::from(events.scale_saturated);
        self.rescaled += u32::from(changed);
        self.tried += tried;
    }

    /// The counts of a warp. Lanes with `counted` have one block each. All lanes of the warp call
    /// it.
    #[inline(always)]
    pub(super) fn of_lanes(counted: bool, events: BlockEvents, changed: bool, tried: u32) -> Self {
        let count = |happened: bool| warp::ballot(counted && happened).count_ones();
        let mut all_tried = if counted { tried } else { 0 };
        let mut distance = 1;
        while distance < WARP {
            all_tried += warp::shuffle_xor(all_tried, distance);
            distance *= 2;
        }
        Self {
            clipped: count(events.clipped),
            flushed: count(events.flushed),
            scale_saturated: count(events.scale_saturated),
            rescaled: count(changed),
            tried: all_tried,
        }
    }
}

/// Adds counts to the report. Entered by one lane.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
pub(super) unsafe fn add_to_report(counts: &Counts, report: *mut ReportSlot) {
    let Counts { clipped, flushed, scale_saturated, rescaled, tried } = *counts;
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        ptx::add_to_counter(&raw mut (*report).rescaled, u64::from(rescaled));
        ptx::add_to_counter(&raw mut (*report).tried, u64::from(tried));
        if clipped | flushed | scale_saturated != 0 {
            ptx::add_to_counter(&raw mut (*report).clipped, u64::from(clipped));
            ptx::add_to_counter(&raw mut (*report).flushed, u64::from(flushed));
            ptx::add_to_counter(&raw mut (*report).scale_saturated, u64::from(scale_saturated));
        }
    }
}
