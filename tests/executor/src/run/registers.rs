//! A warp's registers, and the lanes for which each was written.

use crate::fault::{FaultKind, Step, trap};
use crate::lanes::{LANES, Longs, Words};
use crate::launch::Launch;
use crate::memory::shared_of;
use crate::program::{Guard, NONE, Program, Register, Slot, Special};

/// The three register files. Constants and special registers are registers without a writer.
pub(super) struct Registers {
    words: Vec<Words>,
    words_set: Vec<u32>,
    longs: Vec<Longs>,
    longs_set: Vec<u32>,
    predicates: Vec<u32>,
    predicates_set: Vec<u32>,
    /// The carry flag (ISA 9.7.2).
    pub(super) carry: u32,
    pub(super) carry_set: u32,
}

impl Registers {
    pub(super) fn new(program: &Program) -> Self {
        let (words, longs) = (program.words.names.len(), program.longs.names.len());
        let predicates = program.predicates.names.len();
        let mut registers = Self {
            words: vec![[0; LANES]; words],
            words_set: vec![0; words],
            longs: vec![[0; LANES]; longs],
            longs_set: vec![0; longs],
            predicates: vec![0; predicates],
            predicates_set: vec![0; predicates],
            carry: 0,
            carry_set: 0,
        };
        for &(slot, value) in &program.words.constants {
            registers.words[slot as usize] = [value; LANES];
        }
        for &(slot, value) in &program.longs.constants {
            registers.longs[slot as usize] = [value; LANES];
        }
        for &(slot, value) in &program.predicates.constants {
            registers.predicates[slot as usize] = if value { u32::MAX } else { 0 };
        }
        registers
    }

    /// Clears everything except constants, and sets the special registers.
    pub(super) fn reset(&mut self, program: &Program, launch: &Launch, [cluster, rank, warp]: [u32; 3]) {
        self.words_set.fill(0);
        self.longs_set.fill(0);
        self.predicates_set.fill(0);
        self.carry_set = 0;
        program.words.constants.iter().for_each(|&(slot, _)| self.words_set[slot as usize] = u32::MAX);
        program.longs.constants.iter().for_each(|&(slot, _)| self.longs_set[slot as usize] = u32::MAX);
        let predicates = &program.predicates.constants;
        predicates.iter().for_each(|&(slot, _)| self.predicates_set[slot as usize] = u32::MAX);
        let value = |special: Special, lane: u32| match special {
            Special::Thread => warp * LANES as u32 + lane,
            Special::Threads => launch.threads,
            Special::Block => cluster * launch.cluster + rank,
            Special::Blocks => launch.blocks,
            Special::Lane => lane,
            Special::Rank => rank,
            Special::Shared(address) => shared_of(rank, address),
        };
        for &(slot, special) in &program.specials {
            self.words[slot as usize] = std::array::from_fn(|lane| value(special, lane as u32));
            self.words_set[slot as usize] = u32::MAX;
        }
        for &(slot, special) in &program.long_specials {
            self.longs[slot as usize] = std::array::from_fn(|lane| value(special, lane as u32).into());
            self.longs_set[slot as usize] = u32::MAX;
        }
    }

    /// Returns a word. All active lanes must have written it.
    #[inline(always)]
    pub(super) fn word(&self, program: &Program, slot: Slot, active: u32) -> Step<&Words> {
        let missing = active & !self.words_set[slot as usize];
        if missing != 0 {
            return unwritten(&program.words.names[slot as usize], missing);
        }
        Ok(&self.words[slot as usize])
    }

    /// Returns a long. All active lanes must have written it.
    #[inline(always)]
    pub(super) fn long(&self, program: &Program, slot: Slot, active: u32) -> Step<&Longs> {
        let missing = active & !self.longs_set[slot as usize];
        if missing != 0 {
            return unwritten(&program.longs.names[slot as usize], missing);
        }
        Ok(&self.longs[slot as usize])
    }

