//! Bulk copies from global to shared memory (ISA 9.7.9, `cp.async.bulk`), and landings at
//! mbarriers.
//!
//! The destination is inaccessible until the copy lands. It lands at its instruction under
//! [`Schedule::LowestFirst`], when nothing else can continue under [`Schedule::HighestFirst`], and
//! at random under [`Schedule::Random`]. After that, a thread that has not observed the mbarrier's
//! completed phase races with the copy.

use super::grid::{Grid, wrongly};
use super::memory::lanes;
use super::under_way::Bulk;
use super::warp::Warp;
use crate::fault::{Fault, FaultKind, Step, trap};
use crate::launch::Schedule;
use crate::memory::Shared;
use crate::program::{Address, Manner, Slot, Space};
use crate::race::{Id, Record};

/// Required alignment of both addresses and of the size.
const ALIGN: usize = 16;

impl Warp {
    /// `cp.async.bulk` of each lane.
    pub(super) fn bulk_copy(
        &mut self,
        grid: &mut Grid,
        active: u32,
        addresses: [Address; 3],
        bytes: Slot,
        blocks: Option<Slot>,
    ) -> Step {
        for address in addresses {
            self.check_address(grid, active, address)?;
        }
        let sizes = *self.registers.word(&grid.kernel.program, bytes, active)?;
        let masks = match blocks {
            Some(blocks) => Some(*self.registers.word(&grid.kernel.program, blocks, active)?),
            None => None,
        };
        let own = self.begin_access(grid, active, Manner::Atomic)?;
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let bytes = sizes[lane as usize] as usize;
            if !bytes.is_multiple_of(ALIGN) {
                return trap(lane, FaultKind::BulkSize(bytes));
            }
            let own = own.map(|id| id + lane);
            let [to, from, at] = addresses.map(|address| self.address(address, lane));
            let Some(masks) = &masks else {
                self.copy_to_block(grid, lane, [to, from, at], bytes, own)?;
                continue;
            };
            for rank in (0..u16::BITS).filter(|rank| masks[lane as usize] >> rank & 1 == 1) {
                if rank >= grid.launch.cluster || grid.cluster.ended(rank) {
                    return trap(lane, FaultKind::NoSuchBlock { rank });
                }
                let [to, at] =
                    [to, at].map(|address| Shared::address(rank.into(), Shared::of_block(address)));
                self.copy_to_block(grid, lane, [to, from, at], bytes, own)?;
            }
        }
        Ok(())
    }

    /// A lane's copy to one block: `to`, `from`, and the mbarrier at `at`.
    fn copy_to_block(
        &mut self,
        grid: &mut Grid,
        lane: u32,
        [to, from, at]: [u64; 3],
        bytes: usize,
        own: Option<Id>,
    ) -> Step {
        let (access, known) = grid.begin_copy((self.index, lane), at, own, true)?;
        let mut copy =
            Bulk { warp: self.index, lane, pc: grid.pc, to, from, bytes, at, access, known, found: None };
        let found = copy.load(grid)?;
        copy.store(grid, None)?;
        copy.found = grid.early().then_some(found);
        if grid.early() {
            copy.land(grid)?;
        } else {
            grid.bulk.push(copy);
        }
        Ok(())
    }
}

impl Bulk {
    /// Reads the source bytes.
    fn load(&self, grid: &mut Grid) -> Step<Vec<u8>> {
        self.instruct(grid);
        let &Self { lane, from, bytes, .. } = self;
        let races = grid.races.as_ref().zip(self.access);
        let (memory, at) = grid.memory.locate_first(from, bytes, ALIGN).or_else(|kind| trap(lane, kind))?;
        match memory.load(at..at + bytes, Manner::Weak, races) {
            Ok(found) => Ok(found.to_vec()),
            Err(wrong) => wrongly(grid, lane, Space::Global, from, bytes, wrong),
        }
    }

    /// Starts the write, or completes it with the bytes that were read.
    fn store(&self, grid: &mut Grid, found: Option<&[u8]>) -> Step {
        self.instruct(grid);
        let &Self { lane, to, bytes, .. } = self;
        let races = grid.races.as_ref().zip(self.access);
        let (memory, at) = grid.shared.locate_aligned(to, bytes, ALIGN).or_else(|kind| trap(lane, kind))?;
        let stored = match found {
            None => memory.depart(at..at + bytes, races),
            Some(found) => memory.land(at..at + bytes, found, races),
        };
        stored.or_else(|wrong| wrongly(grid, lane, Space::Shared, to, bytes, wrong))
    }

    /// Gives the mbarrier's member the thread's clock. The copy's accesses belong to that member.
    fn instruct(&self, grid: &mut Grid) {
        if let (Some(races), Some(access)) = (&mut grid.races, self.access) {
            let member = races.record(access).0.agent.expect("an mbarrier's member copies");
            races.clocks.instruct(member as usize, self.known.clone());
        }
    }

    /// Lands the copy and counts it at its mbarrier.
    fn land(self, grid: &mut Grid) -> Step {
        grid.pc = self.pc;
        let found = self.load(grid)?;
        self.store(grid, Some(self.found.as_ref().unwrap_or(&found)))?;
        grid.end_copy(self.lane, self.at, Some(self.bytes))
    }
}

impl Grid<'_> {
    /// Lands one copy that an mbarrier counts, an arrival of a commit, or an instruction for tensor
    /// memory, if any: the last one, or a random one.
    pub(super) fn land_one(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let arrivals = warps.iter().map(|warp| warp.copies.arrivals.len()).sum::<usize>();
        let pipes = self.pipes.iter().filter(|pipe| !pipe.waiting.is_empty()).count();
        let all = self.bulk.len() + arrivals + self.committed.len() + pipes;
        if all == 0 {
            return Ok(false);
        }
        let mut chosen = match self.launch.schedule {
            Schedule::Random(_) => self.random.below(all as u32) as usize,
            _ => all - 1,
        };
        if chosen < self.bulk.len() {
            let copy = self.bulk.remove(chosen);
            let warp = copy.warp;
            copy.land(self).map_err(|trap| self.fault(warp, trap))?;
            return Ok(true);
        }
        chosen -= self.bulk.len();
        if let Some(after) = chosen.checked_sub(arrivals) {
            match after.checked_sub(self.committed.len()) {
                None => self.land_committed(after)?,
                Some(pipe) => self.advance(pipe)?,
            }
            return Ok(true);
        }
        for warp in warps {
            let here = warp.copies.arrivals.len();
            if chosen < here {
                warp.land_arrival(self, chosen).map_err(|trap| self.fault(warp.index, trap))?;
                break;
            }
            chosen -= here;
        }
        Ok(true)
    }

    /// Lands all copies that mbarriers count at the end of a block. Some thread must have waited
    /// for each.
    pub(super) fn land_all(&mut self, warps: &mut [Warp]) -> Result<(), Fault> {
        while self.land_one(warps)? {}
        self.leave_tensors()?;
        match self.forgotten_copy() {
            None => Ok(()),
            Some((address, (warp, lane, pc))) => {
                self.pc = pc;
                let kind = self.never_awaited(address).into();
                Err(self.fault(warp, crate::fault::Trap { lane, kind }))
            }
        }
    }

    /// Records an access on behalf of a lane for the race detector.
    pub(super) fn begin_record(&mut self, lane: u32, record: Record) -> Step<Option<Id>> {
        let Some(races) = &mut self.races else { return Ok(None) };
        match races.begin(record) {
            Some(id) => Ok(Some(id + lane)),
            None => trap(lane, FaultKind::Hanging),
        }
    }
}
