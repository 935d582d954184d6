//! Lowers instructions for tensor memory (ISA 9.7.16, `tcgen05`).

use microscale_formats::Format;

use super::Lowering;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{CopyShape, Fence, Op, PipeAction, TensorAction, TensorAddress, TensorMatrices};
use crate::semantics::Fragment;

/// GPUs with tensor memory.
const TARGETS: [&str; 4] = ["sm_100a", "sm_100f", "sm_103a", "sm_103f"];

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn tensor(&mut self, opcode: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        let ["tcgen05", ref words @ ..] = *opcode else { return Ok(None) };
        if !TARGETS.contains(&self.target) {
            return Err(self.invalid(format!("the target {} has no tensor memory", self.target)));
        }
        self.program.partial = true;
        let action = match *words {
            ["fence::before_thread_sync"] => {
                let [] = self.exactly(operands)?;
                return Ok(Some(Op::Fence(Fence::TensorBefore)));
            }
            ["fence::after_thread_sync"] => {
                let [] = self.exactly(operands)?;
                return Ok(Some(Op::Fence(Fence::TensorAfter)));
            }
            ["wait::ld", "sync", "aligned"] => {
                let [] = self.exactly(operands)?;
                TensorAction::AwaitLoads
            }
            ["wait::st", "sync", "aligned"] => {
                let [] = self.exactly(operands)?;
                TensorAction::AwaitStores
            }
            ["ld", "sync", "aligned", shape, count, "b32"] => {
                let (shape, registers) = self.fragment_of(shape, count)?;
                let [to, from] = self.exactly(operands)?;
                let to = self.registers_of(to, registers, Type::B32, true)?;
                if (1..to.len()).any(|i| to[..i].contains(&to[i])) {
                    return Err(self.invalid("it names a register twice"));
                }
                TensorAction::Load { shape, to: to.into(), from: self.in_tensor(from)? }
            }
            ["st", "sync", "aligned", shape, count, "b32"] => {
                let (shape, registers) = self.fragment_of(shape, count)?;
                let [to, from] = self.exactly(operands)?;
                let from = self.registers_of(from, registers, Type::B32, false)?.into();
                TensorAction::Store { shape, to: self.in_tensor(to)?, from }
            }
            ["alloc", group, "sync", "aligned", "shared::cta", "b32"] => {
                let pair = self.pair(group)?;
                let [to, columns] = self.exactly(operands)?;
                let columns = self.read(columns, Type::B32, false)?;
                TensorAction::Allocate { to: self.address(Some("shared"), to)?, columns, pair }
            }
            ["dealloc", group, "sync", "aligned", "b32"] => {
                let pair = self.pair(group)?;
                let [at, columns] = self.exactly(operands)?;
                let at = TensorAddress { base: self.read(at, Type::B32, false)?, offset: 0 };
                TensorAction::Free { at, columns: self.read(columns, Type::B32, false)?, pair }
            }
            ["relinquish_alloc_permit", group, "sync", "aligned"] => {
                self.pair(group)?;
                let [] = self.exactly(operands)?;
                TensorAction::Relinquish
            }
            _ => return self.pipe(words, operands).map(Some),
        };
        Ok(Some(Op::Tensor { action, members: self.all_lanes()? }))
    }

    /// Lowers an asynchronous instruction of one thread.
    fn pipe(&mut self, words: &[&str], operands: &'a [Operand<'a>]) -> Result<Op> {
        let (group, action) = match *words {
            ["mma", group, kind, "block_scale", ref count @ ..] => {
                let format = match (kind, count) {
                    ("kind::mxf4nvf4", ["block16" | "scale_vec::4X"]) => Format::Nvfp4,
                    ("kind::mxf4nvf4", ["block32" | "scale_vec::2X"])
                    | ("kind::mxf4", [] | ["block32" | "scale_vec::2X"]) => Format::Mxfp4,
                    _ => return Err(self.unsupported("this kind of product and number of scales")),
                };
                if self.target.ends_with('f') && matches!(count, [count] if count.starts_with("scale_vec")) {
                    return Err(self.invalid("targets of a family name the scales by .block16 or .block32"));
                }
                (group, PipeAction::Multiply(self.tensor_multiply(format, operands)?))
            }
            ["cp", group, ref shape @ ..] => {
                let (rows, pieces) = match *shape {
                    ["32x128b", "warpx4"] => (32, 1),
                    ["128x128b"] => (128, 1),
                    ["128x256b"] => (128, 2),
                    _ => return Err(self.unsupported("this shape of a copy")),
                };
                let [to, from] = self.exactly(operands)?;
                let from = self.read(from, Type::B64, false)?;
                let shape = CopyShape { rows, pieces };
                (group, PipeAction::Copy { to: self.in_tensor(to)?, from, shape })
            }
            ["commit", group, "mbarrier::arrive::one", "shared::cluster", ref rest @ .., "b64"] => {
                let (at, blocks) = match (rest, operands) {
                    ([], [at]) => (at, None),
                    (["multicast::cluster"], [at, blocks]) => {
                        (at, Some(self.read(blocks, Type::B16, false)?))
                    }
                    _ => return Err(self.unsupported("this form of commit")),
                };
                (group, PipeAction::Commit { at: self.address(Some("shared::cluster"), at)?, blocks })
            }
            _ => return Err(self.unsupported("this form of tcgen05")),
        };
        Ok(Op::Pipe { action, pair: self.pair(group)? })
    }

    /// `tcgen05.mma [d], a-desc, b-desc, i-desc, [scales-a], [scales-b], adds`.
    fn tensor_multiply(&mut self, format: Format, operands: &'a [Operand<'a>]) -> Result<TensorMatrices> {
        let [d, a, b, kind, scales_a, scales_b, adds] = self.exactly(operands)?;
        Ok(TensorMatrices {
            format,
            d: self.in_tensor(d)?,
            a: self.read(a, Type::B64, false)?,
            b: self.read(b, Type::B64, false)?,
            kind: self.read(kind, Type::B32, false)?,
            scales_a: self.in_tensor(scales_a)?,
            scales_b: self.in_tensor(scales_b)?,
            adds: self.read_predicate(adds)?,
        })
    }

    /// Returns whether an instruction is for a pair of blocks. All of a kernel must agree.
    fn pair(&mut self, group: &str) -> Result<bool> {
        let pair = match group {
            "cta_group::1" => false,
            "cta_group::2" => true,
            _ => return Err(self.unsupported("this group of blocks")),
        };
        match self.program.pairs.replace(pair) {
            Some(other) if other != pair => Err(self.invalid("the kernel's instructions name both groups")),
            _ => Ok(pair),
        }
    }

    /// Returns a fragment and its number of registers.
    fn fragment_of(&self, shape: &str, count: &str) -> Result<(Fragment, usize)> {
        let count = count.strip_prefix('x').and_then(|count| count.parse::<usize>().ok());
        let count = count.filter(|count| count.is_power_of_two());
        let found = Fragment::new(shape).zip(count).map(|(shape, count)| (shape, shape.registers() * count));
        match found.filter(|(_, registers)| *registers <= 128) {
            Some(found) => Ok(found),
            None => Err(self.unsupported("this shape of a fragment")),
        }
    }

    /// Lowers an address in tensor memory, `[base + offset]`.
    fn in_tensor(&mut self, operand: &Operand<'a>) -> Result<TensorAddress> {
        let &Operand::Address(base, offset) = operand else {
            return Err(self.invalid("expected an address"));
        };
        Ok(TensorAddress { base: self.read(&Operand::Name(base), Type::B32, false)?, offset: offset as u32 })
    }
}
