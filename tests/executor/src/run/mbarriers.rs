//! Mbarriers: threads and copies that arrive, and threads that wait (ISA 9.7.13.15).
//!
//! Arriving releases. Observing a completed phase acquires.

use super::grid::{Grid, wrongly};
use super::memory::lanes;
use super::under_way::Mbarrier;
use super::warp::Warp;
use crate::clock::Known;
use crate::fault::{FaultKind, Step, trap};
use crate::memory::Wrong;
use crate::program::{Address, Manner, MbarrierAction, Space};
use crate::race::{Id, Record};
use crate::semantics::Counts;

/// Size of an mbarrier in bytes.
const BYTES: usize = 8;

/// Returns the fault of a misused mbarrier.
#[cold]
pub(super) fn misused<T>(grid: &Grid, lane: u32, address: u64, problem: &'static str) -> Step<T> {
    trap(lane, FaultKind::Mbarrier(grid.shared.access(address, BYTES, 0), problem))
}

impl Grid<'_> {
    /// Returns the mbarrier at an address for a lane's access.
    pub(super) fn mbarrier(&mut self, lane: u32, address: u64, access: Option<Id>) -> Step<&mut Mbarrier> {
        if let Err(kind) = self.shared.locate(address, BYTES) {
            return trap(lane, kind);
        }
        let Some(init) = self.mbarriers.get(&address).map(|barrier| barrier.init) else {
            return misused(self, lane, address, "nobody initialised this mbarrier");
        };
        if let (Some(races), Some(init), Some(access)) = (&self.races, init, access)
            && races.race(init, access)
        {
            return wrongly(self, lane, Space::Shared, address, BYTES, Wrong::Race(0, init));
        }
        Ok(self.mbarriers.get_mut(&address).expect("it was found"))
    }

    /// Registers a new copy at its mbarrier. Returns the record of the copy's accesses and the
    /// lane's clock.
    ///
    /// Copies of the asynchronous proxy need a fence after the mbarrier's initialization.
    pub(super) fn begin_copy(
        &mut self,
        (warp, lane): (u32, u32),
        address: u64,
        access: Option<Id>,
        asynchronous: bool,
    ) -> Step<(Option<Id>, Known)> {
        let pc = self.pc;
        let init = self.mbarrier(lane, address, access)?.init;
        if let (Some(races), Some(init), Some(access), true) = (&self.races, init, access, asynchronous)
            && races.unfenced(init, access, false, true)
        {
            return misused(self, lane, address, "no fence between an mbarrier's beginning and a copy");
        }
        let barrier = self.mbarriers.get_mut(&address).expect("it was found");
        barrier.copies += 1;
        barrier.last = Some((barrier.counts.phase, (warp, lane, pc)));
        let (member, phase) = (barrier.member, barrier.counts.phase);
        let mut known = Known::default();
        if let Some(races) = &mut self.races {
            races.clocks.release(warp, 1 << lane, &mut known);
        }
        let record = Record {
            block: self.number,
            warp,
            time: phase,
            pc,
            atomic: false,
            agent: Some(member as u32),
            asynchronous,
        };
        Ok((self.begin_record(lane, record)?, known))
    }

    /// Makes an mbarrier wait for one more arrival in its phase.
    pub(super) fn expect_arrival(&mut self, lane: u32, address: u64) -> Step {
        let barrier = self.mbarriers.get_mut(&address).expect("it counts a copy");
        let expected = barrier.counts.expect_arrival();
        expected.or_else(|problem| misused(self, lane, address, problem))
    }

    /// Counts a landed copy: its bytes, or an arrival without `bytes`.
    pub(super) fn end_copy(&mut self, lane: u32, address: u64, bytes: Option<usize>) -> Step {
        let barrier = self.mbarriers.get_mut(&address).expect("it counts a copy");
        barrier.copies -= 1;
        barrier.told.learn(barrier.member, barrier.counts.phase + 1);
        let complete = match bytes {
            Some(bytes) => barrier.counts.complete(bytes),
            None => barrier.counts.arrive(),
        };
        self.counted(lane, address, complete)
    }

    /// Handles a change of an mbarrier's counts.
    pub(super) fn counted(&mut self, lane: u32, address: u64, complete: Result<bool, &'static str>) -> Step {
        self.note_event();
        let complete = complete.or_else(|problem| misused(self, lane, address, problem))?;
        let barrier = self.mbarriers.get_mut(&address).expect("it was counted");
        if complete {
            barrier.complete.join(&std::mem::take(&mut barrier.told));
            if barrier.copies > 0 {
                let problem = "a phase of this mbarrier is complete before a copy that it is to count";
                return misused(self, lane, address, problem);
            }
        }
        Ok(())
    }

    /// Returns a copy whose completion no thread observed, at the end of a block.
    pub(super) fn forgotten_copy(&self) -> Option<(u64, (u32, u32, u32))> {
        let forgotten = |(&address, barrier): (&u64, &Mbarrier)| {
            let (phase, of) = barrier.last?;
            (barrier.found <= phase).then_some((address, of))
        };
        self.mbarriers.iter().find_map(forgotten)
    }

    /// Returns the fault of a copy without a wait. It names the mbarrier's bytes.
    pub(super) fn never_awaited(&self, address: u64) -> FaultKind {
        FaultKind::NeverAwaited(self.shared.access(address, BYTES, 0))
    }
}

