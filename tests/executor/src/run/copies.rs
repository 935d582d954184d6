//! Copies from global to shared memory that go on while their threads do (ISA 9.7.9, `cp.async`).
//!
//! All that is known of when a copy happens is that it does between its instruction and a wait of the same thread.
//! What it writes is nobody's until then. What it reads is read at the beginning under [`Schedule::LowestFirst`], at
//! the end under [`Schedule::HighestFirst`], and at one of them by chance under [`Schedule::Random`]. To the race
//! detector a copy reads and writes at both.

use super::Grid;
use super::memory::{lanes, wrongly};
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::launch::Schedule;
use crate::memory::Manner;
use crate::program::{Address, Slot, Space};
use crate::race::Id;

/// The most bytes of a copy.
const MOST: usize = 16;

/// A warp's copies under way.
#[derive(Default)]
pub(super) struct Copies {
    /// In the order in which they began.
    flying: Vec<Flight>,
    /// How many groups each lane has closed.
    closed: [u32; LANES],
}

/// A lane's copy.
struct Flight {
    lane: u32,
    /// How many groups the lane had closed before it.
    group: u32,
    pc: u32,
    to: u64,
    from: u64,
    bytes: usize,
    /// Of these, so many are read, and zeros follow.
    read: usize,
    /// What was read at the beginning, unless that is left for the end.
    found: Option<[u8; MOST]>,
}

impl Copies {
    /// `cp.async.commit_group`: also of no copies.
    pub(super) fn close_group(&mut self, active: u32) {
        for (lane, closed) in self.closed.iter_mut().enumerate() {
            *closed += active >> lane & 1;
        }
    }
}

impl Warp {
    /// `cp.async` of lanes that read so many bytes as a register says.
    pub(super) fn copy(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: Address,
        from: Address,
        (bytes, read): (usize, Slot),
    ) -> Step {
        self.check_address(grid, active, to)?;
        self.check_address(grid, active, from)?;
        let read = *self.registers.word(&grid.kernel.program, read, active)?;
        let access = self.begin_access(grid, active, Manner::Weak)?;
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let access = access.map(|id| id + lane);
            let mut flight = Flight {
                lane,
                group: self.copies.closed[lane as usize],
                pc: grid.pc,
                to: self.address(to, lane),
                from: self.address(from, lane),
                bytes,
                read: read[lane as usize] as usize,
                found: None,
            };
            if flight.read > bytes {
                return trap(lane, FaultKind::CopySize { read: flight.read, bytes });
            }
            let found = flight.load(grid, access)?;
            let late = match grid.launch.schedule {
                Schedule::LowestFirst => false,
                Schedule::HighestFirst => true,
                Schedule::Random(_) => grid.random.below(2) == 1,
            };
            flight.found = (!late).then_some(found);
            flight.store(grid, access, None)?;
            self.copies.flying.push(flight);
        }
        Ok(())
    }

    /// `cp.async.wait_group`, and `cp.async.wait_all` without a number. The copies' bytes are as if the lanes stored
    /// them now.
    pub(super) fn await_copies(&mut self, grid: &mut Grid, active: u32, but: Option<u32>) -> Step {
        let Copies { flying, closed } = &mut self.copies;
        let ends = |flight: &Flight| {
            let closed_since = closed[flight.lane as usize] - flight.group;
            active >> flight.lane & 1 == 1 && but.is_none_or(|but| closed_since > but)
        };
        let (landing, rest): (Vec<_>, _) = std::mem::take(flying).into_iter().partition(ends);
        *flying = rest;
        if landing.is_empty() {
            return Ok(());
        }
        let access = self.begin_access(grid, active, Manner::Weak)?;
        for flight in landing {
            let access = access.map(|id| id + flight.lane);
            let found = flight.load(grid, access)?;
            flight.store(grid, access, Some(flight.found.unwrap_or(found)))?;
        }
        Ok(())
    }

    /// Before these lanes exit. The ISA allows copies that nobody waits for; but nobody can use one.
    pub(super) fn leave_copies(&self, grid: &mut Grid, active: u32) -> Step {
        match self.copies.flying.iter().find(|flight| active >> flight.lane & 1 == 1) {
            None => Ok(()),
            Some(flight) => {
                grid.pc = flight.pc;
                let access = grid.shared.access(flight.to, flight.bytes, 0);
                trap(flight.lane, FaultKind::NeverAwaited(access))
            }
        }
    }
}

impl Flight {
    /// What it copies.
    fn load(&self, grid: &mut Grid, access: Option<Id>) -> Step<[u8; MOST]> {
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
    fn store(&self, grid: &mut Grid, access: Option<Id>, found: Option<[u8; MOST]>) -> Step {
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
