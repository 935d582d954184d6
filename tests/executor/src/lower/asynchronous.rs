//! Lowers asynchronous instructions and their synchronization.
//!
//! These are mbarriers, bulk and tensor copies and fences (ISA 9.7.13, 9.7.9), and matrix products
//! of warp groups (9.7.15).

use super::Lowering;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{BulkSource, Fence, FirstMatrix, GroupMatrices, MbarrierAction, Op, WarpGroupAction};
use crate::semantics::Multiplicand;

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn asynchronous(
        &mut self,
        opcode: &[&str],
        operands: &'a [Operand<'a>],
    ) -> Result<Option<Op>> {
        Ok(Some(match *opcode {
            ["mbarrier", ref rest @ .., "shared" | "shared::cta", "b64"] => self.mbarrier(rest, operands)?,
            ["mbarrier", "arrive", "shared::cluster", "b64"] => {
                let [state, at] = self.exactly(operands)?;
                self.no_state(state)?;
                self.program.partial = true;
                let at = self.address(Some("shared::cluster"), at)?;
                Op::Mbarrier { action: MbarrierAction::Arrive, at }
            }
            ["cp", "async", "mbarrier", "arrive", ref rest @ .., "shared" | "shared::cta", "b64"]
                if matches!(rest, [] | ["noinc"]) =>
            {
                let [at] = self.exactly(operands)?;
                self.program.partial = true;
                Op::ArriveAfterCopies { at: self.address(Some("shared"), at)?, counted: rest.is_empty() }
            }
            [
                "cp",
                "async",
                "bulk",
                "shared::cluster",
                "global",
                "mbarrier::complete_tx::bytes",
                ref rest @ ..,
            ] => {
                let (to, from, bytes, at, blocks) = match (rest, operands) {
                    ([], [to, from, bytes, at]) => (to, from, bytes, at, None),
                    (["multicast::cluster"], [to, from, bytes, at, blocks]) => {
                        (to, from, bytes, at, Some(self.read(blocks, Type::B16, false)?))
                    }
                    _ => return Err(self.unsupported("this form of bulk copy")),
                };
                self.program.partial = true;
                Op::BulkCopy {
                    blocks,
                    to: self.address(Some("shared"), to)?,
                    from: BulkSource::Bytes {
                        from: self.address(Some("global"), from)?,
                        bytes: self.read(bytes, Type::B32, false)?,
                    },
                    at: self.address(Some("shared"), at)?,
                }
            }
            [
                "cp",
                "async",
                "bulk",
                "tensor",
                rank @ ("2d" | "3d"),
                "shared::cluster",
                "global",
                ref mode @ ..,
                "mbarrier::complete_tx::bytes",
            ] if matches!(mode, [] | ["tile"]) => {
                let [to, from, at] = self.exactly(operands)?;
                self.program.partial = true;
                Op::BulkCopy {
                    blocks: None,
                    to: self.address(Some("shared"), to)?,
                    from: self.tensor_box(rank, from)?,
                    at: self.address(Some("shared"), at)?,
                }
            }
            ["fence", "proxy", "async", "shared::cta"] => self.fence(Fence::Proxy, operands)?,
            ["fence", "mbarrier_init", "release", "cluster"] => self.fence(Fence::MbarrierInit, operands)?,
            ["fence", "acq_rel", "gpu"] | ["membar", "gl"] => self.fence(Fence::Device, operands)?,
            ["wgmma", ref rest @ ..] => self.warp_group(rest, operands)?,
            // Register counts per warp and programmatic launch have no effect here.
            ["setmaxnreg", "inc" | "dec", "sync", "aligned", "u32"] => {
                let [count] = self.exactly(operands)?;
                match count {
                    Operand::Integer(count) if (24..=256).contains(count) && count % 8 == 0 => Op::Nothing,
                    _ => return Err(self.invalid("expected a multiple of 8 from 24 to 256")),
                }
            }
            ["griddepcontrol", "wait" | "launch_dependents"] => {
                let [] = self.exactly(operands)?;
                Op::Nothing
            }
            _ => return Ok(None),
        }))
    }

    fn fence(&mut self, fence: Fence, operands: &'a [Operand<'a>]) -> Result<Op> {
        let [] = self.exactly(operands)?;
        Ok(Op::Fence(fence))
    }

    /// `[map, {x, y}]` or `[map, {x, y, z}]`. Generic addresses of global memory are global ones.
    fn tensor_box(&mut self, rank: &str, operand: &'a Operand<'a>) -> Result<BulkSource> {
        let Operand::Tensor(map, corner) = operand else {
            return Err(self.invalid("expected a tensor map and coordinates"));
        };
        if corner.len() != if rank == "2d" { 2 } else { 3 } {
            return Err(self.invalid(format!("{} coordinates", corner.len())));
        }
        let map = self.address(Some("global"), &Operand::Address(map, 0))?;
        let corner = corner.iter().map(|at| self.read(at, Type::B32, false)).collect::<Result<_>>()?;
        Ok(BulkSource::Tensor { map, corner })
    }

    fn mbarrier(&mut self, words: &[&str], operands: &'a [Operand<'a>]) -> Result<Op> {
        self.program.partial = true;
        let (at, action) = match *words {
            ["init"] => {
                let [at, count] = self.exactly(operands)?;
                (at, MbarrierAction::Initialise(self.read(count, Type::B32, false)?))
            }
            ["inval"] => {
                let [at] = self.exactly(operands)?;
                (at, MbarrierAction::Invalidate)
            }
            ["arrive"] => {
                let [state, at] = self.exactly(operands)?;
                self.no_state(state)?;
                (at, MbarrierAction::Arrive)
            }
            ["arrive", "expect_tx"] => {
                let [state, at, bytes] = self.exactly(operands)?;
                self.no_state(state)?;
                (at, MbarrierAction::Expect(self.read(bytes, Type::B32, false)?))
            }
            ["try_wait", "parity"] => {
                let [to, at, parity] = self.exactly(operands)?;
                let Operand::Name(to) = to else { return Err(self.invalid("expected a predicate")) };
                let parity = self.read(parity, Type::B32, false)?;
                (at, MbarrierAction::Try { parity, to: self.write_predicate(to)? })
            }
            _ => return Err(self.unsupported("this form of mbarrier")),
        };
        Ok(Op::Mbarrier { action, at: self.address(Some("shared"), at)? })
    }

    /// Rejects an arrival's result in a register. It is opaque, and only waits without parity use
    /// it.
    fn no_state(&self, operand: &Operand) -> Result<()> {
        match operand {
            Operand::Name("_") => Ok(()),
            _ => Err(self.unsupported("the state of an mbarrier in a register")),
        }
    }

    fn warp_group(&mut self, words: &[&str], operands: &'a [Operand<'a>]) -> Result<Op> {
        let action = match *words {
            ["fence", "sync", "aligned"] => {
                let [] = self.exactly(operands)?;
                WarpGroupAction::Fence
            }
            ["commit_group", "sync", "aligned"] => {
                let [] = self.exactly(operands)?;
                WarpGroupAction::Commit
            }
            ["wait_group", "sync", "aligned"] => {
                let [but] = self.exactly(operands)?;
                let Operand::Integer(but) = but else { return Err(self.invalid("expected a number")) };
                let but = u32::try_from(*but).map_err(|_| self.invalid("expected a number of groups"))?;
                WarpGroupAction::Await(but)
            }
            ["mma_async", "sync", "aligned", shape, "f32", a, b] if a == b => {
                let (element, depth) = match a {
                    "f16" => (Multiplicand::F16, "k16"),
                    "bf16" => (Multiplicand::Bf16, "k16"),
                    "e4m3" => (Multiplicand::E4m3, "k32"),
                    _ => return Err(self.unsupported(format!("matrices of {a}"))),
                };
                let columns =
                    shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix(depth)?.parse().ok());
                let columns = columns
                    .filter(|columns: &usize| (8..=256).contains(columns) && columns.is_multiple_of(8));
                let Some(columns) = columns else {
                    return Err(self.unsupported(format!("products of the shape {shape}")));
                };
                self.group_multiply(element, columns, operands)?
            }
            _ => return Err(self.unsupported("this form of wgmma")),
        };
        Ok(Op::WarpGroup { action, members: self.all_lanes()? })
    }

    /// `wgmma.mma_async d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-b`. With E4M3,
    /// `a` may be a descriptor. Only 16-bit types have the last operand.
    fn group_multiply(
        &mut self,
        element: Multiplicand,
        columns: usize,
        operands: &'a [Operand<'a>],
    ) -> Result<WarpGroupAction> {
        // Only 16-bit types may be transposed.
        let (operands, transposed) = match operands {
            [rest @ .., transposed] if element != Multiplicand::E4m3 => (rest, transposed),
            _ => (operands, &Operand::Integer(0)),
        };
        let [d, a, b, adds, scale_a, scale_b] = self.exactly(operands)?;
        let in_registers = matches!(a, Operand::Vector(_));
        if !in_registers && element != Multiplicand::E4m3 {
            return Err(self.unsupported("16-bit A in shared memory"));
        }
        if [scale_a, scale_b, transposed]
            != [&Operand::Integer(1), &Operand::Integer(1), &Operand::Integer(0)]
        {
            return Err(self.unsupported("scales other than 1, or B transposed"));
        }
        let d = self.registers_of(d, columns / 2, Type::F32, true)?;
        let a = if in_registers {
            FirstMatrix::Registers(self.fragment(a, Type::B32, false)?)
        } else {
            FirstMatrix::Shared(self.read(a, Type::B64, false)?)
        };
        if (1..d.len()).any(|i| d[..i].contains(&d[i])) || a.registers().iter().any(|slot| d.contains(slot)) {
            return Err(self.invalid("D names a register twice"));
        }
        let d = d.into();
        let b = self.read(b, Type::B64, false)?;
        let adds = self.read_predicate(adds)?;
        Ok(WarpGroupAction::Multiply(Box::new(GroupMatrices { element, d, a, b, adds })))
    }
}
