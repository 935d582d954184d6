//! Asynchronous instructions of one thread for tensor memory (ISA 9.7.16, `tcgen05.mma`, `.cp` and
//! `.commit`).
//!
//! A thread's instructions happen one after the other: at their instruction under
//! [`Schedule::LowestFirst`], when nothing else can continue under [`Schedule::HighestFirst`], and
//! at random under [`Schedule::Random`]. For the race detector they access memory from their
//! instruction until a thread observes the phase of an mbarrier at which a later `tcgen05.commit`
//! arrives. The arrivals of commits land in any order. The blocks whose memory they use must not
//! have ended.
//!
//! [`Schedule::LowestFirst`]: crate::Schedule::LowestFirst
//! [`Schedule::HighestFirst`]: crate::Schedule::HighestFirst
//! [`Schedule::Random`]: crate::Schedule::Random

use std::collections::VecDeque;

use microscale_formats::fp4_dot::{STEP, step, terms};

use super::grid::{Grid, wrongly};
use super::tensors::By;
use super::under_way::{Committed, Issued, Pipe, Work};
use super::warp::Warp;
use crate::clock::Known;
use crate::fault::{Fault, FaultKind, Step, trap};
use crate::memory::Shared;
use crate::program::{CopyShape, Manner, PipeAction, Slot, Space, TensorAddress};
use crate::race::{Id, Record};
use crate::semantics::{Descriptor, PIECE, TensorProduct};
use crate::tensor::{LANES, TensorMemory};

/// Lanes of tensor memory that a warp reaches. Each such quarter has a copy of the scales.
const QUARTER: u32 = 32;
/// Bytes of a row of FP4 codes of a product.
const ROW: usize = STEP / 2;

/// The rows of a matrix: codes and scales.
type Rows = Vec<([u8; ROW], [u8; 4])>;

impl Warp {
    /// Issues an instruction of one lane.
    pub(super) fn issue(&mut self, grid: &mut Grid, active: u32, action: &PipeAction, pair: bool) -> Step {
        let lane = active.trailing_zeros();
        if active != 1 << lane {
            return trap(lane, FaultKind::NotUniform("exactly one thread may issue it"));
        }
        if pair && (self.rank % 2 == 1 || self.rank + 1 >= grid.launch.cluster) {
            return trap(lane, FaultKind::TensorMemory("only the first block of a pair may issue it"));
        }
        let program = &*grid.kernel.program;
        let word = |slot: Slot| Ok(self.registers.word(program, slot, active)?[lane as usize]);
        let long = |slot: Slot| Ok(self.registers.long(program, slot, active)?[lane as usize]);
        let place = |at: TensorAddress| Ok(word(at.base)?.wrapping_add(at.offset));
        let work = match action {
            PipeAction::Multiply(of) => {
                let bits = word(of.kind)?;
                let product = TensorProduct::new(bits, of.format, pair)
                    .or_else(|problem| trap(lane, FaultKind::InstructionDescriptor(bits, problem)))?;
                Work::Multiply {
                    of: product,
                    format: of.format,
                    d: place(of.d)?,
                    descriptors: [long(of.a)?, long(of.b)?],
                    scales: [place(of.scales_a)?, place(of.scales_b)?],
                    adds: self.registers.predicate(program, of.adds, active)? >> lane & 1 == 1,
                }
            }
            &PipeAction::Copy { to, from, shape } => Work::Copy { to: place(to)?, from: long(from)?, shape },
            &PipeAction::Commit { at, blocks } => {
                self.check_address(grid, active, at)?;
                self.check_cluster(grid, active, at)?;
                let own = self.address(at, lane);
                let mask = match blocks {
                    Some(blocks) => Some(word(blocks)?),
                    None => None,
                };
                self.commit(grid, lane, own, mask)?
            }
        };
        let pipe = grid.pipe(self.index, lane);
        let (number, rank, blocks) = (grid.pipes[pipe].issued, self.rank, if pair { 2 } else { 1 });
        grid.pipes[pipe].issued += 1;
        let issued = Issued { pc: grid.pc, number, rank, blocks, work };
        if !matches!(issued.work, Work::Commit { .. }) {
            grid.pipes[pipe].last = Some((number, grid.pc));
            grid.claim(pipe, &issued)?;
        }
        grid.pipes[pipe].waiting.push_back(issued);
        if grid.early() {
            let pc = grid.pc;
            while !grid.pipes[pipe].waiting.is_empty() {
                grid.happen(pipe)?;
            }
            grid.pc = pc;
        }
        Ok(())
    }

