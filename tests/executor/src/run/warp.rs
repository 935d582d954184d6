//! A warp: groups of lanes at the same instruction, and the choice of the next group.
//!
//! Lanes are scheduled independently (ISA 3.1, sm_70 and newer). After a divergent branch they
//! continue as two groups. Groups that reach the same instruction merge. An instruction with
//! `.sync` waits until all lanes of its member mask that have not exited are in one group before
//! it. Only progress of the other lanes can bring them there.

use super::flights::Copies;
use super::grid::Grid;
use super::registers::Registers;
use super::under_way::{Share, Tensors};
use crate::fault::{FaultKind, Step, trap};
use crate::launch::{Launch, Schedule};
use crate::program::Program;

/// A warp of a block.
pub(super) struct Warp {
    /// The warp's index among all warps of the cluster, its index in its block, and the block's
    /// rank.
    pub(super) index: u32,
    pub(super) in_block: u32,
    pub(super) rank: u32,
    /// The phase of the cluster's barrier at which it has arrived but not waited.
    pub(super) arrival: Option<u64>,
    pub(super) registers: Registers,
    pub(super) copies: Copies,
    pub(super) groups: Vec<Group>,
    /// Lanes that were launched.
    pub(super) launched: u32,
    /// Lanes that have not exited.
    pub(super) alive: u32,
    pub(super) products: Share,
    pub(super) tensors: Tensors,
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
    /// The lanes wait at the barrier of this number, for this number of threads (0: the whole
    /// block).
    Arrived(u32, u32),
    /// The lanes polled without success when the event counter had this value.
    Spinning(u64),
}

/// The effect of an instruction on its group.
pub(super) enum Next {
    /// The group continues at the next instruction.
    Fall,
    /// The group continues elsewhere.
    Jump(u32),
    /// The group continues at the next instruction after an event.
    Spin,
    /// Its lanes are in other groups now, or wait, or exited.
    Dissolved,
}

impl Warp {
    pub(super) fn new(program: &Program, index: u32, launch: &Launch) -> Self {
        let warps = launch.threads.div_ceil(32);
        let (rank, in_block) = (index / warps, index % warps);
        let lanes = (launch.threads - in_block * 32).min(32);
        Self {
            index,
            in_block,
            rank,
            arrival: None,
            registers: Registers::new(program),
            copies: Copies::default(),
            groups: Vec::new(),
            launched: u32::MAX >> (32 - lanes),
            alive: 0,
            products: Share::default(),
            tensors: Tensors::default(),
            schedule: launch.schedule,
            launch: launch.clone(),
        }
    }

    /// Resets the warp to the start of a block of a cluster.
    pub(super) fn reset(&mut self, program: &Program, cluster: u32) {
        self.registers.reset(program, &self.launch, [cluster, self.rank, self.in_block]);
        self.arrival = None;
        self.alive = self.launched;
        self.copies = Copies::default();
        self.products = Share::default();
        self.tensors = Tensors::default();
        self.groups.clear();
        self.groups.push(Group { pc: 0, lanes: self.launched, state: State::Ready });
    }

    pub(super) fn done(&self) -> bool {
        self.alive == 0
    }

    /// Returns whether some lanes neither wait at a barrier nor for an event after `events`.
    pub(super) fn can_go_on(&self, events: u64) -> bool {
        self.groups.iter().any(|group| group.ready(events))
    }

    /// Releases all lanes that wait at a barrier.
    pub(super) fn pass_barrier(&mut self, number: u32) {
        for group in &mut self.groups {
            if let State::Arrived(at, _) = group.state
                && at == number
            {
                group.pc += 1;
                group.state = State::Ready;
            }
        }
    }

    /// Runs until it is done, waits, or must yield to another warp.
    pub(super) fn run(&mut self, grid: &mut Grid) -> Step {
        let mut turns = match self.schedule {
            Schedule::Random(_) => 1 + grid.random.below(8),
            _ => u32::MAX,
        };
        loop {
            let Some(mut group) = self.next_group(grid) else { return self.stop(grid) };
            if turns == 0 {
                self.groups.push(group);
                return Ok(());
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
                    Next::Spin => {
                        let state = State::Spinning(grid.events);
                        self.groups.push(Group { pc: group.pc + 1, state, ..group });
                        break;
                    }
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

    /// Removes and returns the next group to run, merged with all others at the same instruction.
    fn next_group(&mut self, grid: &mut Grid) -> Option<Group> {
        let events = grid.events;
        let ready = self.groups.iter().filter(|group| group.ready(events));
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
            let here = group.pc == pc && !matches!(group.state, State::Arrived(..));
            if here {
                lanes |= group.lanes;
            }
            !here
        });
        Some(Group { pc, lanes, state: State::Ready })
    }

    /// Returns whether the running group, now at this instruction, must yield to others or merge
    /// with them.
    fn yields(&self, pc: u32) -> bool {
        self.groups.iter().any(|group| match (group.state, self.schedule) {
            (State::Arrived(..), _) => false,
            (State::Ready, Schedule::LowestFirst) => pc >= group.pc,
            (State::Ready, Schedule::HighestFirst) => pc <= group.pc,
            _ => pc == group.pc,
        })
    }

    /// Checks for lanes that wait for others of the warp although no group is ready.
    fn stop(&self, grid: &mut Grid) -> Step {
        let spins = |group: &Group| matches!(group.state, State::Spinning(_));
        let waiting = self.groups.iter().find(|group| group.state == State::Waiting);
        let Some(waiting) = waiting.filter(|_| !self.groups.iter().any(spins)) else { return Ok(()) };
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

impl Group {
    /// Returns whether the group can continue, given the number of events.
    fn ready(&self, events: u64) -> bool {
        match self.state {
            State::Ready => true,
            State::Spinning(seen) => seen != events,
            State::Waiting | State::Arrived(..) => false,
        }
    }
}
