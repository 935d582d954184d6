//! A warp: groups of lanes that stand at the same instruction, and the choice of the next one.
//!
//! Lanes are scheduled independently (ISA 3.1, from sm_70 on): after a branch on which they differ, lanes go
//! on as two groups. Groups that come to the same instruction become one. An instruction with `.sync` waits
//! until all lanes of its member mask that have not exited are in one group before it; only what other lanes
//! do in the meantime can bring them there.

use super::flights::Copies;
use super::grid::Grid;
use super::registers::Registers;
use crate::fault::{FaultKind, Step, trap};
use crate::launch::{Launch, Schedule};
use crate::program::{Op, Program};

/// A warp of a block.
pub(super) struct Warp {
    /// The number of the warp in its block.
    pub(super) index: u32,
    pub(super) registers: Registers,
    pub(super) copies: Copies,
    pub(super) groups: Vec<Group>,
    /// The lanes that it was launched with.
    pub(super) launched: u32,
    /// Lanes that have not exited.
    pub(super) alive: u32,
    /// Lanes that had not exited at the last barrier of the block.
    came: u32,
    /// The number of barriers of the warp that all its lanes have passed.
    pub(super) time: u32,
    schedule: Schedule,
    pub(super) launch: Launch,
}

/// Lanes at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) pc: u32,
    pub(super) lanes: u32,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// The lanes wait for other lanes of the warp, at an instruction with `.sync`.
    Waiting,
    /// The lanes wait at a barrier of the block.
    Arrived,
}

/// The reason why a warp stopped.
pub(super) enum Stop {
    /// All lanes have exited.
    Done,
    /// All lanes that have not exited wait at a barrier.
    Barrier,
    /// Another warp's turn.
    Preempted,
}

/// The effect of an instruction on its group.
pub(super) enum Next {
    /// The group goes to the next instruction.
    Fall,
    /// The group goes elsewhere.
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

    /// Resets the warp to the start of a block.
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

    /// The instruction of a barrier at which some lanes wait, those lanes, and the barrier's number.
    pub(super) fn at_barrier(&self, program: &Program) -> Option<(u32, u32, u32)> {
        let barrier = |group: &Group| match program.code[group.pc as usize].op {
            Op::Barrier { number, .. } => Some((group.pc, group.lanes, number)),
            _ => None,
        };
        self.groups.iter().find_map(barrier)
    }

    /// The instruction at which lanes wait at a barrier of another number.
    pub(super) fn other_barrier(&self, program: &Program, number: u32) -> Option<u32> {
        let other = |group: &&Group| match program.code[group.pc as usize].op {
            Op::Barrier { number: here, .. } => here != number,
            _ => true,
        };
        self.groups.iter().find(other).map(|group| group.pc)
    }

    /// All lanes go on behind their barriers, but for those that exited instead; gives whether there are
    /// such.
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

    /// Returns whether the running group, now at this instruction, must let others go first or join them.
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
}
