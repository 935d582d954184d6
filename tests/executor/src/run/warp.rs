//! A warp: groups of lanes that stand at the same instruction, and which of them goes next.
//!
//! Lanes are scheduled independently (ISA 3.1, from sm_70 on): after a branch on which they differ, lanes go on as two
//! groups. Groups that come to the same instruction become one. An instruction with `.sync` waits until all lanes of
//! its member mask that have not exited are in one group before it; only what other lanes do in the meantime
//! can bring them there.

use super::Grid;
use super::copies::Copies;
use super::registers::Registers;
use super::together::Shuffled;
use crate::fault::{FaultKind, Step, trap};
use crate::launch::{Launch, Schedule};
use crate::program::{Instruction, Op, Program, Slot};

/// A warp of a block.
pub(super) struct Warp {
    /// In its block.
    pub(super) index: u32,
    pub(super) registers: Registers,
    pub(super) copies: Copies,
    groups: Vec<Group>,
    /// The lanes that it was launched with.
    launched: u32,
    /// Those that have not exited.
    alive: u32,
    /// Those that had not exited at the last barrier of the block.
    came: u32,
    /// How many barriers of the warp all its lanes have passed.
    pub(super) time: u32,
    schedule: Schedule,
    pub(super) launch: Launch,
}

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
struct Group {
    pc: u32,
    lanes: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// For other lanes of the warp, at an instruction with `.sync`.
    Waiting,
    /// At a barrier of the block.
    Arrived,
}

/// Why a warp stopped.
pub(super) enum Stop {
    /// All lanes have exited.
    Done,
    /// All lanes that have not exited wait at a barrier.
    Barrier,
    /// Another warp's turn.
    Preempted,
}

/// What an instruction did to its group.
enum Next {
    /// It goes to the next instruction.
    Fall,
    /// It goes elsewhere.
    Jump(u32),
    /// Its lanes are in other groups now, or wait, or exited.
    Dissolved,
}

impl Warp {
    pub(super) fn new(program: &Program, index: u32, launch: &Launch) -> Self {
        let lanes = (launch.threads - index * 32).min(32);
        Self {
            index,
            registers: Registers::new(program),
            copies: Copies::default(),
            groups: Vec::new(),
            launched: u32::MAX >> (32 - lanes),
            alive: 0,
            came: 0,
            time: 0,
            schedule: launch.schedule,
            launch: launch.clone(),
        }
    }

    /// As at the start of a block.
    pub(super) fn reset(&mut self, program: &Program, block: u32) {
        self.registers.reset(program, &self.launch, block, self.index);
        (self.alive, self.came) = (self.launched, self.launched);
        self.copies = Copies::default();
        self.time = 0;
        self.groups.clear();
        self.groups.push(Group { pc: 0, lanes: self.launched, state: State::Ready });
    }

    pub(super) fn done(&self) -> bool {
        self.alive == 0
    }

    /// Where some lanes wait at a barrier, which lanes, and the barrier's number.
    pub(super) fn at_barrier(&self, program: &Program) -> Option<(u32, u32, u32)> {
        let barrier = |group: &Group| match program.code[group.pc as usize].op {
            Op::Barrier { number, .. } => Some((group.pc, group.lanes, number)),
            _ => None,
        };
        self.groups.iter().find_map(barrier)
    }

    /// Where lanes wait at a barrier of another number.
    pub(super) fn other_barrier(&self, program: &Program, number: u32) -> Option<u32> {
        let other = |group: &&Group| match program.code[group.pc as usize].op {
            Op::Barrier { number: here, .. } => here != number,
            _ => true,
        };
        self.groups.iter().find(other).map(|group| group.pc)
    }

    /// All lanes go on behind their barriers, but for those that exited instead; gives whether there are such.
    pub(super) fn pass_barrier(&mut self) -> bool {
        for group in &mut self.groups {
            group.pc += 1;
            group.state = State::Ready;
        }
        std::mem::replace(&mut self.came, self.alive) != self.alive
    }

    /// Runs until it is done, waits, or another warp should have its turn.
    pub(super) fn run(&mut self, grid: &mut Grid) -> Step<Stop> {
        let mut turns = match self.schedule {
            Schedule::Random(_) => 1 + grid.random.below(8),
            _ => u32::MAX,
        };
        loop {
            let Some(mut group) = self.next_group(grid) else { return self.stop(grid) };
            if turns == 0 {
                self.groups.push(group);
                return Ok(Stop::Preempted);
            }
            if let Schedule::Random(_) = self.schedule {
                turns -= 1;
            }
            let mut steps = match self.schedule {
                Schedule::Random(_) => 1 + grid.random.below(16),
                _ => u32::MAX,
            };
            loop {
                match self.step(grid, group)? {
                    Next::Fall => group.pc += 1,
                    Next::Jump(target) => group.pc = target,
                    Next::Dissolved => break,
                }
                if let Schedule::Random(_) = self.schedule {
                    steps -= 1;
                }
                if steps == 0 || !self.groups.is_empty() && self.yields(group.pc) {
                    self.groups.push(group);
                    break;
                }
            }
        }
    }

