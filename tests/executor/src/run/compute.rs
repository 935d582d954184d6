//! Executes instructions that only move and compute registers.

use super::warp::Warp;
use crate::approximation::Approximation;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::{LANES, LaneFunction, Longs};
use crate::program::{Guard, Logic, Program, Register, Slot};
use crate::semantics::reciprocal;

impl Warp {
    #[inline(always)]
    pub(super) fn compute(
        &mut self,
        program: &Program,
        active: u32,
        shape: LaneFunction,
        to: Slot,
        from: [Slot; 4],
    ) -> Step {
        let registers = &mut self.registers;
        let [a, b, c, d] = from;
        macro_rules! w {
            ($slot:expr) => {
                registers.word(program, $slot, active)?
            };
        }
        macro_rules! l {
            ($slot:expr) => {
                registers.long(program, $slot, active)?
            };
        }
        macro_rules! word {
            ($value:expr) => {{
                let value = $value;
                registers.set_word(to, active, &value);
            }};
        }
        macro_rules! long {
            ($value:expr) => {{
                let value = $value;
                registers.set_long(to, active, &value);
            }};
        }
        match shape {
            LaneFunction::WW(f) => word!(f(w!(a))),
            LaneFunction::WWW(f) => word!(f(w!(a), w!(b))),
            LaneFunction::WWWW(f) => word!(f(w!(a), w!(b), w!(c))),
            LaneFunction::WWWWW(f) => word!(f(w!(a), w!(b), w!(c), w!(d))),
            LaneFunction::WL(f) => word!(f(l!(a))),
            LaneFunction::LL(f) => long!(f(l!(a))),
            LaneFunction::LLL(f) => long!(f(l!(a), l!(b))),
            LaneFunction::LLLL(f) => long!(f(l!(a), l!(b), l!(c))),
            LaneFunction::LW(f) => long!(f(w!(a))),
            LaneFunction::LWW(f) => long!(f(w!(a), w!(b))),
            LaneFunction::LWWL(f) => long!(f(w!(a), w!(b), l!(c))),
            LaneFunction::LLW(f) => long!(f(l!(a), w!(b))),
            LaneFunction::LLWW(f) => long!(f(l!(a), w!(b), w!(c))),
            LaneFunction::LLLWW(f) => long!(f(l!(a), l!(b), w!(c), w!(d))),
            LaneFunction::LLLW(f) => long!(f(l!(a), l!(b), w!(c))),
            LaneFunction::PWW(f) => {
                let lanes = f(w!(a), w!(b));
                registers.set_predicate(to, active, lanes);
            }
            LaneFunction::PLL(f) => {
                let lanes = f(l!(a), l!(b));
                registers.set_predicate(to, active, lanes);
            }
        }
        Ok(())
    }

    /// `setp` (ISA 9.7.6): p = (a cmp b) bool c, q = !(a cmp b) bool c.
    pub(super) fn compare(
        &mut self,
        program: &Program,
        active: u32,
        shape: LaneFunction,
        [to, other]: [Slot; 2],
        [a, b]: [Slot; 2],
        combined: Option<(Logic, Guard)>,
    ) -> Step {
        let registers = &mut self.registers;
        let lanes = match shape {
            LaneFunction::PWW(f) => {
                f(registers.word(program, a, active)?, registers.word(program, b, active)?)
            }
            LaneFunction::PLL(f) => {
                f(registers.long(program, a, active)?, registers.long(program, b, active)?)
            }
            _ => unreachable!("a comparison gives a predicate"),
        };
        let (first, second) = match combined {
            None => (lanes, !lanes),
            Some((logic, with)) => {
                let with = registers.predicate(program, with, active)?;
                (apply(logic, lanes, with), apply(logic, !lanes, with))
            }
        };
        registers.set_predicate(to, active, first);
        registers.set_predicate(other, active, second);
        Ok(())
    }

    pub(super) fn select_word(
        &mut self,
        program: &Program,
        active: u32,
        to: Slot,
        [a, b]: [Slot; 2],
        by: Slot,
    ) -> Step {
        let registers = &mut self.registers;
        let lanes = registers.predicate(program, Guard { predicate: by, negated: false }, active)?;
        let mut values = *registers.word(program, b, active)?;
        let chosen = registers.word(program, a, active)?;
        for lane in 0..LANES {
            values[lane] = if lanes >> lane & 1 == 1 { chosen[lane] } else { values[lane] };
        }
        registers.set_word(to, active, &values);
        Ok(())
    }

