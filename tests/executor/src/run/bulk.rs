//! Bulk copies and tensor copies from global to shared memory (ISA 9.7.9, `cp.async.bulk` and
//! `cp.async.bulk.tensor`), and landings at mbarriers.
//!
//! The destination is inaccessible until the copy lands. It lands at its instruction under
//! [`Schedule::LowestFirst`], when nothing else can continue under [`Schedule::HighestFirst`], and
//! at random under [`Schedule::Random`]. After that, a thread that has not observed the mbarrier's
//! completed phase races with the copy.

use super::grid::{Grid, wrongly};
use super::memory::lanes;
use super::under_way::{Bulk, Source};
use super::warp::Warp;
use crate::fault::{Fault, FaultKind, Step, trap};
use crate::launch::Schedule;
use crate::memory::{Shared, address_of_parameters};
use crate::program::{Address, BulkSource, Manner, Slot, Space};
use crate::race::{Id, Record};
use crate::tensor_map::{self, Run, Swizzle, TensorMap};

/// Required alignment of both addresses and of the size.
const ALIGN: usize = 16;
/// Required alignment of a tensor copy's destination.
const TENSOR_ALIGN: usize = 128;

impl Warp {
    /// `cp.async.bulk` or `cp.async.bulk.tensor` of each lane.
    pub(super) fn bulk_copy(
        &mut self,
        grid: &mut Grid,
        active: u32,
        [to, at]: [Address; 2],
        from: &BulkSource,
        blocks: Option<Slot>,
    ) -> Step {
        let (BulkSource::Bytes { from: first, .. } | BulkSource::Tensor { map: first, .. }) = *from;
        for address in [to, first, at] {
            self.check_address(grid, active, address)?;
        }
        let masks = match blocks {
            Some(blocks) => Some(*self.registers.word(&grid.kernel.program, blocks, active)?),
            None => None,
        };
        let own = self.begin_access(grid, active, Manner::Atomic)?;
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let source = self.bulk_source(grid, active, lane, from)?;
            let own = own.map(|id| id + lane);
            let [to, at] = [to, at].map(|address| self.address(address, lane));
            let Some(masks) = &masks else {
                self.copy_to_block(grid, lane, [to, at], source, own)?;
                continue;
            };
            for rank in (0..u16::BITS).filter(|rank| masks[lane as usize] >> rank & 1 == 1) {
                if rank >= grid.launch.cluster || grid.cluster.ended(rank) {
                    return trap(lane, FaultKind::NoSuchBlock { rank });
                }
                let [to, at] =
                    [to, at].map(|address| Shared::address(rank.into(), Shared::of_block(address)));
                self.copy_to_block(grid, lane, [to, at], source.clone(), own)?;
            }
        }
        Ok(())
    }

    /// Returns the source of a lane's copy.
    fn bulk_source(&self, grid: &mut Grid, active: u32, lane: u32, from: &BulkSource) -> Step<Source> {
        let program = &grid.kernel.program;
        let word = |slot: Slot| Ok(self.registers.word(program, slot, active)?[lane as usize]);
        match from {
            BulkSource::Bytes { from, bytes } => {
                let bytes = word(*bytes)? as usize;
                if !bytes.is_multiple_of(ALIGN) {
                    return trap(lane, FaultKind::BulkSize(bytes));
                }
                let runs = vec![Run { at: 0, from: self.address(*from, lane), bytes }];
                Ok(Source { runs, bytes, aligns: [ALIGN; 2], swizzle: Swizzle::None })
            }
            BulkSource::Tensor { map, corner } => {
                let mut at = [0; tensor_map::RANK];
                for (at, &slot) in at.iter_mut().zip(corner) {
                    *at = word(slot)? as i32;
                }
                let address = self.address(*map, lane);
                let map = grid.tensor_map(lane, address)?;
                if map.rank() != corner.len() {
                    let problem = "the tensor has another number of dimensions than the instruction";
                    return trap(lane, FaultKind::TensorMap(address, problem));
                }
                let (bytes, aligns) = (map.box_bytes(), [TENSOR_ALIGN, 1]);
                Ok(Source { runs: map.runs(at), bytes, aligns, swizzle: map.swizzle() })
            }
        }
    }

    /// A lane's copy to one block: to `to`, and the mbarrier at `at`.
    fn copy_to_block(
        &mut self,
        grid: &mut Grid,
        lane: u32,
        [to, at]: [u64; 2],
        source: Source,
        own: Option<Id>,
    ) -> Step {
        let (access, known) = grid.begin_copy((self.index, lane), at, own, true)?;
        let mut copy =
            Bulk { warp: self.index, lane, pc: grid.pc, to, source, at, access, known, found: None };
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
    /// Reads the source, and returns the bytes to write: zeros where the source has none.
    fn load(&self, grid: &mut Grid) -> Step<Vec<u8>> {
        self.instruct(grid);
        let &Self { lane, to, ref source, .. } = self;
        let mut bytes = vec![0; source.bytes];
        for &Run { at, from, bytes: count } in &source.runs {
            let races = grid.races.as_ref().zip(self.access);
            let located = grid.memory.locate_first(from, count, source.aligns[1]);
            let (memory, start) = located.or_else(|kind| trap(lane, kind))?;
            match memory.load(start..start + count, Manner::Weak, races) {
                Ok(found) => bytes[at..][..count].copy_from_slice(found),
                Err(wrong) => return wrongly(grid, lane, Space::Global, from, count, wrong),
            }
        }
        Ok(source.swizzle.apply(to, bytes))
    }

    /// Starts the write, or completes it with the bytes that were read.
    fn store(&self, grid: &mut Grid, found: Option<&[u8]>) -> Step {
        self.instruct(grid);
        let &Self { lane, to, source: Source { bytes, aligns: [align, _], .. }, .. } = self;
        let races = grid.races.as_ref().zip(self.access);
        let (memory, at) = grid.shared.locate_aligned(to, bytes, align).or_else(|kind| trap(lane, kind))?;
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
        grid.end_copy(self.lane, self.at, Some(self.source.bytes))
    }
}

impl Grid<'_> {
    /// Reads a tensor map in the parameters or in global memory. The launch must not write it.
    fn tensor_map(&mut self, lane: u32, address: u64) -> Step<TensorMap> {
        const BYTES: usize = tensor_map::BYTES;
        let start = address.wrapping_sub(address_of_parameters(&self.kernel.parameters));
        let map = if start < self.parameters.len() as u64 {
            let bytes = &self.parameters[start as usize..];
            if address.is_multiple_of(tensor_map::ALIGN as u64) {
                TensorMap::decode(&bytes[..BYTES.min(bytes.len())])
            } else {
                Err("the address must be a multiple of 64")
            }
        } else {
            let located = self.memory.locate_first(address, BYTES, tensor_map::ALIGN);
            let (memory, at) = located.or_else(|kind| trap(lane, kind))?;
            match memory.load(at..at + BYTES, Manner::Constant, None) {
                Ok(bytes) => TensorMap::decode(bytes),
                Err(wrong) => return wrongly(self, lane, Space::Global, address, BYTES, wrong),
            }
        };
        map.or_else(|problem| trap(lane, FaultKind::TensorMap(address, problem)))
    }

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
