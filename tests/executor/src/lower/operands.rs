//! Lowers operands: registers of the right width, and constants that fit.

use super::Lowering;
use super::registers::Which;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{Guard, NONE, Register, Slot, Special};

impl<'a> Lowering<'a> {
    /// Returns the operands, which must be exactly `N`.
    pub(super) fn exactly<const N: usize>(
        &self,
        operands: &'a [Operand<'a>],
    ) -> Result<&'a [Operand<'a>; N]> {
        let found = operands.len();
        operands.try_into().map_err(|_| self.invalid(format!("it takes {N} operands, not {found}")))
    }

    /// Returns the register that an operand names.
    fn register(
        &mut self,
        operand: &Operand<'a>,
        writes: bool,
    ) -> Result<Option<super::registers::Declared>> {
        let Operand::Name(name) = operand else { return Ok(None) };
        let found = self.registers.find(name, writes).map_err(|message| self.invalid(message))?;
        if let Some(found) = found.filter(|found| found.file == Which::Word) {
            self.words.push(found.slot);
        }
        Ok(found)
    }

    fn constant(
        &mut self,
        slot: impl FnOnce(&mut super::Registers<'a>) -> Result<Slot, String>,
    ) -> Result<Slot> {
        slot(&mut self.registers).map_err(|message| self.invalid(message))
    }

    /// Lowers a source of this type: a register of its width, a special register, or a constant.
    ///
    /// With `untyped` (`mov`, `selp`, stores), a constant may be a float's bits.
    pub(super) fn read(&mut self, operand: &Operand<'a>, ty: Type, untyped: bool) -> Result<Slot> {
        let bits = ty.bits();
        match operand {
            Operand::Name(name) => match self.register(operand, false)? {
                Some(found) if found.bits == bits => Ok(found.slot),
                Some(found) => Err(self.invalid(format!("{name} has {} bits, not {bits}", found.bits))),
                None => self.named(name, bits),
            },
            Operand::Integer(number) if !matches!(ty, Type::F32 | Type::F64) => {
                let value = self.integer(*number, bits)?;
                self.constant(|registers| match bits {
                    64 => registers.long(value),
                    _ => registers.word(value as u32),
                })
            }
            Operand::Float(float) if ty == Type::F32 || (untyped && bits == 32) => {
                self.constant(|registers| registers.word(*float))
            }
            Operand::Double(double) if ty == Type::F64 || (untyped && bits == 64) => {
                self.constant(|registers| registers.long(*double))
            }
            _ => Err(self.invalid(format!("{operand:?} is no source of type {ty:?}"))),
        }
    }

    /// Returns a constant's bits. The constant must fit, signed or unsigned.
    fn integer(&self, number: i128, bits: u32) -> Result<u64> {
        if number < -(1 << (bits - 1)) || number >= 1 << bits {
            return Err(self.invalid(format!("{number} does not fit into {bits} bits")));
        }
        Ok(number as u64 & (u64::MAX >> (64 - bits)))
    }

    /// Lowers a name that is not a declared register.
    fn named(&mut self, name: &str, bits: u32) -> Result<Slot> {
        if let Some(&address) = self.shared.get(name) {
            return self.constant(|registers| match bits {
                64 => registers.long_special(Special::Shared(address)),
                _ => registers.special(Special::Shared(address)),
            });
        }
        if let (Some(&address), 64) = (self.global.get(name), bits) {
            return self.constant(|registers| registers.long(address));
        }
        let parameter = self.parameters.iter().find(|parameter| parameter.name == name);
        if let (Some(parameter), 64) = (parameter, bits) {
            return self.constant(|registers| registers.long(parameter.offset as u64));
        }
        if bits != 32 {
            return Err(self.invalid(format!("{name} is not declared, or does not have {bits} bits")));
        }
        let special = match name {
            "%tid.x" => Special::Thread,
            "%ntid.x" => Special::Threads,
            "%ctaid.x" => Special::Block,
            "%nctaid.x" => Special::Blocks,
            "%laneid" => Special::Lane,
            "%cluster_ctarank" => Special::Rank,
            // The grid is one-dimensional.
            "%tid.y" | "%tid.z" | "%ctaid.y" | "%ctaid.z" => {
                return self.constant(|registers| registers.word(0));
            }
            "%ntid.y" | "%ntid.z" | "%nctaid.y" | "%nctaid.z" => {
                return self.constant(|registers| registers.word(1));
            }
            "WARP_SZ" => return self.constant(|registers| registers.word(32)),
            _ => return Err(self.invalid(format!("{name} is not declared"))),
        };
        self.constant(|registers| registers.special(special))
    }

    /// Lowers a destination of this type.
    pub(super) fn write(&mut self, operand: &Operand<'a>, ty: Type) -> Result<Slot> {
        match self.register(operand, true)? {
            Some(found) if found.bits == ty.bits() => Ok(found.slot),
            Some(found) => {
                Err(self.invalid(format!("the destination has {} bits, not {}", found.bits, ty.bits())))
            }
            None => Err(self.invalid(format!("{operand:?} is no register to write to"))),
        }
    }

    /// Lowers a source predicate or its negation.
    pub(super) fn read_predicate(&mut self, operand: &Operand<'a>) -> Result<Guard> {
        let (name, negated) = match operand {
            Operand::Name(name) => (*name, false),
            Operand::Not(name) => (*name, true),
            Operand::Integer(number) => {
                let predicate = self.constant(|registers| registers.predicate(*number != 0))?;
                return Ok(Guard { predicate, negated: false });
            }
            _ => return Err(self.invalid(format!("{operand:?} is no predicate"))),
        };
        match self.register(&Operand::Name(name), false)? {
            Some(found) if found.file == Which::Predicate => Ok(Guard { predicate: found.slot, negated }),
            _ => Err(self.invalid(format!("{name} is no predicate"))),
        }
    }

    /// Lowers a destination predicate. `_` discards the result.
    pub(super) fn write_predicate(&mut self, name: &'a str) -> Result<Slot> {
        if name == "_" {
            return Ok(NONE);
        }
        match self.register(&Operand::Name(name), true)? {
            Some(found) if found.file == Which::Predicate => Ok(found.slot),
            _ => Err(self.invalid(format!("{name} is no predicate"))),
        }
    }

    /// Splits `d` or `d|p` into the register's operand and the predicate.
    pub(super) fn with_predicate(&mut self, operand: &Operand<'a>) -> Result<(Operand<'a>, Slot)> {
        match operand {
            Operand::Both(first, second) => Ok((Operand::Name(first), self.write_predicate(second)?)),
            other => Ok((other.clone(), NONE)),
        }
    }

    /// Lowers a register of at least `bits` bits, for memory accesses and vectors.
    ///
    /// `_` is a sink of `bits` bits.
    pub(super) fn any(&mut self, operand: &Operand<'a>, bits: u32, writes: bool) -> Result<Register> {
        if let (Operand::Name("_"), true) = (operand, writes) {
            return Ok(Register::Sink(bits));
        }
        if let (Operand::Integer(number), false) = (operand, writes) {
            let value = self.integer(*number, bits)?;
            return Ok(match bits {
                64 => Register::Long(self.constant(|registers| registers.long(value))?),
                _ => Register::Word(self.constant(|registers| registers.word(value as u32))?, bits),
            });
        }
        if let (Operand::Float(float), false, 32) = (operand, writes, bits) {
            return Ok(Register::Word(self.constant(|registers| registers.word(*float))?, 32));
        }
        match self.register(operand, writes)? {
            Some(found) if found.file == Which::Predicate || found.bits < bits => {
                Err(self.invalid(format!("{operand:?} does not have {bits} bits")))
            }
            Some(found) if found.file == Which::Long => Ok(Register::Long(found.slot)),
            Some(found) => Ok(Register::Word(found.slot, found.bits)),
            None => Err(self.invalid(format!("{operand:?} is no register"))),
        }
    }

    /// Returns the width of a declared register.
    pub(super) fn width(&mut self, operand: &Operand<'a>, writes: bool) -> Result<u32> {
        match self.register(operand, writes)? {
            Some(found) => Ok(found.bits),
            None => Err(self.invalid(format!("{operand:?} is no register"))),
        }
    }
}
