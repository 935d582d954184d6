//! A launch under way: its place in the grid, and its findings so far.

use std::collections::BTreeMap;

use super::under_way::{Bulk, Cluster, Mbarrier, Products};
use crate::fault::{Fault, FaultKind, Step, Trap, trap};
use crate::launch::{EXECUTED, Launch, SKIPPED, Schedule};
use crate::memory::{Memory, Shared, Wrong};
use crate::module::Kernel;
use crate::program::Space;
use crate::race::Races;

/// The lanes of a warp.
pub(super) const WARP: u32 = 32;

/// A launch under way.
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
    /// The cluster at hand, of one block if there are none, its number, and the shared memory of its blocks.
    pub(super) cluster: Cluster,
    pub(super) number: u32,
    pub(super) shared: Shared,
    /// The mbarriers of its blocks, by their addresses.
    pub(super) mbarriers: BTreeMap<u64, Mbarrier>,
    /// Bulk copies under way.
    pub(super) bulk: Vec<Bulk>,
    /// The asynchronous products of each warp group that some warp has not waited for.
    pub(super) products: Vec<Products>,
    /// The number of events that a thread that waits may have waited for.
    pub(super) events: u64,
    /// How often all threads that wait found nothing new, since the last event.
    pub(super) idle: u32,
    /// The instruction at hand, for faults.
    pub(super) pc: u32,
}

impl Grid<'_> {
    /// Something happened that a thread may wait for.
    pub(super) fn note_event(&mut self) {
        self.events += 1;
        self.idle = 0;
    }

    /// Whether what may happen early or late does so early.
    pub(super) fn early(&mut self) -> bool {
        match self.launch.schedule {
            Schedule::LowestFirst => true,
            Schedule::HighestFirst => false,
            Schedule::Random(_) => self.random.below(2) == 0,
        }
    }

    /// The fault of a lane, with its place.
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

    /// Counts an instruction of `lanes`, of which `active` executed it.
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

/// The fault of an access.
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
            let races = grid.races.as_ref().expect("a write was noted");
            let (record, lane) = races.record(write);
            let (line, instruction) = grid.kernel.instruction(record.pc as usize);
            let (_, thread) = grid.block_and_thread(record.block, record.warp, lane);
            let instruction = instruction.into();
            FaultKind::Unfenced { access: access(at), thread, line, instruction }
        }
        Wrong::Race(at, earlier) => {
            let races = grid.races.as_ref().expect("a race was found");
            let (record, lane) = races.record(earlier);
            let (line, instruction) = grid.kernel.instruction(record.pc as usize);
            let (block, thread) = grid.block_and_thread(record.block, record.warp, lane);
            FaultKind::Race { access: access(at), block, thread, line, instruction: instruction.into() }
        }
    };
    trap(lane, kind)
}

/// A small generator (SplitMix64): order only, nothing that must be hard to guess.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % u64::from(bound)) as u32
    }
}
