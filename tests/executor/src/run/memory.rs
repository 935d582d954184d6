//! Executes loads, stores and atomic operations lane by lane.

use super::grid::{Grid, wrongly};
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::launch::Schedule;
use crate::program::{Address, Manner, Register, Space, Update};
use crate::race::{Id, Record};

/// Returns the lanes of a mask in the order of their memory accesses.
pub(super) fn lanes(schedule: Schedule, active: u32, turn: u32) -> impl Iterator<Item = u32> {
    let (flip, start) = match schedule {
        Schedule::LowestFirst => (0, 0),
        Schedule::HighestFirst => (31, 0),
        Schedule::Random(_) => (0, turn),
    };
    (0..32).map(move |step| ((step ^ flip) + start) & 31).filter(move |lane| active >> lane & 1 == 1)
}

/// Interprets bytes as a little-endian number.
#[inline(always)]
fn number(bytes: &[u8]) -> u64 {
    match *bytes {
        [a] => a.into(),
        [a, b] => u16::from_le_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => unreachable!("elements have 1, 2, 4 or 8 bytes"),
    }
}

#[inline(always)]
fn extended(value: u64, bytes: usize, signed: bool) -> u64 {
    let unused = 64 - 8 * bytes as u32;
    if signed { ((value << unused) as i64 >> unused) as u64 } else { value }
}

impl Warp {
    pub(super) fn load_parameter(
        &mut self,
        grid: &Grid,
        active: u32,
        to: &[Register],
        at: usize,
        bytes: usize,
        signed: bool,
    ) {
        for (i, &register) in to.iter().enumerate() {
            let value = number(&grid.parameters[at + i * bytes..][..bytes]);
            self.registers.set_any(register, active, &[extended(value, bytes, signed); 32]);
        }
    }

    /// Records an instruction's memory access for the race detector.
    pub(super) fn begin_access(&self, grid: &mut Grid, active: u32, manner: Manner) -> Step<Option<Id>> {
        let Some(races) = &mut grid.races else { return Ok(None) };
        let record = Record {
            block: grid.number,
            warp: self.index,
            time: races.clocks.time(self.index),
            pc: grid.pc,
            atomic: matches!(manner, Manner::Atomic | Manner::Ordering),
            agent: None,
            asynchronous: false,
        };
        match races.begin(record) {
            Some(id) => Ok(Some(id)),
            None => trap(active.trailing_zeros(), FaultKind::Hanging),
        }
    }

    #[inline(always)]
    pub(super) fn address(&self, address: Address, lane: u32) -> u64 {
        let base = address.base.map_or(0, |base| self.registers.lane(base, lane));
        self.in_cluster(address, base.wrapping_add(address.offset as u64))
    }

    #[inline(always)]
    pub(super) fn check_address(&self, grid: &Grid, active: u32, address: Address) -> Step {
        match address.base {
            Some(base) => self.registers.check(&grid.kernel.program, base, active),
            None => Ok(()),
        }
    }