    /// Takes out the group whose turn it is, with all others at the same instruction.
    fn next_group(&mut self, grid: &mut Grid) -> Option<Group> {
        let ready = self.groups.iter().filter(|group| group.state == State::Ready);
        let pc = match self.schedule {
            Schedule::LowestFirst => ready.map(|group| group.pc).min()?,
            Schedule::HighestFirst => ready.map(|group| group.pc).max()?,
            Schedule::Random(_) => {
                let count = ready.clone().count() as u32;
                if count == 0 {
                    return None;
                }
                let chosen = grid.random.below(count) as usize;
                ready.map(|group| group.pc).nth(chosen)?
            }
        };
        let mut lanes = 0;
        self.groups.retain(|group| {
            let here = group.pc == pc && group.state != State::Arrived;
            if here {
                lanes |= group.lanes;
            }
            !here
        });
        Some(Group { pc, lanes, state: State::Ready })
    }

    /// Whether the running group, now at this instruction, must let others go first or join them.
    fn yields(&self, pc: u32) -> bool {
        self.groups.iter().any(|group| match (group.state, self.schedule) {
            (State::Arrived, _) => false,
            (State::Ready, Schedule::LowestFirst) => pc >= group.pc,
            (State::Ready, Schedule::HighestFirst) => pc <= group.pc,
            _ => pc == group.pc,
        })
    }

    /// No group is ready.
    fn stop(&self, grid: &mut Grid) -> Step<Stop> {
        let Some(waiting) = self.groups.iter().find(|group| group.state == State::Waiting) else {
            return Ok(if self.alive == 0 { Stop::Done } else { Stop::Barrier });
        };
        grid.pc = waiting.pc;
        let describe = |group: &Group| {
            let (line, text) = grid.kernel.instruction(group.pc as usize);
            format!("lanes {:#010x} wait at line {line}, `{text}`", group.lanes)
        };
        let all: Vec<String> = self.groups.iter().map(describe).collect();
        let exited = self.launched & !self.alive;
        let message = format!("{}; lanes {exited:#010x} have exited", all.join(", "));
        trap(waiting.lanes.trailing_zeros(), FaultKind::Deadlock(message))
    }

    /// Executes an instruction for a group, which is not in `groups`.
    #[inline(always)]
    fn step(&mut self, grid: &mut Grid, group: Group) -> Step<Next> {
        let kernel = grid.kernel;
        let program = &*kernel.program;
        let Group { pc, lanes, .. } = group;
        grid.pc = pc;
        let Instruction { guard, op } = &program.code[pc as usize];
        let active = match *guard {
            None => lanes,
            Some(guard) => lanes & self.registers.predicate(program, guard, lanes)?,
        };
        if let Op::Shuffle { members, .. }
        | Op::Vote { members, .. }
        | Op::Reduce { members, .. }
        | Op::Multiply { members, .. }
        | Op::WarpBarrier { members } = *op
        {
            return self.synchronize(grid, group, active, members);
        }
        if let Op::Barrier { aligned, .. } = *op {
            return self.arrive(grid, group, active, aligned);
        }
        grid.count(pc, lanes, active)?;
        if active == 0 {
            return Ok(Next::Fall);
        }
        match *op {
            Op::Compute { shape, to, from } => self.compute(program, active, shape, to, from)?,
            Op::Compare { shape, to, other, from, combined } => {
                self.compare(program, active, shape, [to, other], from, combined)?;
            }
            Op::SelectWord { to, from, by } => self.select_word(program, active, to, from, by)?,
            Op::SelectLong { to, from, by } => self.select_long(program, active, to, from, by)?,
            Op::Predicate { logic, to, from } => self.logic(program, active, logic, to, from)?,
            Op::Carry { subtract, takes, sets, to, from } => {
                self.carry(program, active, [subtract, takes, sets], to, from)?;
            }
            Op::Pack { to, ref from } => self.pack(program, active, to, from)?,
            Op::Unpack { ref to, from } => self.unpack(program, active, to, from)?,
            Op::Parameter { ref to, at, bytes, signed } => {
                self.load_parameter(grid, active, to, at, bytes, signed);
            }
            Op::Load { ref to, from, bytes, signed, manner } => {
                self.load(grid, active, to, from, (bytes, signed, manner))?;
            }
            Op::Store { to, ref from, bytes, manner } => {
                self.store(grid, active, to, from, (bytes, manner))?
            }
            Op::Atomic { update, bits, to, at, from } => {
                self.atomic(grid, active, (update, bits), to, at, from)?;
            }
            Op::Copy { to, from, bytes, read } => self.copy(grid, active, to, from, (bytes, read))?,
            Op::CloseGroup => self.copies.close_group(active),
            Op::AwaitCopies { but } => self.await_copies(grid, active, but)?,
            Op::Approximate { flush, to, from } => {
                self.approximate(program, active, &grid.launch.approximation, flush, [to, from])?;
            }
            Op::Branch { target } => return Ok(self.branch(group, active, target)),
            Op::Table { index, ref targets } => return self.table(program, group, active, index, targets),
            Op::Exit => {
                self.leave_copies(grid, active)?;
                return Ok(self.exit(group, active));
            }
            Op::Trap => return trap(active.trailing_zeros(), FaultKind::Trap),
            Op::Shuffle { .. }
            | Op::Vote { .. }
            | Op::Reduce { .. }
            | Op::Multiply { .. }
            | Op::WarpBarrier { .. }
            | Op::Barrier { .. } => {
                unreachable!("handled above")
            }
        }
        Ok(Next::Fall)
    }

