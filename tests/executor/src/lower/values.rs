//! Lowers instructions that compute registers from registers.

use super::Lowering;
use crate::error::Result;
use crate::lanes::{Pure, Type, lanes};
use crate::memory::address_of_parameters;
use crate::parse::Operand;
use crate::program::{Guard, Logic, NONE, Op, Register, Slot};
use crate::semantics;

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn value(&mut self, opcode: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let op = match *opcode {
            ["mov", ty] => self.mov(ty, operands)?,
            // Every space is a window of the generic space (ISA 9.7.9, `cvta`). The window of
            // global memory starts at 0 here.
            ["cvta", "to", "global", "u64"] | ["cvta", "global", "u64"] => {
                let copy = lanes!(LL, |a| a; B64 B64);
                Some(self.pure(copy, operands, false)?)
            }
            ["cvta", "shared", "u64"] => Some(self.window("add", self.placement.window, operands)?),
            ["cvta", "to", "shared", "u64"] => Some(self.window("sub", self.placement.window, operands)?),
            ["cvta", "param", "u64"] => {
                Some(self.window("add", address_of_parameters(self.parameters), operands)?)
            }
            ["selp", ty] => self.selp(ty, operands)?,
            ["slct", ty, by] => self.slct(ty, by, operands)?,
            ["setp", ref rest @ ..] => self.setp(rest, operands)?,
            [operation, "pred"] => self.predicates(operation, operands)?,
            ["add" | "sub", "cc", ty] => Some(self.carry(opcode[0], false, true, ty, operands)?),
            ["addc" | "subc", "cc", ty] => Some(self.carry(opcode[0], true, true, ty, operands)?),
            ["addc" | "subc", ty] => Some(self.carry(opcode[0], true, false, ty, operands)?),
            ["rcp", "approx", "ftz", "f32"] => Some(self.approximate(true, operands)?),
            ["rcp", "approx", "f32"] => Some(self.approximate(false, operands)?),
            _ => None,
        };
        if op.is_some() {
            return Ok(op);
        }
        match semantics::pure(opcode) {
            Some(pure) => Ok(Some(self.pure(pure, operands, false)?)),
            None => Ok(None),
        }
    }

    /// Adds the generic address at which a space starts, or subtracts it.
    fn window(&mut self, operation: &str, start: u64, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [to, from] = self.exactly(operands)?;
        let window = Operand::Integer(start.into());
        let pure = semantics::pure(&[operation, "s64"]).expect("sums and differences are known");
        self.pure(pure, &[to.clone(), from.clone(), window], false)
    }

    /// Lowers a pure instruction: the result, then the sources.
    fn pure(&mut self, pure: Pure, operands: &[Operand<'a>], untyped: bool) -> Result<Op> {
        let Pure { shape, types } = pure;
        if operands.len() != types.len() {
            return Err(self.invalid(format!("it takes {} operands, not {}", types.len(), operands.len())));
        }
        let mut from = [NONE; 4];
        for (slot, (operand, &ty)) in from.iter_mut().zip(operands.iter().zip(types).skip(1)) {
            *slot = self.read(operand, ty, untyped)?;
        }
        let to = self.write(&operands[0], types[0])?;
        Ok(Op::Compute { shape, to, from })
    }

    /// `mov` (ISA 9.7.9) of a register, constant or address, or between a register and a vector.
    fn mov(&mut self, ty: &str, operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let [to, from] = self.exactly(operands)?;
        if ty == "pred" {
            return self.predicates("mov", operands);
        }
        let copy = match ty {
            "b16" | "u16" | "s16" => lanes!(WW, |a| a; B16 B16),
            "b32" | "u32" | "s32" => lanes!(WW, |a| a; B32 B32),
            "f32" => lanes!(WW, |a| a; F32 F32),
            "b64" | "u64" | "s64" => lanes!(LL, |a| a; B64 B64),
            "f64" => lanes!(LL, |a| a; F64 F64),
            _ => return Ok(None),
        };
        let bits = copy.types[0].bits();
        match (to, from) {
            (Operand::Vector(parts), source) if ty.starts_with('b') => {
                let from = self.any(source, bits, false)?;
                let each = self.share(bits, parts.len())?;
                let to = parts.iter().map(|part| self.part(part, each, true)).collect::<Result<_>>()?;
                self.same_width(from, bits)?;
                Ok(Some(Op::Unpack { to, from }))
            }
            (to, Operand::Vector(parts)) if ty.starts_with('b') => {
                let each = self.share(bits, parts.len())?;
                let from = parts.iter().map(|part| self.part(part, each, false)).collect::<Result<_>>()?;
                let to = self.any(to, bits, true)?;
                self.same_width(to, bits)?;
                Ok(Some(Op::Pack { to, from }))
            }
            _ => Ok(Some(self.pure(copy, operands, true)?)),
        }
    }

    /// Returns the bits of each of `parts` parts.
    fn share(&self, bits: u32, parts: usize) -> Result<u32> {
        match (bits, parts) {
            (16, 2) | (32, 2) | (64, 2) | (32, 4) | (64, 4) => Ok(bits / parts as u32),
            _ => Err(self.invalid(format!("{bits} bits do not make {parts} parts"))),
        }
    }

    fn part(&mut self, operand: &Operand<'a>, bits: u32, writes: bool) -> Result<Register> {
        let register = self.any(operand, bits, writes)?;
        self.same_width(register, bits)?;
        Ok(register)
    }

    fn same_width(&self, register: Register, bits: u32) -> Result<()> {
        if register.bits() == bits {
            return Ok(());
        }
        Err(self.invalid(format!("a register has {} bits, not {bits}", register.bits())))
    }

    /// `selp` (ISA 9.7.6).
    fn selp(&mut self, ty: &str, operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let ty = match ty {
            "b16" | "u16" | "s16" => Type::B16,
            "b32" | "u32" | "s32" => Type::B32,
            "f32" => Type::F32,
            "b64" | "u64" | "s64" => Type::B64,
            "f64" => Type::F64,
            _ => return Ok(None),
        };
        let [to, first, second, by] = self.exactly(operands)?;
        let from = [self.read(first, ty, true)?, self.read(second, ty, true)?];
        let Guard { predicate: by, negated } = self.read_predicate(by)?;
        let from = if negated { [from[1], from[0]] } else { from };
        let to = self.write(to, ty)?;
        Ok(Some(match ty {
            Type::B64 | Type::F64 => Op::SelectLong { to, from, by },
            _ => Op::SelectWord { to, from, by },
        }))
    }

    /// `slct` (ISA 9.7.6), by the sign of the last operand. −0 counts as 0, and NaN selects the
    /// second.
    fn slct(&mut self, ty: &str, by: &str, operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let pure = match (ty, by) {
            ("b16" | "u16" | "s16", "s32") => {
                lanes!(WWWW, |a, b, c| if c as i32 >= 0 { a } else { b }; B16 B16 B16 B32)
            }
            ("b32" | "u32" | "s32", "s32") => {
                lanes!(WWWW, |a, b, c| if c as i32 >= 0 { a } else { b }; B32 B32 B32 B32)
            }
            ("f32", "s32") => lanes!(WWWW, |a, b, c| if c as i32 >= 0 { a } else { b }; F32 F32 F32 B32),
            ("b64" | "u64" | "s64", "s32") => {
                lanes!(LLLW, |a, b, c| if c as i32 >= 0 { a } else { b }; B64 B64 B64 B32)
            }
            ("b32" | "u32" | "s32", "f32") => {
                lanes!(WWWW, |a, b, c| if f32::from_bits(c) >= 0.0 { a } else { b }; B32 B32 B32 F32)
            }
            ("f32", "f32") => {
                lanes!(WWWW, |a, b, c| if f32::from_bits(c) >= 0.0 { a } else { b }; F32 F32 F32 F32)
            }
            ("b64" | "u64" | "s64", "f32") => {
                lanes!(LLLW, |a, b, c| if f32::from_bits(c) >= 0.0 { a } else { b }; B64 B64 B64 F32)
            }
            _ => return Ok(None),
        };
        Ok(Some(self.pure(pure, operands, true)?))
    }

    /// `setp.cmp{.ftz}.type p{|q}, a, b` and `setp.cmp.bool{.ftz}.type p{|q}, a, b, {!}c` (ISA
    /// 9.7.6).
    fn setp(&mut self, rest: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let (comparison, logic, ftz, ty) = match *rest {
            [comparison, ty] => (comparison, None, false, ty),
            [comparison, "ftz", ty] => (comparison, None, true, ty),
            [comparison, logic @ ("and" | "or" | "xor"), ty] => (comparison, Some(logic), false, ty),
            [comparison, logic @ ("and" | "or" | "xor"), "ftz", ty] => (comparison, Some(logic), true, ty),
            _ => return Ok(None),
        };
        let Some(Pure { shape, types }) = semantics::comparison(comparison, ty, ftz) else { return Ok(None) };
        let (first, combined) = match logic {
            None => {
                let [to, first, second] = self.exactly(operands)?;
                ((to, first, second), None)
            }
            Some(logic) => {
                let [to, first, second, with] = self.exactly(operands)?;
                let logic = match logic {
                    "and" => Logic::And,
                    "or" => Logic::Or,
                    _ => Logic::Xor,
                };
                ((to, first, second), Some((logic, self.read_predicate(with)?)))
            }
        };
        let (to, first, second) = first;
        let from = [self.read(first, types[0], false)?, self.read(second, types[1], false)?];
        let (to, other) = self.destinations(to)?;
        Ok(Some(Op::Compare { shape, to, other, from, combined }))
    }

    /// `p` or `p|q`.
    fn destinations(&mut self, operand: &Operand<'a>) -> Result<(Slot, Slot)> {
        match operand {
            Operand::Name(name) => Ok((self.write_predicate(name)?, NONE)),
            Operand::Both(first, second) => Ok((self.write_predicate(first)?, self.write_predicate(second)?)),
            _ => Err(self.invalid("the destination must be a predicate")),
        }
    }

    /// `and`, `or`, `xor`, `not` (ISA 9.7.8) and `mov` of predicates.
    fn predicates(&mut self, operation: &str, operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let logic = match operation {
            "and" => Logic::And,
            "or" => Logic::Or,
            "xor" => Logic::Xor,
            "not" | "mov" => Logic::First,
            _ => return Ok(None),
        };
        let (to, from) = if let Logic::First = logic {
            let [to, from] = self.exactly(operands)?;
            let mut from = self.read_predicate(from)?;
            from.negated ^= operation == "not";
            (to, [from, from])
        } else {
            let [to, first, second] = self.exactly(operands)?;
            (to, [self.read_predicate(first)?, self.read_predicate(second)?])
        };
        let (to, _) = self.destinations(to)?;
        Ok(Some(Op::Predicate { logic, to, from }))
    }

    /// `add.cc`, `addc`, `sub.cc`, `subc` (ISA 9.7.2).
    fn carry(
        &mut self,
        operation: &str,
        takes: bool,
        sets: bool,
        ty: &str,
        operands: &'a [Operand<'a>],
    ) -> Result<Op> {
        let bits = match ty {
            "u32" | "s32" => 32,
            "u64" | "s64" => 64,
            _ => return Err(self.unsupported(format!("carries of type {ty}"))),
        };
        let [to, first, second] = self.exactly(operands)?;
        let from = [self.part(first, bits, false)?, self.part(second, bits, false)?];
        let to = self.part(to, bits, true)?;
        Ok(Op::Carry { subtract: operation.starts_with("sub"), takes, sets, to, from })
    }

    /// `rcp.approx` (ISA 9.7.3).
    fn approximate(&mut self, flush: bool, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [to, from] = self.exactly(operands)?;
        let from = self.read(from, Type::F32, false)?;
        Ok(Op::Approximate { flush, to: self.write(to, Type::F32)?, from })
    }
}