impl Warp {
    /// `mbarrier.init`, `mbarrier.inval`, `mbarrier.arrive` and `mbarrier.try_wait`.
    ///
    /// Returns whether the lanes must wait, because all of them tried and found their phases
    /// incomplete.
    pub(super) fn mbarrier(
        &mut self,
        grid: &mut Grid,
        active: u32,
        action: MbarrierAction,
        at: Address,
    ) -> Step<bool> {
        self.check_address(grid, active, at)?;
        let program = &grid.kernel.program;
        let operand = match action {
            MbarrierAction::Initialise(slot)
            | MbarrierAction::Expect(slot)
            | MbarrierAction::Try { parity: slot, .. } => *self.registers.word(program, slot, active)?,
            MbarrierAction::Arrive | MbarrierAction::Invalidate => [0; 32],
        };
        let manner = match action {
            MbarrierAction::Initialise(_) | MbarrierAction::Invalidate => Manner::Weak,
            _ => Manner::Atomic,
        };
        let access = self.begin_access(grid, active, manner)?;
        let turn = self.turn(grid);
        let mut found = 0;
        for lane in lanes(grid.launch.schedule, active, turn) {
            let address = self.address(at, lane);
            let access = access.map(|id| id + lane);
            let operand = operand[lane as usize];
            match action {
                MbarrierAction::Initialise(_) => self.initialise(grid, lane, address, operand, access)?,
                MbarrierAction::Invalidate => self.invalidate(grid, lane, address, access)?,
                MbarrierAction::Arrive => self.arrive_at(grid, lane, address, None, access)?,
                MbarrierAction::Expect(_) => self.arrive_at(grid, lane, address, Some(operand), access)?,
                MbarrierAction::Try { .. } => {
                    found |= u32::from(self.try_wait(grid, lane, address, operand, access)?) << lane;
                }
            }
        }
        let MbarrierAction::Try { to, .. } = action else { return Ok(false) };
        self.registers.set_predicate(to, active, found);
        Ok(found == 0)
    }

    fn initialise(
        &mut self,
        grid: &mut Grid,
        lane: u32,
        address: u64,
        count: u32,
        access: Option<Id>,
    ) -> Step {
        if grid.mbarriers.contains_key(&address) {
            return misused(grid, lane, address, "this mbarrier is in use already");
        }
        let counts = Counts::new(count).or_else(|problem| misused(grid, lane, address, problem))?;
        let races = grid.races.as_ref().zip(access);
        let (memory, offset) = grid.shared.locate(address, BYTES).or_else(|kind| trap(lane, kind))?;
        if let Err(wrong) = memory.reserve(offset..offset + BYTES, races) {
            return wrongly(grid, lane, Space::Shared, address, BYTES, wrong);
        }
        let member = grid.races.as_mut().map_or(0, |races| races.clocks.add_member());
        let (told, complete) = (Known::default(), Known::default());
        let barrier =
            Mbarrier { counts, member, init: access, told, complete, copies: 0, last: None, found: 0 };
        grid.mbarriers.insert(address, barrier);
        Ok(())
    }

    /// `mbarrier.inval`. The bytes count as not written.
    fn invalidate(&mut self, grid: &mut Grid, lane: u32, address: u64, access: Option<Id>) -> Step {
        let barrier = grid.mbarrier(lane, address, access)?;
        if barrier.copies > 0 {
            return misused(grid, lane, address, "an mbarrier ends while copies are in flight");
        }
        let races = grid.races.as_ref().zip(access);
        let (memory, offset) = grid.shared.locate(address, BYTES).or_else(|kind| trap(lane, kind))?;
        if let Err(wrong) = memory.release(offset..offset + BYTES, races) {
            return wrongly(grid, lane, Space::Shared, address, BYTES, wrong);
        }
        grid.mbarriers.remove(&address);
        Ok(())
    }

    fn arrive_at(
        &mut self,
        grid: &mut Grid,
        lane: u32,
        address: u64,
        expected: Option<u32>,
        access: Option<Id>,
    ) -> Step {
        let mut told = std::mem::take(&mut grid.mbarrier(lane, address, access)?.told);
        if let Some(races) = &mut grid.races {
            races.clocks.release(self.index, 1 << lane, &mut told);
        }
        let barrier = grid.mbarrier(lane, address, access)?;
        barrier.told = told;
        let expects = barrier.counts.expect(expected.unwrap_or(0));
        let complete = expects.and_then(|()| barrier.counts.arrive());
        grid.counted(lane, address, complete)
    }

    fn try_wait(
        &mut self,
        grid: &mut Grid,
        lane: u32,
        address: u64,
        parity: u32,
        access: Option<Id>,
    ) -> Step<bool> {
        if parity > 1 {
            return misused(grid, lane, address, "a parity is 0 or 1");
        }
        let barrier = grid.mbarrier(lane, address, access)?;
        if !barrier.counts.passed(parity) {
            return Ok(false);
        }
        barrier.found = barrier.counts.phase;
        let said = barrier.complete.clone();
        if let Some(races) = &mut grid.races {
            races.clocks.acquire(self.index, 1 << lane, &said);
        }
        Ok(true)
    }
}
