//! Lanes that issue copies from global to shared memory and wait for them (ISA 9.7.9, `cp.async`).

use super::flights::{Arrival, Copies, Flight};
use super::grid::Grid;
use super::memory::lanes;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::program::{Address, Manner, Slot};

impl Warp {
    /// `cp.async` of each lane. The register `read` holds the number of bytes to read.
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
                number: self.copies.began,
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
            flight.found = grid.early().then_some(found);
            flight.store(grid, access, None)?;
            self.copies.began += 1;
            self.copies.flying.push(flight);
        }
        Ok(())
    }

    /// `cp.async.wait_group`, or `cp.async.wait_all` without `but`.
    ///
    /// The lanes store the bytes of the copies now.
    pub(super) fn await_copies(&mut self, grid: &mut Grid, active: u32, but: Option<u32>) -> Step {
        let Copies { flying, closed, .. } = &mut self.copies;
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

    /// `cp.async.mbarrier.arrive` of each lane. Without `.noinc` it is `counted`: the mbarrier
    /// expects one more arrival in this phase.
    pub(super) fn arrive_after_copies(
        &mut self,
        grid: &mut Grid,
        active: u32,
        at: Address,
        counted: bool,
    ) -> Step {
        self.check_address(grid, active, at)?;
        let own = self.begin_access(grid, active, Manner::Atomic)?;
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let at = self.address(at, lane);
            let own = own.map(|id| id + lane);
            let (access, known) = grid.begin_copy((self.index, lane), at, own, false)?;
            if counted {
                grid.expect_arrival(lane, at)?;
            }
            let (before, pc) = (self.copies.began, grid.pc);
            self.copies.arrivals.push(Arrival { lane, pc, at, before, access, known });
            if grid.early() {
                self.land_arrival(grid, self.copies.arrivals.len() - 1)?;
            }
        }
        Ok(())
    }

    /// Performs a pending arrival of an mbarrier, after the earlier ones of its lane.
    ///
    /// The copies of those earlier arrivals are a subset of this one's.
    pub(super) fn land_arrival(&mut self, grid: &mut Grid, index: usize) -> Step {
        let lane = self.copies.arrivals[index].lane;
        let mut left = self.copies.arrivals[..=index].iter().filter(|arrival| arrival.lane == lane).count();
        while let Some(first) = self.copies.arrivals.iter().position(|arrival| arrival.lane == lane)
            && left > 0
        {
            self.land_first_arrival(grid, first)?;
            left -= 1;
        }
        Ok(())
    }

    /// Completes the copies of a pending arrival, then counts the arrival at the mbarrier.
    ///
    /// The mbarrier's member stores the bytes.
    fn land_first_arrival(&mut self, grid: &mut Grid, index: usize) -> Step {
        let Arrival { lane, pc, at, before, access, known } = self.copies.arrivals.remove(index);
        grid.pc = pc;
        if let (Some(races), Some(access)) = (&mut grid.races, access) {
            let member = races.record(access).0.agent.expect("an mbarrier's member stores");
            races.clocks.instruct(member as usize, known);
        }
        let flying = std::mem::take(&mut self.copies.flying);
        let ends = |flight: &Flight| flight.lane == lane && flight.number < before;
        let (landing, rest): (Vec<_>, _) = flying.into_iter().partition(ends);
        self.copies.flying = rest;
        for flight in landing {
            let found = flight.load(grid, access)?;
            flight.store(grid, access, Some(flight.found.unwrap_or(found)))?;
        }
        grid.end_copy(lane, at, None)
    }

    /// Checks that lanes about to exit have waited for their copies.
    ///
    /// The ISA allows copies without a wait, but their bytes are unusable, so this is a fault.
    /// Copies that an mbarrier waits for go on.
    pub(super) fn leave_copies(&self, grid: &mut Grid, active: u32) -> Step {
        let Copies { flying, arrivals, .. } = &self.copies;
        let awaited = |flight: &Flight| {
            arrivals.iter().any(|arrival| arrival.lane == flight.lane && flight.number < arrival.before)
        };
        match flying.iter().find(|flight| active >> flight.lane & 1 == 1 && !awaited(flight)) {
            None => Ok(()),
            Some(flight) => {
                grid.pc = flight.pc;
                let access = grid.shared.access(flight.to, flight.bytes, 0);
                trap(flight.lane, FaultKind::NeverAwaited(access))
            }
        }
    }
}
