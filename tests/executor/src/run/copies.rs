//! Lanes that start copies from global to shared memory and wait for them (ISA 9.7.9, `cp.async`).

use super::flights::{Copies, Flight};
use super::grid::Grid;
use super::memory::lanes;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::launch::Schedule;
use crate::program::{Address, Manner, Slot};

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

    /// `cp.async.wait_group`, and `cp.async.wait_all` without a number. The copies' bytes are as if the lanes
    /// stored them now.
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
