//! Lowers control flow and instructions for several threads of a warp or block.
//!
//! Source: ISA 9.7.12 and 9.7.13, and 9.7.9 for `shfl.sync`.

use super::Lowering;
use crate::error::Result;
use crate::lanes::Type;
use crate::parse::Operand;
use crate::program::{NONE, Op, Shuffle, Slot, Update, Vote};

impl<'a> Lowering<'a> {
    /// Lowers one of these instructions. Returns `None` for other opcodes.
    pub(super) fn control(&mut self, opcode: &[&str], operands: &'a [Operand<'a>]) -> Result<Option<Op>> {
        Ok(Some(match *opcode {
            // `.uni` promises that all lanes branch the same way. Execution does not rely on it.
            ["bra"] | ["bra", "uni"] => {
                let [target] = self.exactly(operands)?;
                Op::Branch { target: self.label(target)? }
            }
            ["brx", "idx"] | ["brx", "idx", "uni"] => {
                let [index, table] = self.exactly(operands)?;
                let index = self.read(index, Type::B32, false)?;
                let Operand::Name(name) = table else {
                    return Err(self.invalid("expected a list of targets"));
                };
                let targets = self.tables.get(name).copied();
                let targets = targets.ok_or_else(|| self.invalid(format!("there is no list {name}")))?;
                let targets = targets.iter().map(|target| self.label(&Operand::Name(target)));
                Op::Table { index, targets: targets.collect::<Result<_>>()? }
            }
            ["ret"] | ["ret", "uni"] | ["exit"] => {
                let [] = self.exactly(operands)?;
                Op::Exit
            }
            ["call", ..] => return Err(self.unsupported("kernels must not call functions")),
            ["trap"] => {
                let [] = self.exactly(operands)?;
                Op::Trap
            }
            ["shfl", "sync", mode, "b32"] => self.shuffle(mode, operands)?,
            ["vote", "sync", mode, ty] => self.vote(mode, ty, operands)?,
            ["redux", "sync", operation, ty] => self.redux(operation, ty, operands)?,
            ["elect", "sync"] => {
                let [to, members] = self.exactly(operands)?;
                let Operand::Both(to, elected) = to else {
                    return Err(self.invalid("expected a register and a predicate"));
                };
                let members = self.read(members, Type::B32, false)?;
                let to = match *to {
                    "_" => NONE,
                    to => self.write(&Operand::Name(to), Type::B32)?,
                };
                Op::Elect { to, elected: self.write_predicate(elected)?, members }
            }
            ["bar", "warp", "sync"] => {
                let [members] = self.exactly(operands)?;
                Op::WarpBarrier { members: self.read(members, Type::B32, false)? }
            }
            ["bar", "sync"] | ["bar", "cta", "sync"] => self.barrier(operands, true)?,
            ["barrier", "sync", "aligned"] | ["barrier", "cta", "sync", "aligned"] => {
                self.barrier(operands, true)?
            }
            ["barrier", "sync"] | ["barrier", "cta", "sync"] => self.barrier(operands, false)?,
            ["barrier", "cluster", "arrive", "release", "aligned"] => {
                self.cluster_barrier(operands, false)?
            }
            ["barrier", "cluster", "wait", "acquire", "aligned"] => self.cluster_barrier(operands, true)?,
            ["mapa", "shared::cluster", "u32"] => {
                let [to, from, rank] = self.exactly(operands)?;
                let from = self.read(from, Type::B32, false)?;
                let rank = self.read(rank, Type::B32, false)?;
                Op::MapAddress { to: self.write(to, Type::B32)?, from, rank }
            }
            _ => return Ok(None),
        }))
    }

    fn label(&self, operand: &Operand) -> Result<u32> {
        let Operand::Name(name) = operand else { return Err(self.invalid("expected a label")) };
        let scopes = self.scopes.open.iter().rev().chain(&[0]);
        let label = scopes.copied().find_map(|scope| self.labels.get(&(scope, *name)).copied());
        label.ok_or_else(|| self.invalid(format!("there is no label {name}")))
    }

    /// `barrier.cluster.arrive` or `.wait`, for all lanes of the warp together.
    fn cluster_barrier(&mut self, operands: &'a [Operand<'a>], waits: bool) -> Result<Op> {
        let [] = self.exactly(operands)?;
        self.program.partial = true;
        Ok(Op::ClusterBarrier { waits, members: self.all_lanes()? })
    }

    /// `bar.sync a{, b}`: barrier a for all threads of the block, or for b of them.
    fn barrier(&mut self, operands: &'a [Operand<'a>], aligned: bool) -> Result<Op> {
        let (number, count) = match operands {
            [number] => (number, None),
            [number, count] => (number, Some(count)),
            _ => return Err(self.invalid("it takes a barrier and a number of threads")),
        };
        let fits = |operand: &Operand, fits: fn(i128) -> bool| match operand {
            Operand::Integer(number) => fits(*number),
            _ => true,
        };
        if !fits(number, |number| (0..16).contains(&number)) {
            return Err(self.unsupported("a barrier that is not a number from 0 to 15"));
        }
        if count.is_some_and(|count| !fits(count, |count| count > 0 && count % 32 == 0)) {
            return Err(self.invalid("a number of threads that is not a multiple of 32"));
        }
        self.program.partial |= count.is_some();
        let count = count.map_or(Ok(NONE), |count| self.read(count, Type::B32, false))?;
        Ok(Op::Barrier { number: self.read(number, Type::B32, false)?, count, aligned })
    }

    /// `shfl.sync.mode.b32 d{|p}, a, b, c, membermask`.
    fn shuffle(&mut self, mode: &str, operands: &'a [Operand<'a>]) -> Result<Op> {
        let mode = match mode {
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            "idx" => Shuffle::Index,
            _ => return Err(self.unsupported(format!("shuffles of mode {mode}"))),
        };
        let [to, value, by, clamp, members] = self.exactly(operands)?;
        let [value, by, clamp, members] = [
            self.read(value, Type::B32, true)?,
            self.read(by, Type::B32, false)?,
            self.read(clamp, Type::B32, false)?,
            self.read(members, Type::B32, false)?,
        ];
        let (to, valid) = self.with_predicate(to)?;
        Ok(Op::Shuffle { mode, to: self.write(&to, Type::B32)?, valid, value, by, clamp, members })
    }

    /// `vote.sync.mode.pred d, {!}a, membermask` and `vote.sync.ballot.b32`.
    fn vote(&mut self, mode: &str, ty: &str, operands: &'a [Operand<'a>]) -> Result<Op> {
        let mode = match (mode, ty) {
            ("all", "pred") => Vote::All,
            ("any", "pred") => Vote::Any,
            ("uni", "pred") => Vote::Uniform,
            ("ballot", "b32") => Vote::Ballot,
            _ => return Err(self.unsupported(format!("votes of mode {mode} and type {ty}"))),
        };
        let [to, from, members] = self.exactly(operands)?;
        let from = self.read_predicate(from)?;
        let members = self.read(members, Type::B32, false)?;
        let to = match (mode, to) {
            (Vote::Ballot, to) => self.write(to, Type::B32)?,
            (_, Operand::Name(name)) => self.write_predicate(name)?,
            _ => NONE,
        };
        Ok(Op::Vote { mode, to, from, members })
    }

    /// Returns the member mask of instructions that all lanes of a warp execute.
    pub(super) fn all_lanes(&mut self) -> Result<Slot> {
        self.read(&Operand::Integer(u32::MAX.into()), Type::B32, false)
    }

    /// `redux.sync.op.type d, a, membermask`.
    fn redux(&mut self, operation: &str, ty: &str, operands: &'a [Operand<'a>]) -> Result<Op> {
        let reduction = match (operation, ty) {
            ("add", "u32" | "s32") => Update::Add,
            ("min", "u32") => Update::MinUnsigned,
            ("max", "u32") => Update::MaxUnsigned,
            ("min", "s32") => Update::MinSigned,
            ("max", "s32") => Update::MaxSigned,
            ("and", "b32") => Update::And,
            ("or", "b32") => Update::Or,
            ("xor", "b32") => Update::Xor,
            _ => return Err(self.unsupported(format!("reductions {operation} of type {ty}"))),
        };
        let [to, from, members] = self.exactly(operands)?;
        let from = self.read(from, Type::B32, false)?;
        let members = self.read(members, Type::B32, false)?;
        Ok(Op::Reduce { reduction, to: self.write(to, Type::B32)?, from, members })
    }
}
