//! Lowers products of a warp's matrices, and accesses to their fragments (ISA 9.7.14).

use microscale_formats::Format;

use super::Lowering;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{Matrices, Op, ScaledMatrices, Scales, Slot};
use crate::semantics::{Multiplicand, Selector};

/// GPUs whose `mma.sync` takes block scales.
const BLOCK_SCALED: [&str; 4] = ["sm_120a", "sm_120f", "sm_121a", "sm_121f"];

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn matrices(&mut self, opcode: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        Ok(Some(match *opcode {
            ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", a, b, "f32"] if a == b => {
                let element = match a {
                    "f16" => Multiplicand::F16,
                    "bf16" => Multiplicand::Bf16,
                    _ => return Err(self.unsupported(format!("matrices of {a}"))),
                };
                self.multiply(element, operands)?
            }
            [
                "mma",
                "sync",
                "aligned",
                "m16n8k64",
                "row",
                "col",
                kind,
                "block_scale",
                ref count @ ..,
                "f32",
                "e2m1",
                "e2m1",
                "f32",
                scale,
            ] => {
                let format = match (kind, count, scale) {
                    ("kind::mxf4nvf4", ["scale_vec::4X"], "ue4m3") => Format::Nvfp4,
                    ("kind::mxf4", [] | ["scale_vec::2X"], "ue8m0")
                    | ("kind::mxf4nvf4", ["scale_vec::2X"], "ue8m0") => Format::Mxfp4,
                    _ => return Err(self.unsupported("block scales of this kind, number and type")),
                };
                self.multiply_scaled(format, operands)?
            }
            [name @ ("ldmatrix" | "stmatrix"), "sync", "aligned", "m8n8", count, "shared", "b16"] => {
                self.move_matrices(name, count, false, operands)?
            }
            [
                name @ ("ldmatrix" | "stmatrix"),
                "sync",
                "aligned",
                "m8n8",
                count,
                "trans",
                "shared",
                "b16",
            ] => self.move_matrices(name, count, true, operands)?,
            _ => return Ok(None),
        }))
    }

    /// `mma.sync d, a, b, c`, each operand a vector.
    fn multiply(&mut self, element: Multiplicand, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [d, a, b, c] = self.exactly(operands)?;
        let matrices = Matrices {
            element,
            a: self.fragment(a, Type::B32, false)?,
            b: self.fragment(b, Type::B32, false)?,
            c: self.fragment(c, Type::F32, false)?,
            d: self.fragment(d, Type::F32, true)?,
        };
        Ok(Op::Multiply { matrices: Box::new(matrices), members: self.all_lanes()? })
    }

    /// `mma.sync d, a, b, c, scales-a, {byte, thread}, scales-b, {byte, thread}`.
    fn multiply_scaled(&mut self, format: Format, operands: &'a [Operand<'a>]) -> Result<Op> {
        if !BLOCK_SCALED.contains(&self.target) {
            return Err(self.invalid(format!("the target {} has no block scales", self.target)));
        }
        let [d, a, b, c, scales_a, select_a, scales_b, select_b] = self.exactly(operands)?;
        let matrices = ScaledMatrices {
            format,
            a: self.fragment(a, Type::B32, false)?,
            b: self.fragment(b, Type::B32, false)?,
            c: self.fragment(c, Type::F32, false)?,
            d: self.fragment(d, Type::F32, true)?,
            scales_a: self.scales(scales_a, select_a, Selector::of_a(format))?,
            scales_b: self.scales(scales_b, select_b, Selector::of_b(format))?,
        };
        Ok(Op::MultiplyScaled { matrices: Box::new(matrices), members: self.all_lanes()? })
    }

    /// A register of block scales, in braces or not, and `{byte, thread}`, numbers or registers.
    fn scales(
        &mut self,
        word: &'a Operand<'a>,
        select: &'a Operand<'a>,
        selector: Selector,
    ) -> Result<Scales> {
        let word = match word {
            Operand::Vector(_) => self.fragment::<1>(word, Type::B32, false)?[0],
            word => self.read(word, Type::B32, false)?,
        };
        let Operand::Vector(parts) = select else { return Err(self.invalid("expected {byte, thread}")) };
        let [byte, thread] = self.exactly(parts)?;
        for (operand, allowed) in [(byte, selector.bytes), (thread, selector.threads)] {
            if matches!(operand, Operand::Integer(number) if !allowed.iter().any(|&of| i128::from(of) == *number))
            {
                return Err(self.invalid("a scale selector that does not exist"));
            }
        }
        let (byte, thread) = (self.read(byte, Type::B16, false)?, self.read(thread, Type::B16, false)?);
        Ok(Scales { word, byte, thread })
    }

    /// `ldmatrix r, [p]` and `stmatrix [p], r`, with a register per matrix.
    fn move_matrices(
        &mut self,
        name: &str,
        count: &str,
        transposed: bool,
        operands: &'a [Operand<'a>],
    ) -> Result<Op> {
        let count = match count {
            "x1" => 1,
            "x2" => 2,
            "x4" => 4,
            _ => return Err(self.unsupported("this number of matrices")),
        };
        let [to, from] = self.exactly(operands)?;
        let members = self.all_lanes()?;
        if name == "stmatrix" {
            let to = self.address(Some("shared"), to)?;
            let from = self.registers_of(from, count, Type::B32, false)?.into();
            return Ok(Op::StoreMatrices { to, from, transposed, members });
        }
        let from = self.address(Some("shared"), from)?;
        let to = self.registers_of(to, count, Type::B32, true)?.into();
        Ok(Op::LoadMatrices { to, from, transposed, members })
    }

    /// Returns a lane's registers of a matrix fragment.
    pub(super) fn fragment<const N: usize>(
        &mut self,
        operand: &Operand<'a>,
        ty: Type,
        writes: bool,
    ) -> Result<[Slot; N]> {
        let slots = self.registers_of(operand, N, ty, writes)?;
        Ok(std::array::from_fn(|i| slots[i]))
    }

    /// Returns the `count` registers of a vector operand.
    pub(super) fn registers_of(
        &mut self,
        operand: &Operand<'a>,
        count: usize,
        ty: Type,
        writes: bool,
    ) -> Result<Vec<Slot>> {
        let Operand::Vector(parts) = operand else { return Err(self.invalid("expected a vector")) };
        if parts.len() != count || !parts.iter().all(|part| matches!(part, Operand::Name(_))) {
            return Err(self.invalid(format!("expected {count} registers")));
        }
        let slot = |part| if writes { self.write(part, ty) } else { self.read(part, ty, false) };
        parts.iter().map(slot).collect()
    }
}
