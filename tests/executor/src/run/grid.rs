//! A running launch: its position in the grid, its statistics and its race detector.

use std::collections::BTreeMap;

use super::under_way::{Bulk, Cluster, Committed, Mbarrier, Pipe, Products};
use crate::fault::{Fault, FaultKind, Step, Trap, trap};
use crate::launch::{EXECUTED, Launch, SKIPPED, Schedule};
use crate::memory::{Memory, Shared, Wrong};
use crate::module::Kernel;
use crate::program::Space;
use crate::race::{Id, Races};
use crate::tensor::TensorMemory;

/// Lanes per warp.
pub(super) const WARP: u32 = 32;

/// A running launch.
pub(super) struct Grid<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) launch: &'a Launch,
    pub(super) memory: &'a mut Memory,
    pub(super) parameters: Vec<u8>,
    pub(super) races: Option<Races>,
    pub(super) random: Random,
    pub(super) seen: Vec<u8>,
    pub(super) lane_instructions: u64,
    pub(super) warp_instructions: u64,
    /// The current cluster (a single block without clusters), its index, and its blocks' shared
    /// memory.
    pub(super) cluster: Cluster,
    pub(super) number: u32,
    pub(super) shared: Shared,
    /// The mbarriers of the cluster's blocks, by address.
    pub(super) mbarriers: BTreeMap<u64, Mbarrier>,
    /// Bulk copies in flight.
    pub(super) bulk: Vec<Bulk>,
    /// The tensor memory of the cluster's blocks.
    pub(super) tensors: Vec<TensorMemory>,
    /// The address of an allocation that only this block of a pair has made.
    pub(super) half: Option<(u32, u32, u32)>,
    /// Asynchronous instructions for tensor memory, per issuing thread.
    pub(super) pipes: Vec<Pipe>,
    /// Arrivals of their commits that have not landed.
    pub(super) committed: Vec<Committed>,
    /// Asynchronous products that some warp has not waited for, per warp group.
    pub(super) products: Vec<Products>,
    /// Number of events that a waiting thread may be waiting for.
    pub(super) events: u64,
    /// Number of times since the last event that all waiting threads retried without success.
    pub(super) idle: u32,
    /// The current instruction, for faults.
    pub(super) pc: u32,
}

impl Grid<'_> {
    /// Records an event that a thread may be waiting for.
    pub(super) fn note_event(&mut self) {
        self.events += 1;
        self.idle = 0;
    }

    /// Returns whether an action that may happen early or late happens early.
    pub(super) fn early(&mut self) -> bool {
        match self.launch.schedule {
            Schedule::LowestFirst => true,
            Schedule::HighestFirst => false,
            Schedule::Random(_) => self.random.below(2) == 0,
        }
    }

    /// Returns a lane's fault with its instruction and thread.
    pub(super) fn fault(&self, warp: u32, trap: Trap) -> Fault {
        let (line, instruction) = self.kernel.instruction(self.pc as usize);
        let (block, thread) = self.block_and_thread(self.number, warp, trap.lane);
        Fault {
            kernel: self.kernel.name.clone(),
            line,
            instruction: instruction.into(),
            block,
            thread,
            kind: trap.kind,
        }
    }

    /// Returns the block and the thread of a recorded access, and its line and instruction.
    pub(super) fn earlier(&self, access: Id) -> ((u32, u32), (u32, String)) {
        let races = self.races.as_ref().expect("an access was recorded");
        let (record, lane) = races.record(access);
        let (line, instruction) = self.kernel.instruction(record.pc as usize);
        (self.block_and_thread(record.block, record.warp, lane), (line, instruction.into()))
    }

    /// Counts an instruction of `lanes` that `active` executed.
    #[inline]
    pub(super) fn count(&mut self, pc: u32, lanes: u32, active: u32) -> Step {
        self.warp_instructions += 1;
        self.lane_instructions += u64::from(active.count_ones());
        let executed = if active != 0 { EXECUTED } else { 0 };
        let skipped = if lanes != active { SKIPPED } else { 0 };
        self.seen[pc as usize] |= executed | skipped;
        if self.warp_instructions > self.launch.limit {
            return trap(lanes.trailing_zeros() & 31, FaultKind::Hanging);
        }
        Ok(())
    }
}

/// Returns the fault of an access.
#[cold]
pub(super) fn wrongly<T>(
    grid: &Grid,
    lane: u32,
    space: Space,
    address: u64,
    bytes: usize,
    wrong: Wrong,
) -> Step<T> {
    let access = |at: usize| match space {
        Space::Global => grid.memory.access(address, bytes, at),
        Space::Shared => grid.shared.access(address, bytes, at),
    };
    let kind = match wrong {
        Wrong::Uninitialised(at) => FaultKind::Uninitialised(access(at)),
        Wrong::NotConstant(at) => FaultKind::NotConstant(access(at)),
        Wrong::InFlight(at) => FaultKind::InFlight(access(at)),
        Wrong::Mbarrier(at) => FaultKind::Mbarrier(access(at), "these are bytes of an mbarrier"),
        Wrong::Unfenced(at, write) => {
            let ((_, thread), (line, instruction)) = grid.earlier(write);
            FaultKind::Unfenced { access: access(at), thread, line, instruction }
        }
        Wrong::Race(at, earlier) => {
            let ((block, thread), (line, instruction)) = grid.earlier(earlier);
            FaultKind::Race { access: access(at), block, thread, line, instruction }
        }
    };
    trap(lane, kind)
}

/// A small pseudo-random generator (SplitMix64), used only for schedules.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % u64::from(bound)) as u32
    }
}
