//! Instructions that the lanes of a warp execute together.
//!
//! They are shuffles, votes and reductions.

use super::grid::{Grid, Random};
use super::memory::updated;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::launch::Schedule;
use crate::program::{Guard, NONE, Program, Shuffle, Slot, Update, Vote};

/// The operands of a shuffle.
pub(super) struct Shuffled {
    pub(super) to: Slot,
    pub(super) valid: Slot,
    pub(super) value: Slot,
    pub(super) by: Slot,
    pub(super) clamp: Slot,
}

impl Warp {
    /// `shfl.sync` (ISA 9.7.9) of the lanes in `active`.
    ///
    /// Reading a lane that does not execute the shuffle is undefined in the ISA, and a fault here.
    pub(super) fn shuffle(&mut self, program: &Program, active: u32, mode: Shuffle, of: &Shuffled) -> Step {
        let registers = &mut self.registers;
        let source = registers.word(program, of.value, active)?;
        let by = registers.word(program, of.by, active)?;
        let clamp = registers.word(program, of.clamp, active)?;
        let mut values = *source;
        let mut valid = 0;
        for lane in 0..LANES as u32 {
            if active >> lane & 1 == 0 {
                continue;
            }
            let (by, clamp) = (by[lane as usize] & 31, clamp[lane as usize]);
            let segment = clamp >> 8 & 31;
            let last = lane & segment | clamp & 31 & !segment;
            let first = lane & segment;
            let (from, inside) = match mode {
                Shuffle::Up => (lane.wrapping_sub(by), lane as i32 - by as i32 >= last as i32),
                Shuffle::Down => (lane + by, lane + by <= last),
                Shuffle::Butterfly => (lane ^ by, lane ^ by <= last),
                Shuffle::Index => (first | by & !segment, (first | by & !segment) <= last),
            };
            let from = if inside { from } else { lane };
            if active >> from & 1 == 0 {
                return trap(lane, FaultKind::InactiveSource { lane: from });
            }
            values[lane as usize] = source[from as usize];
            valid |= u32::from(inside) << lane;
        }
        registers.set_word(of.to, active, &values);
        registers.set_predicate(of.valid, active, valid);
        Ok(())
    }

    /// `vote.sync` (ISA 9.7.13) of the lanes in `active`.
    pub(super) fn vote(&mut self, program: &Program, active: u32, mode: Vote, to: Slot, from: Guard) -> Step {
        let lanes = self.registers.predicate(program, from, active)? & active;
        let all = |holds: bool| if holds { u32::MAX } else { 0 };
        match mode {
            Vote::Ballot => self.registers.set_word(to, active, &[lanes; LANES]),
            Vote::All => self.registers.set_predicate(to, active, all(lanes == active)),
            Vote::Any => self.registers.set_predicate(to, active, all(lanes != 0)),
            Vote::Uniform => {
                self.registers.set_predicate(to, active, all(lanes == 0 || lanes == active));
            }
        }
        debug_assert!(to != NONE || !matches!(mode, Vote::Ballot));
        Ok(())
    }

    /// `elect.sync`: the schedule chooses a lane, the same one for every election with this mask.
    pub(super) fn elect(&mut self, grid: &Grid, active: u32, [to, elected, members]: [Slot; 3]) -> Step {
        let mask =
            self.registers.word(&grid.kernel.program, members, active)?[active.trailing_zeros() as usize];
        let lanes: Vec<u32> = (0..LANES as u32).filter(|lane| mask & active >> lane & 1 == 1).collect();
        let lane = match self.launch.schedule {
            Schedule::LowestFirst => lanes[0],
            Schedule::HighestFirst => lanes[lanes.len() - 1],
            Schedule::Random(seed) => {
                let mut random = Random(seed ^ u64::from(mask) << 8);
                lanes[random.below(lanes.len() as u32) as usize]
            }
        };
        if to != NONE {
            self.registers.set_word(to, active, &[lane; LANES]);
        }
        self.registers.set_predicate(elected, active, 1 << lane);
        Ok(())
    }

    /// `redux.sync` (ISA 9.7.13) of the lanes in `active`.
    pub(super) fn reduce(
        &mut self,
        program: &Program,
        active: u32,
        reduction: Update,
        [to, from]: [Slot; 2],
    ) -> Step {
        let values = self.registers.word(program, from, active)?;
        let members = (0..LANES).filter(|lane| active >> lane & 1 == 1);
        let reduced = members
            .map(|lane| u64::from(values[lane]))
            .reduce(|all, value| updated(reduction, 32, all, [value, 0]));
        self.registers.set_word(to, active, &[reduced.unwrap_or(0) as u32; LANES]);
        Ok(())
    }
}
