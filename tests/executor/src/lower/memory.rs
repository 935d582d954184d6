//! Lowers loads, stores, asynchronous copies and atomic operations.
//!
//! Source: ISA 9.7.9 (`ld`, `ld.global.nc`, `st`, `cp.async`) and 9.7.13 (`atom`, `red`).

use super::Lowering;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{Address, Manner, Op, Register, Space, Update};

/// The modifiers in a load's or store's opcode.
struct Modifiers<'s> {
    space: Option<&'s str>,
    manner: Manner,
    scope: bool,
    vector: usize,
    ty: &'s str,
}

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn memory(&mut self, opcode: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        match opcode {
            ["ld", rest @ .., ty] => {
                let modifiers = self.modifiers(rest, ty, true)?;
                self.load(modifiers, operands).map(Some)
            }
            ["st", rest @ .., ty] => {
                let modifiers = self.modifiers(rest, ty, false)?;
                self.store(modifiers, operands).map(Some)
            }
            ["red", rest @ .., ty] => self.atomic(rest, ty, operands, false).map(Some),
            ["atom", rest @ .., ty] => self.atomic(rest, ty, operands, true).map(Some),
            ["cp", "async", rest @ ..] => self.copies(rest, operands).map(Some),
            _ => Ok(None),
        }
    }

    /// Lowers `cp.async` and its waits for groups.
    fn copies(&mut self, words: &[&str], operands: &'a [Operand<'a>]) -> Result<Op> {
        match *words {
            ["commit_group"] => {
                let [] = self.exactly(operands)?;
                Ok(Op::CloseGroup)
            }
            ["wait_all"] => {
                let [] = self.exactly(operands)?;
                Ok(Op::AwaitCopies { but: None })
            }
            ["wait_group"] => {
                let [but] = self.exactly(operands)?;
                let Operand::Integer(but) = but else { return Err(self.invalid("expected a number")) };
                let but = u32::try_from(*but).map_err(|_| self.invalid("expected a number of groups"))?;
                Ok(Op::AwaitCopies { but: Some(but) })
            }
            [cache @ ("ca" | "cg"), "shared", "global"]
            | [cache @ ("ca" | "cg"), "shared", "global", "L2::64B" | "L2::128B" | "L2::256B"] => {
                self.copy(cache, operands)
            }
            _ => Err(self.unsupported("this form of cp.async")),
        }
    }

    /// `cp.async.ca|cg.shared.global [to], [from], bytes{, read}`.
    fn copy(&mut self, cache: &str, operands: &'a [Operand<'a>]) -> Result<Op> {
        let (to, from, bytes, read) = match operands {
            [to, from, bytes] => (to, from, bytes, bytes),
            [to, from, bytes, read] => (to, from, bytes, read),
            _ => return Err(self.unsupported("copies of other than three or four operands")),
        };
        let size = match (cache, bytes) {
            (_, Operand::Integer(16)) => 16,
            ("ca", Operand::Integer(size @ (4 | 8))) => *size as usize,
            _ => return Err(self.invalid("copies are of 4, 8 or 16 bytes, with .cg of 16")),
        };
        if matches!(read, Operand::Name(_)) && self.width(read, false)? == 1 {
            return Err(self.unsupported("copies that ignore their source"));
        }
        let to = self.address(Some("shared"), to)?;
        let from = self.address(Some("global"), from)?;
        Ok(Op::Copy { to, from, bytes: size, read: self.read(read, Type::B32, false)? })
    }

    fn modifiers<'s>(&self, words: &[&'s str], ty: &'s str, loads: bool) -> Result<Modifiers<'s>> {
        let mut found = Modifiers { space: None, manner: Manner::Weak, scope: false, vector: 1, ty };
        let mut volatile = false;
        for &word in words {
            match word {
                "global" | "shared" | "param" if found.space.is_none() => found.space = Some(word),
                "shared::cluster" if found.space.is_none() && loads => found.space = Some(word),
                "nc" if found.space == Some("global") => found.manner = Manner::Constant,
                // ISA 9.7.9: the same as `.relaxed.sys`, and never merged with other accesses.
                // Accesses are never merged here.
                "volatile" if found.manner == Manner::Weak => {
                    (found.manner, found.scope, volatile) = (Manner::Atomic, true, true);
                }
                "relaxed" if found.manner == Manner::Weak => found.manner = Manner::Atomic,
                "acquire" if found.manner == Manner::Weak && loads => found.manner = Manner::Ordering,
                "release" if found.manner == Manner::Weak && !loads => found.manner = Manner::Ordering,
                "gpu" if found.manner == Manner::Ordering && !found.scope => found.scope = true,
                "gpu" | "sys" | "cta" if found.manner == Manner::Atomic && !found.scope => found.scope = true,
                "v2" => found.vector = 2,
                "v4" => found.vector = 4,
                "v8" => found.vector = 8,
                "weak" => {}
                // Cache hints. They do not change values.
                "ca" | "cg" | "cs" | "wb" | "wt" => {}
                "L1::evict_normal"
                | "L1::evict_unchanged"
                | "L1::evict_first"
                | "L1::evict_last"
                | "L1::no_allocate"
                | "L2::evict_first"
                | "L2::evict_last"
                | "L2::evict_normal"
                | "L2::64B"
                | "L2::128B"
                | "L2::256B" => {}
                _ => return Err(self.unsupported(format!("the modifier .{word}"))),
            }
        }
        if volatile && found.space != Some("shared") {
            return Err(self.unsupported(".volatile outside of shared memory"));
        }
        if matches!(found.manner, Manner::Atomic | Manner::Ordering) && !found.scope {
            return Err(self.invalid(".relaxed, .acquire and .release need a scope"));
        }
        if found.manner == Manner::Ordering && found.space != Some("global") {
            return Err(self.unsupported(".acquire and .release outside of global memory"));
        }
        Ok(found)
    }

    /// Returns a type's bytes in memory, and whether loads sign-extend it.
    fn element(&self, ty: &str) -> Result<(usize, bool)> {
        Ok(match ty {
            "b8" | "u8" => (1, false),
            "s8" => (1, true),
            "b16" | "u16" => (2, false),
            "s16" => (2, true),
            "b32" | "u32" | "f32" => (4, false),
            "s32" => (4, true),
            "b64" | "u64" | "s64" | "f64" => (8, false),
            _ => return Err(self.unsupported(format!("accesses of type {ty}"))),
        })
    }

    /// Returns the registers of a vector operand, or a single register.
    fn elements(
        &mut self,
        operand: &Operand<'a>,
        modifiers: &Modifiers,
        writes: bool,
    ) -> Result<Box<[Register]>> {
        let (bytes, _) = self.element(modifiers.ty)?;
        let one = std::slice::from_ref(operand);
        let parts = match operand {
            Operand::Vector(parts) => parts,
            _ => one,
        };
        if parts.len() != modifiers.vector || bytes * parts.len() > 32 {
            return Err(self.invalid(format!("{} registers of {bytes} bytes", parts.len())));
        }
        parts.iter().map(|part| self.any(part, bytes as u32 * 8, writes)).collect()
    }

    fn load(&mut self, modifiers: Modifiers, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [to, from] = self.exactly(operands)?;
        let (bytes, signed) = self.element(modifiers.ty)?;
        if modifiers.space == Some("param") {
            let all = bytes * modifiers.vector;
            let at = self.parameter(from, all)?;
            return Ok(Op::Parameter { to: self.elements(to, &modifiers, true)?, at, bytes, signed });
        }
        let from = self.address(modifiers.space, from)?;
        let to = self.elements(to, &modifiers, true)?;
        Ok(Op::Load { to, from, bytes, signed, manner: modifiers.manner })
    }

    fn store(&mut self, modifiers: Modifiers, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [to, from] = self.exactly(operands)?;
        let (bytes, _) = self.element(modifiers.ty)?;
        if modifiers.manner == Manner::Constant {
            return Err(self.invalid("a store to constant memory"));
        }
        let to = self.address(modifiers.space, to)?;
        let from = self.elements(from, &modifiers, false)?;
        Ok(Op::Store { to, from, bytes, manner: modifiers.manner })
    }

    /// Returns an access's offset in the parameter space. It must be aligned and within one
    /// parameter.
    fn parameter(&self, operand: &Operand, bytes: usize) -> Result<usize> {
        let Operand::Address(name, offset) = operand else {
            return Err(self.invalid("a parameter's address must be its name"));
        };
        let parameter = self.parameters.iter().find(|parameter| parameter.name == *name);
        let parameter = parameter.ok_or_else(|| self.invalid(format!("{name} is no parameter")))?;
        match usize::try_from(*offset) {
            Ok(offset) if offset + bytes <= parameter.size => {
                let at = parameter.offset + offset;
                if at % bytes != 0 {
                    return Err(
                        self.invalid(format!("offset {offset} of {name} is not aligned to {bytes} bytes"))
                    );
                }
                Ok(at)
            }
            _ => Err(self.invalid(format!("{name} has {} bytes", parameter.size))),
        }
    }

    pub(super) fn address(&mut self, word: Option<&str>, operand: &Operand<'a>) -> Result<Address> {
        let space = match word {
            Some("global") => Space::Global,
            Some("shared" | "shared::cluster") => Space::Shared,
            Some("param") => return Err(self.unsupported("kernels must not call functions")),
            _ => return Err(self.unsupported("an access without a state space")),
        };
        let of_cluster = word == Some("shared::cluster");
        let Operand::Address(base, offset) = operand else {
            return Err(self.invalid("expected an address"));
        };
        if let (Space::Shared, Some(&variable)) = (space, self.shared.get(base)) {
            return Ok(Address { space, base: None, offset: i64::from(variable) + offset, of_cluster });
        }
        if let (Space::Global, Some(&variable)) = (space, self.global.get(base)) {
            return Ok(Address { space, base: None, offset: variable as i64 + offset, of_cluster });
        }
        let name = Operand::Name(base);
        let base = match (self.width(&name, false)?, space) {
            (64, _) | (32, Space::Shared) => self.any(&name, 32, false)?,
            (bits, _) => return Err(self.invalid(format!("an address of {bits} bits"))),
        };
        Ok(Address { space, base: Some(base), offset: *offset, of_cluster })
    }

    /// `red{.relaxed}{.scope}.space.op.type [a], b` and `atom… d, [a], b{, c}`.
    ///
    /// The executor performs them one after the other, which satisfies every scope.
    fn atomic(&mut self, words: &[&str], ty: &str, operands: &'a [Operand<'a>], returns: bool) -> Result<Op> {
        let mut words = words;
        let orders = matches!(words, ["acq_rel", "gpu", "global", ..]);
        if orders {
            words = &words[1..];
        }
        if let ["relaxed", rest @ ..] = words {
            words = rest;
        }
        if let ["gpu" | "sys" | "cta", rest @ ..] = words {
            words = rest;
        }
        let [space, operation] = words else { return Err(self.unsupported("these modifiers")) };
        let bits = match ty {
            "b32" | "u32" | "s32" => 32,
            "b64" | "u64" | "s64" => 64,
            _ => return Err(self.unsupported(format!("atomic operations of type {ty}"))),
        };
        let update = match (*operation, ty.as_bytes()[0]) {
            ("add", b'u') | ("add", b's') if ty != "s64" => Update::Add,
            ("min", b'u') => Update::MinUnsigned,
            ("max", b'u') => Update::MaxUnsigned,
            ("min", b's') => Update::MinSigned,
            ("max", b's') => Update::MaxSigned,
            ("and", b'b') => Update::And,
            ("or", b'b') => Update::Or,
            ("xor", b'b') => Update::Xor,
            ("exch", b'b') if returns => Update::Exchange,
            ("cas", b'b') if returns => Update::CompareAndSwap,
            _ => return Err(self.unsupported(format!("{operation} of type {ty}"))),
        };
        let (to, rest) = match operands {
            [to, rest @ ..] if returns => (Some(to), rest),
            rest => (None, rest),
        };
        let count = if update == Update::CompareAndSwap { 3 } else { 2 };
        if rest.len() != count {
            return Err(self.invalid(format!("it takes {count} operands besides a destination")));
        }
        let at = self.address(Some(space), &rest[0])?;
        let first = self.any(&rest[1], bits, false)?;
        let second = self.any(&rest[count - 1], bits, false)?;
        let to = to.map(|to| self.any(to, bits, true)).transpose()?;
        for register in [Some(first), Some(second), to].into_iter().flatten() {
            if register.bits() != bits {
                return Err(self.invalid(format!("a register has {} bits, not {bits}", register.bits())));
            }
        }
        Ok(Op::Atomic { update, bits, orders, to, at, from: [first, second] })
    }
}
