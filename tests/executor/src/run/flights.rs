//! Copies from global to shared memory that go on while their threads do (ISA 9.7.9, `cp.async`).
//!
//! A copy happens at some time between its instruction and a wait of the same thread; no more is known. The
//! bytes that it writes are nobody's until then. The bytes that it reads are read at the beginning under
//! [`Schedule::LowestFirst`], at the end under [`Schedule::HighestFirst`], and at one of them by chance under
//! [`Schedule::Random`]. To the race detector a copy reads and writes at both.

use super::grid::{Grid, wrongly};
use crate::clock::Known;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::program::{Manner, Space};
use crate::race::Id;

/// The most bytes of a copy.
const MOST: usize = 16;

/// A warp's copies under way.
#[derive(Default)]
pub(super) struct Copies {
    /// The copies in the order in which they began.
    pub(super) flying: Vec<Flight>,
    /// The number of copies that began.
    pub(super) began: u64,
    /// The number of groups that each lane has closed.
    pub(super) closed: [u32; LANES],
    /// Mbarriers that await copies.
    pub(super) arrivals: Vec<Arrival>,
}

/// An mbarrier's wait for all copies that a lane began before.
pub(super) struct Arrival {
    pub(super) lane: u32,
    pub(super) pc: u32,
    /// The address of the mbarrier.
    pub(super) at: u64,
    /// The lane's copies before this number of the warp's are awaited.
    pub(super) before: u64,
    /// The access of the mbarrier's member, and what it knows: what the lane knew.
    pub(super) access: Option<Id>,
    pub(super) known: Known,
}

/// A lane's copy.
pub(super) struct Flight {
    pub(super) lane: u32,
    /// The number of copies that the warp had begun before it.
    pub(super) number: u64,
    /// The number of groups that the lane had closed before it.
    pub(super) group: u32,
    pub(super) pc: u32,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: usize,
    /// The number of these bytes that are read; zeros follow.
    pub(super) read: usize,
    /// The bytes that were read at the beginning, unless that is left for the end.
    pub(super) found: Option<[u8; MOST]>,
}

impl Copies {
    /// `cp.async.commit_group`: also of no copies.
    pub(super) fn close_group(&mut self, active: u32) {
        for (lane, closed) in self.closed.iter_mut().enumerate() {
            *closed += active >> lane & 1;
        }
    }
}

impl Flight {
    /// Reads the bytes that it copies.
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

    /// Begins to write, or writes.
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
