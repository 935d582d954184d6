//! In-flight copies from global to shared memory (ISA 9.7.9, `cp.async`).
//!
//! A copy happens at an unknown time between its instruction and a wait of the same thread. Until
//! then the destination is inaccessible. The source is read when the copy starts under
//! [`Schedule::LowestFirst`], when it ends under [`Schedule::HighestFirst`], and at a random one of
//! the two under [`Schedule::Random`]. For the race detector a copy reads and writes at both.

use super::grid::{Grid, wrongly};
use crate::clock::Known;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::program::{Manner, Space};
use crate::race::Id;

/// Maximum size of a copy in bytes.
const MOST: usize = 16;

/// A warp's copies in flight.
#[derive(Default)]
pub(super) struct Copies {
    /// The copies, in the order of issue.
    pub(super) flying: Vec<Flight>,
    /// Number of issued copies.
    pub(super) began: u64,
    /// Number of groups that each lane has closed.
    pub(super) closed: [u32; LANES],
    /// Pending arrivals at mbarriers.
    pub(super) arrivals: Vec<Arrival>,
}

/// An arrival at an mbarrier that waits for all earlier copies of a lane.
pub(super) struct Arrival {
    pub(super) lane: u32,
    pub(super) pc: u32,
    /// The address of the mbarrier.
    pub(super) at: u64,
    /// Waits for the lane's copies whose number is below this one.
    pub(super) before: u64,
    /// The access and the clock of the mbarrier's member. The clock is the lane's at issue.
    pub(super) access: Option<Id>,
    pub(super) known: Known,
}

/// A lane's copy.
pub(super) struct Flight {
    pub(super) lane: u32,
    /// Number of copies that the warp issued before it.
    pub(super) number: u64,
    /// Number of groups that the lane closed before it.
    pub(super) group: u32,
    pub(super) pc: u32,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: usize,
    /// Number of bytes to read. The rest is filled with zeros.
    pub(super) read: usize,
    /// The source bytes, if they were read at the start.
    pub(super) found: Option<[u8; MOST]>,
}

impl Copies {
    /// `cp.async.commit_group`. The group may be empty.
    pub(super) fn close_group(&mut self, active: u32) {
        for (lane, closed) in self.closed.iter_mut().enumerate() {
            *closed += active >> lane & 1;
        }
    }
}

impl Flight {
    /// Reads the source bytes.
    pub(super) fn load(&self, grid: &mut Grid, access: Option<Id>) -> Step<[u8; MOST]> {
        let mut found = [0; MOST];
        let &Self { lane, from, bytes, read, .. } = self;
        if read == 0 {
            if !from.is_multiple_of(bytes as u64) {
                return trap(lane, FaultKind::Misaligned(grid.memory.access(from, bytes, 0)));
            }
            return Ok(found);
        }
        let races = grid.races.as_ref().zip(access);
        let (memory, at) = grid.memory.locate_first(from, read, bytes).or_else(|kind| trap(lane, kind))?;
        match memory.load(at..at + read, Manner::Weak, races) {
            Ok(bytes) => found[..read].copy_from_slice(bytes),
            Err(wrong) => return wrongly(grid, lane, Space::Global, from, read, wrong),
        }
        Ok(found)
    }

    /// Starts the write, or completes it with the bytes that were read.
    pub(super) fn store(&self, grid: &mut Grid, access: Option<Id>, found: Option<[u8; MOST]>) -> Step {
        let &Self { lane, to, bytes, .. } = self;
        let races = grid.races.as_ref().zip(access);
        let (memory, at) = grid.shared.locate(to, bytes).or_else(|kind| trap(lane, kind))?;
        let stored = match found {
            None => memory.depart(at..at + bytes, races),
            Some(found) => memory.land(at..at + bytes, &found[..bytes], races),
        };
        stored.or_else(|wrong| wrongly(grid, lane, Space::Shared, to, bytes, wrong))
    }
}