    /// `tcgen05.commit` at the mbarrier with this address, or at the mbarriers of the blocks in
    /// `mask`.
    fn commit(&mut self, grid: &mut Grid, lane: u32, own: u64, mask: Option<u32>) -> Step<Work> {
        let mut at = Vec::new();
        match mask {
            None => at.push(own),
            Some(mask) => {
                for rank in (0..u16::BITS).filter(|rank| mask >> rank & 1 == 1) {
                    if rank >= grid.launch.cluster || grid.cluster.ended(rank) {
                        return trap(lane, FaultKind::NoSuchBlock { rank });
                    }
                    at.push(Shared::address(rank.into(), Shared::of_block(own)));
                }
            }
        }
        let access = self.begin_access(grid, 1 << lane, Manner::Atomic)?.map(|id| id + lane);
        for &at in &at {
            let init = grid.mbarrier(lane, at, access)?.init;
            if let (Some(races), Some(init), Some(access), true) =
                (&grid.races, init, access, grid.launch.tensor_fences)
                && races.unfenced(init, access, false, true)
            {
                let problem = "no fence between an mbarrier's beginning and a commit";
                return super::mbarriers::misused(grid, lane, at, problem);
            }
        }
        let thread = self.index as usize * 32 + lane as usize;
        let known = grid.races.as_ref().map(|races| races.clocks.known(thread).clone());
        Ok(Work::Commit { at, known: known.unwrap_or_default() })
    }
}