    fn ready(&mut self, pc: u32, lanes: u32) {
        if lanes != 0 {
            self.groups.push(Group { pc, lanes, state: State::Ready });
        }
    }

    fn branch(&mut self, group: Group, taken: u32, target: u32) -> Next {
        if taken == group.lanes {
            return Next::Jump(target);
        }
        self.ready(target, taken);
        self.ready(group.pc + 1, group.lanes & !taken);
        Next::Dissolved
    }

    /// `brx.idx` (ISA 9.7.12): what lies beyond the list is undefined, and a fault here.
    fn table(
        &mut self,
        program: &Program,
        group: Group,
        active: u32,
        index: Slot,
        targets: &[u32],
    ) -> Step<Next> {
        let indices = *self.registers.word(program, index, active)?;
        for lane in (0..32).filter(|lane| active >> lane & 1 == 1) {
            let index = indices[lane as usize];
            let Some(&target) = targets.get(index as usize) else {
                return trap(lane, FaultKind::JumpTable { index, entries: targets.len() });
            };
            match self.groups.iter_mut().find(|other| other.pc == target && other.state == State::Ready) {
                Some(other) => other.lanes |= 1 << lane,
                None => self.ready(target, 1 << lane),
            }
        }
        self.ready(group.pc + 1, group.lanes & !active);
        Ok(Next::Dissolved)
    }

    /// Lanes that wait for the others of their masks need not wait for those that exited.
    fn exit(&mut self, group: Group, active: u32) -> Next {
        self.alive &= !active;
        self.ready(group.pc + 1, group.lanes & !active);
        for group in &mut self.groups {
            if group.state == State::Waiting {
                group.state = State::Ready;
            }
        }
        Next::Dissolved
    }

    /// An instruction with `.sync` for those lanes whose member mask is complete; the others wait.
    fn synchronize(&mut self, grid: &mut Grid, group: Group, active: u32, members: Slot) -> Step<Next> {
        let program = &*grid.kernel.program;
        let Group { pc, lanes, .. } = group;
        let masks = *self.registers.word(program, members, active)?;
        let mut left = active;
        let mut waiting = 0;
        while left != 0 {
            let lane = left.trailing_zeros();
            let mask = masks[lane as usize];
            let same = (0..32).filter(|&lane| left >> lane & 1 == 1 && masks[lane as usize] == mask);
            let same = same.fold(0, |same, lane| same | 1u32 << lane);
            left &= !same;
            if same & !mask != 0 {
                return trap((same & !mask).trailing_zeros(), FaultKind::NotAMember { mask });
            }
            if mask & self.alive != same {
                waiting |= same;
                continue;
            }
            grid.count(pc, same, same)?;
            self.together(program, same, &program.code[pc as usize].op)?;
        }
        if active != lanes {
            grid.seen[pc as usize] |= crate::launch::SKIPPED;
        }
        if waiting == 0 {
            return Ok(Next::Fall);
        }
        self.groups.push(Group { pc, lanes: waiting, state: State::Waiting });
        self.ready(pc + 1, lanes & !waiting);
        Ok(Next::Dissolved)
    }

    /// An instruction with `.sync`, for lanes that are complete.
    fn together(&mut self, program: &Program, active: u32, op: &Op) -> Step {
        match *op {
            Op::Shuffle { mode, to, valid, value, by, clamp, .. } => {
                self.shuffle(program, active, mode, &Shuffled { to, valid, value, by, clamp })
            }
            Op::Vote { mode, to, from, .. } => self.vote(program, active, mode, to, from),
            Op::Reduce { reduction, to, from, .. } => self.reduce(program, active, reduction, [to, from]),
            Op::Multiply { ref matrices, .. } => self.multiply(program, active, matrices),
            _ => {
                // `bar.warp.sync`: the race detector knows only barriers of all lanes.
                self.time += u32::from(active == self.launched);
                Ok(())
            }
        }
    }

    /// `bar.sync` and `barrier.sync` (ISA 9.7.13). The aligned ones are for all lanes of the warp at once.
    fn arrive(&mut self, grid: &mut Grid, group: Group, active: u32, aligned: bool) -> Step<Next> {
        let Group { pc, lanes, .. } = group;
        let complete = !aligned || active == self.alive;
        let state = if complete { State::Arrived } else { State::Waiting };
        if complete || active == 0 {
            grid.count(pc, lanes, active)?;
        }
        if active != 0 {
            self.groups.push(Group { pc, lanes: active, state });
        }
        self.ready(pc + 1, lanes & !active);
        Ok(Next::Dissolved)
    }
}