    pub(super) fn load(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: &[Register],
        from: Address,
        (bytes, signed, manner): (usize, bool, Manner),
    ) -> Step {
        self.check_address(grid, active, from)?;
        self.check_cluster(grid, active, from)?;
        let access = self.begin_access(grid, active, manner)?;
        let all = bytes * to.len();
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let address = self.address(from, lane);
            let races = grid.races.as_ref().zip(access.map(|id| id + lane));
            let located = match from.space {
                Space::Global => grid.memory.locate(address, all),
                Space::Shared => grid.shared.locate(address, all),
            };
            let (memory, at) = located.or_else(|kind| trap(lane, kind))?;
            match memory.load(at..at + all, manner, races) {
                Ok(found) => {
                    for (&register, element) in to.iter().zip(found.chunks_exact(bytes)) {
                        self.registers.set_lane(register, lane, extended(number(element), bytes, signed));
                    }
                }
                Err(wrong) => return wrongly(grid, lane, from.space, address, all, wrong),
            }
            self.order(grid, lane, from.space, address, (manner, true, false));
        }
        to.iter().for_each(|&register| self.registers.note(register, active));
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: Address,
        from: &[Register],
        (bytes, manner): (usize, Manner),
    ) -> Step {
        self.check_address(grid, active, to)?;
        for &register in from {
            self.registers.check(&grid.kernel.program, register, active)?;
        }
        let access = self.begin_access(grid, active, manner)?;
        let all = bytes * from.len();
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let address = self.address(to, lane);
            let races = grid.races.as_ref().zip(access.map(|id| id + lane));
            let located = match to.space {
                Space::Global => grid.memory.locate(address, all),
                Space::Shared => grid.shared.locate(address, all),
            };
            let (memory, at) = located.or_else(|kind| trap(lane, kind))?;
            match memory.store(at..at + all, races) {
                Ok(place) => {
                    for (&register, element) in from.iter().zip(place.chunks_exact_mut(bytes)) {
                        let value = self.registers.lane(register, lane).to_le_bytes();
                        element.copy_from_slice(&value[..bytes]);
                    }
                }
                Err(wrong) => return wrongly(grid, lane, to.space, address, all, wrong),
            }
            self.order(grid, lane, to.space, address, (manner, false, true));
        }
        Ok(())
    }

    /// Updates the clocks for a lane's access to global memory that orders accesses between blocks.
    #[inline(always)]
    fn order(
        &self,
        grid: &mut Grid,
        lane: u32,
        space: Space,
        address: u64,
        (manner, reads, writes): (Manner, bool, bool),
    ) {
        let Some(races) = &mut grid.races else { return };
        if space != Space::Global || !matches!(manner, Manner::Atomic | Manner::Ordering) {
            return;
        }
        let orders = manner == Manner::Ordering;
        if reads {
            races.clocks.atomic_load((self.index, lane), address, orders);
        }
        if writes {
            races.clocks.atomic_store((self.index, lane), address, orders, reads);
        }
    }

    /// A load and a store in one, lane by lane.
    pub(super) fn atomic(
        &mut self,
        grid: &mut Grid,
        active: u32,
        (update, bits, orders): (Update, u32, bool),
        to: Option<Register>,
        at: Address,
        from: [Register; 2],
    ) -> Step {
        self.check_address(grid, active, at)?;
        for register in from {
            self.registers.check(&grid.kernel.program, register, active)?;
        }
        let access = self.begin_access(grid, active, Manner::Atomic)?;
        let bytes = bits as usize / 8;
        let turn = self.turn(grid);
        for lane in lanes(grid.launch.schedule, active, turn) {
            let address = self.address(at, lane);
            let races = grid.races.as_ref().zip(access.map(|id| id + lane));
            let located = match at.space {
                Space::Global => grid.memory.locate(address, bytes),
                Space::Shared => grid.shared.locate(address, bytes),
            };
            let (memory, offset) = located.or_else(|kind| trap(lane, kind))?;
            let range = offset..offset + bytes;
            // The write stands for both, because whatever races with the read also races with the
            // write.
            let old = match memory.load(range.clone(), Manner::Atomic, None) {
                Ok(old) => number(old),
                Err(wrong) => return wrongly(grid, lane, at.space, address, bytes, wrong),
            };
            let operands = from.map(|register| self.registers.lane(register, lane));
            let new = updated(update, bits, old, operands);
            match memory.store(range, races) {
                Ok(place) => place.copy_from_slice(&new.to_le_bytes()[..bytes]),
                Err(wrong) => return wrongly(grid, lane, at.space, address, bytes, wrong),
            }
            let manner = if orders { Manner::Ordering } else { Manner::Atomic };
            self.order(grid, lane, at.space, address, (manner, true, true));
            if let Some(to) = to {
                self.registers.set_lane(to, lane, old);
            }
        }
        if let Some(to) = to {
            self.registers.note(to, active);
        }
        Ok(())
    }

    pub(super) fn turn(&self, grid: &mut Grid) -> u32 {
        match grid.launch.schedule {
            Schedule::Random(_) => grid.random.below(32),
            _ => 0,
        }
    }
}

/// Returns the new value of an atomic operation (ISA 9.7.13, `atom`) or of a reduction step.
pub(super) fn updated(update: Update, bits: u32, old: u64, [operand, second]: [u64; 2]) -> u64 {
    let signed = |value: u64| extended(value, bits as usize / 8, true) as i64;
    match update {
        Update::Add => old.wrapping_add(operand) & (u64::MAX >> (64 - bits)),
        Update::MinUnsigned => old.min(operand),
        Update::MaxUnsigned => old.max(operand),
        Update::MinSigned if signed(operand) < signed(old) => operand,
        Update::MaxSigned if signed(operand) > signed(old) => operand,
        Update::MinSigned | Update::MaxSigned => old,
        Update::And => old & operand,
        Update::Or => old | operand,
        Update::Xor => old ^ operand,
        Update::Exchange => operand,
        Update::CompareAndSwap => {
            if old == operand {
                second
            } else {
                old
            }
        }
    }
}