impl Grid<'_> {
    /// Returns the index of a thread's pipe.
    fn pipe(&mut self, warp: u32, lane: u32) -> usize {
        let found = self.pipes.iter().position(|pipe| (pipe.warp, pipe.lane) == (warp, lane));
        found.unwrap_or_else(|| {
            let member = self.races.as_mut().map_or(0, |races| {
                let member = races.clocks.add_member();
                races.clocks.add_member();
                member
            });
            let (issued, last, waiting) = (0, None, VecDeque::new());
            self.pipes.push(Pipe { warp, lane, member, issued, last, waiting });
            self.pipes.len() - 1
        })
    }

    /// Checks and records all accesses of a new instruction.
    fn claim(&mut self, pipe: usize, issued: &Issued) -> Step {
        let Pipe { warp, lane, member, .. } = self.pipes[pipe];
        let mut by = None;
        if let Some(races) = &mut self.races {
            // The thread's earlier instructions happen before this one.
            let mut known = Known::default();
            races.clocks.release(warp, 1 << lane, &mut known);
            known.learn(member, issued.number);
            races.clocks.instruct(member, known);
            let record = Record {
                block: self.number,
                warp,
                time: issued.number,
                pc: self.pc,
                atomic: false,
                agent: Some(member as u32),
                asynchronous: true,
            };
            let seen = races.clocks.seen(warp, 1 << lane);
            let fenced = self.launch.tensor_fences;
            by = self.begin_record(lane, record)?.map(|id| By { id, seen, fenced });
        }
        let id = by.as_ref().map(|by| by.id);
        for rank in issued.rank..issued.rank + issued.blocks {
            match issued.work {
                Work::Multiply { of, d, descriptors, scales, .. } => {
                    let rows = of.rows / issued.blocks as usize;
                    let columns = of.columns / issued.blocks as usize;
                    self.rows(lane, rank, descriptors[0], (rows, 2), id)?;
                    self.rows(lane, rank, descriptors[1], (columns, 2), id)?;
                    for (at, rows) in [(scales[0], rows), (scales[1], of.columns)] {
                        aligned(lane, at)?;
                        for row in (0..rows as u32).step_by(QUARTER as usize) {
                            let count = QUARTER.min(rows as u32 - row);
                            for quarter in (0..LANES).step_by(QUARTER as usize) {
                                let lanes = quarter..quarter + count;
                                self.touch(lane, rank, (at + row / QUARTER, lanes), false, by.as_ref())?;
                            }
                        }
                    }
                    aligned(lane, d)?;
                    for column in d..d + of.columns as u32 {
                        self.touch(lane, rank, (column, 0..LANES), true, by.as_ref())?;
                    }
                }
                Work::Copy { to, from, shape } => {
                    aligned(lane, to)?;
                    self.rows(lane, rank, from, (shape.rows, shape.pieces), id)?;
                    for column in to..to + (shape.pieces * PIECE / 4) as u32 {
                        self.touch(lane, rank, (column, 0..LANES), true, by.as_ref())?;
                    }
                }
                Work::Commit { .. } => {}
            }
        }
        Ok(())
    }

    /// Lets the next instruction of a pipe happen, chosen among those with instructions.
    pub(super) fn advance(&mut self, chosen: usize) -> Result<(), Fault> {
        let waiting = |&(_, pipe): &(usize, &Pipe)| !pipe.waiting.is_empty();
        let found = self.pipes.iter().enumerate().filter(waiting).nth(chosen);
        let (pipe, of) = found.expect("a pipe with instructions was counted");
        let warp = of.warp;
        self.happen(pipe).map_err(|trap| self.fault(warp, trap))
    }

    /// Lets the next instruction of a pipe happen.
    fn happen(&mut self, pipe: usize) -> Step {
        let Pipe { warp, lane, member, .. } = self.pipes[pipe];
        let Some(Issued { pc, number, rank, blocks, work }) = self.pipes[pipe].waiting.pop_front() else {
            return Ok(());
        };
        self.pc = pc;
        if let Some(rank) = (rank..rank + blocks).find(|&rank| self.cluster.ended(rank)) {
            return trap(lane, FaultKind::NoSuchBlock { rank });
        }
        match work {
            Work::Multiply { .. } => self.multiply_tensors(lane, [rank, blocks], work),
            Work::Copy { to, from, shape } => {
                (rank..rank + blocks).try_for_each(|rank| self.copy_to_tensor(lane, rank, to, from, shape))
            }
            Work::Commit { at, mut known } => {
                known.learn(member, number);
                known.learn(member + 1, number);
                for at in at {
                    let arrival = Committed { warp, lane, pc, at, known: known.clone() };
                    if self.early() {
                        self.arrive_committed(&arrival)?;
                    } else {
                        self.committed.push(arrival);
                    }
                }
                Ok(())
            }
        }
    }

    /// Lands an arrival of a commit.
    pub(super) fn land_committed(&mut self, chosen: usize) -> Result<(), Fault> {
        let arrival = self.committed.remove(chosen);
        self.pc = arrival.pc;
        self.arrive_committed(&arrival).map_err(|trap| self.fault(arrival.warp, trap))
    }

    fn arrive_committed(&mut self, &Committed { lane, at, ref known, .. }: &Committed) -> Step {
        let rank = Shared::rank(at) as u32;
        if self.cluster.ended(rank) {
            return trap(lane, FaultKind::NoSuchBlock { rank });
        }
        let barrier = self.mbarrier(lane, at, None)?;
        barrier.told.join(known);
        let complete = barrier.counts.arrive();
        self.counted(lane, at, complete)
    }

    /// Reads the pieces of rows from a block's shared memory.
    fn rows(
        &mut self,
        lane: u32,
        rank: u32,
        bits: u64,
        (rows, pieces): (usize, usize),
        access: Option<Id>,
    ) -> Step<Vec<[u8; 2 * PIECE]>> {
        let descriptor = Descriptor::tensor(bits, rows)
            .or_else(|problem| trap(lane, FaultKind::Descriptor(bits, problem)))?;
        let mut found = vec![[0; 2 * PIECE]; rows];
        for (row, of_row) in found.iter_mut().enumerate() {
            for (second, piece) in of_row.chunks_exact_mut(PIECE).take(pieces).enumerate() {
                let address = Shared::address(rank.into(), descriptor.piece(row, second == 1));
                let races = self.races.as_ref().zip(access);
                let (memory, at) = self.shared.locate(address, PIECE).or_else(|kind| trap(lane, kind))?;
                match memory.load(at..at + PIECE, Manner::Weak, races) {
                    Ok(bytes) => piece.copy_from_slice(bytes),
                    Err(wrong) => return wrongly(self, lane, Space::Shared, address, PIECE, wrong),
                }
            }
        }
        Ok(found)
    }

    /// `tcgen05.cp`, in one block.
    fn copy_to_tensor(&mut self, lane: u32, rank: u32, to: u32, from: u64, shape: CopyShape) -> Step {
        let rows = self.rows(lane, rank, from, (shape.rows, shape.pieces), None)?;
        let memory = &mut self.tensors[rank as usize];
        for at in 0..LANES {
            let row = &rows[at as usize % shape.rows];
            for (i, word) in row.as_chunks().0.iter().take(shape.pieces * PIECE / 4).enumerate() {
                memory.set(to + i as u32, at, u32::from_le_bytes(*word));
            }
        }
        Ok(())
    }

    /// `tcgen05.mma` with block scales, in all its blocks.
    ///
    /// A block has the same share of A's rows and of B's columns. It has the scales of its own rows
    /// and of all columns, and D of its own rows: a row per lane, a column per column.
    fn multiply_tensors(&mut self, lane: u32, [rank, blocks]: [u32; 2], work: Work) -> Step {
        let Work::Multiply { of, format, d, descriptors, scales, adds } = work else { return Ok(()) };
        let (rows, columns) = (of.rows / blocks as usize, of.columns / blocks as usize);
        let mut b = Vec::new();
        for rank in rank..rank + blocks {
            b.extend(self.rows(lane, rank, descriptors[1], (columns, 2), None)?);
        }
        for rank in rank..rank + blocks {
            let a = self.rows(lane, rank, descriptors[0], (rows, 2), None)?;
            let matrix = |codes: &[[u8; ROW]], at: u32, of: [usize; 2], grid: &Self| -> Step<Rows> {
                let negated = if of[1] == 1 { 0x88 } else { 0 };
                let row = |(row, codes): (usize, &[u8; ROW])| {
                    let scales = grid.scales(lane, rank, at, row as u32)?;
                    let word = u32::from_le_bytes(scales) >> (8 * of[0]);
                    Ok((codes.map(|code| code ^ negated), word.to_le_bytes()))
                };
                codes.iter().enumerate().map(row).collect()
            };
            let a = matrix(&a, scales[0], [of.first[0], usize::from(of.negated[0])], self)?;
            let b = matrix(&b, scales[1], [of.first[1], usize::from(of.negated[1])], self)?;
            for (column, (y, t)) in b.iter().enumerate() {
                let column = d + column as u32;
                for (row, (x, s)) in a.iter().enumerate() {
                    let row = row as u32;
                    let before = match adds {
                        false => 0,
                        true => match self.tensors[rank as usize].word(column, row) {
                            Some(word) => word,
                            None => {
                                let access = TensorMemory::access(column, row);
                                return trap(lane, FaultKind::Uninitialised(access));
                            }
                        },
                    };
                    let sum = step(f32::from_bits(before), terms(format, (x, s), (y, t)));
                    self.tensors[rank as usize].set(column, row, sum.to_bits());
                }
            }
        }
        Ok(())
    }

    /// Returns the scales of a row of A or a column of B: the same word in each quarter of the
    /// lanes.
    fn scales(&self, lane: u32, rank: u32, at: u32, row: u32) -> Step<[u8; 4]> {
        let memory = &self.tensors[rank as usize];
        let (column, first) = (at + row / QUARTER, row % QUARTER);
        let mut same = None;
        for place in (first..LANES).step_by(QUARTER as usize) {
            let Some(word) = memory.word(column, place) else {
                return trap(lane, FaultKind::Uninitialised(TensorMemory::access(column, place)));
            };
            if *same.get_or_insert(word) != word {
                return trap(
                    lane,
                    FaultKind::TensorMemory("the quarters of the lanes have different scales"),
                );
            }
        }
        Ok(same.unwrap_or(0).to_le_bytes())
    }
}

/// Checks that an address names the first lane.
fn aligned(lane: u32, at: u32) -> Step {
    if at >> 16 == 0 { Ok(()) } else { trap(lane, FaultKind::TensorMemory("the address is not of lane 0")) }
}