    /// Returns the lanes whose predicate or negated predicate is true. Inactive lanes are
    /// undefined.
    #[inline(always)]
    pub(super) fn predicate(&self, program: &Program, guard: Guard, active: u32) -> Step<u32> {
        let slot = guard.predicate as usize;
        let missing = active & !self.predicates_set[slot];
        if missing != 0 {
            return unwritten(&program.predicates.names[slot], missing);
        }
        Ok(if guard.negated { !self.predicates[slot] } else { self.predicates[slot] })
    }

    #[inline(always)]
    pub(super) fn set_word(&mut self, slot: Slot, active: u32, values: &Words) {
        let register = &mut self.words[slot as usize];
        if active == u32::MAX {
            *register = *values;
        } else {
            for (lane, (register, value)) in register.iter_mut().zip(values).enumerate() {
                *register = if active >> lane & 1 == 1 { *value } else { *register };
            }
        }
        self.words_set[slot as usize] |= active;
    }

    #[inline(always)]
    pub(super) fn set_long(&mut self, slot: Slot, active: u32, values: &Longs) {
        let register = &mut self.longs[slot as usize];
        if active == u32::MAX {
            *register = *values;
        } else {
            for (lane, (register, value)) in register.iter_mut().zip(values).enumerate() {
                *register = if active >> lane & 1 == 1 { *value } else { *register };
            }
        }
        self.longs_set[slot as usize] |= active;
    }

    #[inline(always)]
    pub(super) fn set_predicate(&mut self, slot: Slot, active: u32, lanes: u32) {
        if slot != NONE {
            let register = &mut self.predicates[slot as usize];
            *register = *register & !active | lanes & active;
            self.predicates_set[slot as usize] |= active;
        }
    }

    /// Returns a register's values as longs.
    pub(super) fn any(&self, program: &Program, register: Register, active: u32) -> Step<Longs> {
        Ok(match register {
            Register::Word(slot, _) => self.word(program, slot, active)?.map(u64::from),
            Register::Long(slot) => *self.long(program, slot, active)?,
            Register::Sink(_) => [0; LANES],
        })
    }

    /// Sets a register to the lowest bits of longs.
    pub(super) fn set_any(&mut self, register: Register, active: u32, values: &Longs) {
        match register {
            Register::Word(slot, bits) => {
                let mask = u32::MAX >> (32 - bits);
                self.set_word(slot, active, &values.map(|value| value as u32 & mask));
            }
            Register::Long(slot) => self.set_long(slot, active, values),
            Register::Sink(_) => {}
        }
    }

    /// Returns one lane of a register that all active lanes have written.
    #[inline(always)]
    pub(super) fn lane(&self, register: Register, lane: u32) -> u64 {
        match register {
            Register::Word(slot, _) => self.words[slot as usize][lane as usize].into(),
            Register::Long(slot) => self.longs[slot as usize][lane as usize],
            Register::Sink(_) => 0,
        }
    }

    /// Sets one lane to the lowest bits of a long without marking it as written.
    #[inline(always)]
    pub(super) fn set_lane(&mut self, register: Register, lane: u32, value: u64) {
        match register {
            Register::Word(slot, bits) => {
                self.words[slot as usize][lane as usize] = value as u32 & (u32::MAX >> (32 - bits));
            }
            Register::Long(slot) => self.longs[slot as usize][lane as usize] = value,
            Register::Sink(_) => {}
        }
    }

    /// Marks a register as written by these lanes.
    #[inline(always)]
    pub(super) fn note(&mut self, register: Register, active: u32) {
        match register {
            Register::Word(slot, _) => self.words_set[slot as usize] |= active,
            Register::Long(slot) => self.longs_set[slot as usize] |= active,
            Register::Sink(_) => {}
        }
    }

    /// Checks that all active lanes have written a register.
    #[inline(always)]
    pub(super) fn check(&self, program: &Program, register: Register, active: u32) -> Step {
        match register {
            Register::Word(slot, _) => self.word(program, slot, active).map(|_| ()),
            Register::Long(slot) => self.long(program, slot, active).map(|_| ()),
            Register::Sink(_) => Ok(()),
        }
    }
}

#[cold]
fn unwritten<T>(name: &str, missing: u32) -> Step<T> {
    trap(missing.trailing_zeros(), FaultKind::UnwrittenRegister(name.into()))
}