    pub(super) fn select_long(
        &mut self,
        program: &Program,
        active: u32,
        to: Slot,
        [a, b]: [Slot; 2],
        by: Slot,
    ) -> Step {
        let registers = &mut self.registers;
        let lanes = registers.predicate(program, Guard { predicate: by, negated: false }, active)?;
        let mut values = *registers.long(program, b, active)?;
        let chosen = registers.long(program, a, active)?;
        for lane in 0..LANES {
            values[lane] = if lanes >> lane & 1 == 1 { chosen[lane] } else { values[lane] };
        }
        registers.set_long(to, active, &values);
        Ok(())
    }

    pub(super) fn logic(
        &mut self,
        program: &Program,
        active: u32,
        logic: Logic,
        to: Slot,
        [a, b]: [Guard; 2],
    ) -> Step {
        let a = self.registers.predicate(program, a, active)?;
        let b = self.registers.predicate(program, b, active)?;
        self.registers.set_predicate(to, active, apply(logic, a, b));
        Ok(())
    }

    /// `add.cc` and related instructions (ISA 9.7.2). The flag of a subtraction is the borrow.
    pub(super) fn carry(
        &mut self,
        program: &Program,
        active: u32,
        [subtract, takes, sets]: [bool; 3],
        to: Register,
        [a, b]: [Register; 2],
    ) -> Step {
        let registers = &mut self.registers;
        if takes && active & !registers.carry_set != 0 {
            let lane = (active & !registers.carry_set).trailing_zeros();
            return trap(lane, FaultKind::UnwrittenRegister("CC.CF".into()));
        }
        let (a, b) = (registers.any(program, a, active)?, registers.any(program, b, active)?);
        let mut values: Longs = [0; LANES];
        let mut flags = 0;
        for lane in 0..LANES {
            let flag = u128::from(takes && registers.carry >> lane & 1 == 1);
            let (a, b) = (u128::from(a[lane]), u128::from(b[lane]));
            let sum = if subtract { a.wrapping_sub(b).wrapping_sub(flag) } else { a + b + flag };
            values[lane] = sum as u64;
            flags |= ((sum >> to.bits()) as u32 & 1) << lane;
        }
        registers.set_any(to, active, &values);
        if sets {
            registers.carry = registers.carry & !active | flags & active;
            registers.carry_set |= active;
        }
        Ok(())
    }

    /// `mov` of a vector. The first part is the lowest.
    pub(super) fn pack(&mut self, program: &Program, active: u32, to: Register, from: &[Register]) -> Step {
        let mut values: Longs = [0; LANES];
        let mut shift = 0;
        for &part in from {
            let part_values = self.registers.any(program, part, active)?;
            for lane in 0..LANES {
                values[lane] |= part_values[lane] << shift;
            }
            shift += part.bits();
        }
        self.registers.set_any(to, active, &values);
        Ok(())
    }

    pub(super) fn unpack(&mut self, program: &Program, active: u32, to: &[Register], from: Register) -> Step {
        let values = self.registers.any(program, from, active)?;
        let mut shift = 0;
        for &part in to {
            self.registers.set_any(part, active, &values.map(|value| value >> shift));
            shift += part.bits();
        }
        Ok(())
    }

    pub(super) fn approximate(
        &mut self,
        program: &Program,
        active: u32,
        choice: &Approximation,
        flush: bool,
        [to, from]: [Slot; 2],
    ) -> Step {
        let mut values = *self.registers.word(program, from, active)?;
        for (lane, value) in values.iter_mut().enumerate() {
            if active >> lane & 1 == 1 {
                *value = reciprocal(*value, flush, choice);
            }
        }
        self.registers.set_word(to, active, &values);
        Ok(())
    }
}

fn apply(logic: Logic, a: u32, b: u32) -> u32 {
    match logic {
        Logic::And => a & b,
        Logic::Or => a | b,
        Logic::Xor => a ^ b,
        Logic::First => a,
    }
}
