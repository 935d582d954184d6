//! Instructions that the lanes of a warp execute together.
//!
//! They are shuffles, votes, reductions and matrix products.

use microscale_formats::{Format, fp4_dot};

use super::grid::{Grid, wrongly};
use super::memory::updated;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::program::{
    Address, Guard, Manner, Matrices, NONE, Program, ScaledMatrices, Shuffle, Slot, Space, Update, Vote,
};
use crate::semantics::{DEPTH, dot};

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

    /// `mma.sync` of all lanes (ISA 9.7.14, "Matrix Fragments for mma.m16n8k16").
    ///
    /// Lane 4·g + t holds rows g and g + 8 of A and column g of B, each at K indices 2t, 2t + 1, 2t
    /// + 8 and 2t + 9. Of C and D it holds the columns 2t and 2t + 1 of rows g and g + 8.
    pub(super) fn multiply(&mut self, program: &Program, active: u32, of: &Matrices) -> Step {
        if active != u32::MAX {
            return trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active });
        }
        let registers = &mut self.registers;
        let (mut a, mut b) = ([[0.0; DEPTH]; 16], [[0.0; DEPTH]; 8]);
        let spread = |word: u32, row: &mut [f64; DEPTH], at: usize| {
            row[at] = of.element.value(word & 0xffff);
            row[at + 1] = of.element.value(word >> 16);
        };
        for (i, &slot) in of.a.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                spread(word, &mut a[lane / 4 + i % 2 * 8], lane % 4 * 2 + i / 2 * 8);
            }
        }
        for (i, &slot) in of.b.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                spread(word, &mut b[lane / 4], lane % 4 * 2 + i * 8);
            }
        }
        let mut sums = [[0; LANES]; 4];
        for (i, (sums, &slot)) in sums.iter_mut().zip(&of.c).enumerate() {
            let c = registers.word(program, slot, active)?;
            for (lane, (sum, &c)) in sums.iter_mut().zip(c).enumerate() {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                *sum = dot(&a[row], &b[column], c, &self.launch.approximation);
            }
        }
        for (sums, &slot) in sums.iter().zip(&of.d) {
            registers.set_word(slot, active, sums);
        }
        Ok(())
    }

    /// `mma.sync` of FP4 with block scales, of all lanes (ISA 9.7.14, "Matrix fragments for
    /// mma.m16n8k64" and "Block scaling for mma.sync").
    ///
    /// Lane 4·g + t holds rows g and g + 8 of A and column g of B, each at K indices 8t to 8t + 7 and
    /// 32 + 8t to 39 + 8t. The scales of rows g and g + 8 of A are those of lanes 4·g + 2s and 4·g +
    /// 2s + 1, s being A's thread-id. The scales of column g of B are those of lane 4·g + s, s being
    /// B's. Other lanes' scales need not be written. The sums are those of
    /// [`fp4_dot`](microscale_formats::fp4_dot), with nothing left open.
    pub(super) fn multiply_scaled(&mut self, program: &Program, active: u32, of: &ScaledMatrices) -> Step {
        if active != u32::MAX {
            return trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active });
        }
        let registers = &mut self.registers;
        let mut selected = [[0; 2]; 2];
        for (selected, slots) in selected.iter_mut().zip(of.selectors) {
            for (selected, slot) in selected.iter_mut().zip(slots) {
                let all = registers.word(program, slot, active)?;
                if *all != [all[0]; LANES] {
                    return trap(0, FaultKind::NotUniform("the selectors of scales"));
                }
                *selected = all[0];
            }
        }
        let [[byte_a, thread_a], [byte_b, thread_b]] = selected;
        let nvfp4 = of.format == Format::Nvfp4;
        let is_byte = |byte| byte == 0 || byte == 2 && !nvfp4;
        if !is_byte(byte_a) || !is_byte(byte_b) || thread_a > 1 || thread_b > 3 {
            return trap(0, FaultKind::ScaleSelector(selected));
        }
        // The scales of a row or column, of a lane's word.
        let of_word = |word: u32, byte: u32| {
            let bytes = (word >> (8 * byte)).to_le_bytes();
            if nvfp4 { bytes.to_vec() } else { bytes[..2].to_vec() }
        };
        let lanes_a = 0x3333_3333 << (2 * thread_a);
        let words_a = *registers.word(program, of.scales[0], lanes_a)?;
        let words_b = *registers.word(program, of.scales[1], 0x1111_1111 << thread_b)?;
        let scales_a: [_; 16] = std::array::from_fn(|row| {
            of_word(words_a[row % 8 * 4 + 2 * thread_a as usize + row / 8], byte_a)
        });
        let scales_b: [_; 8] =
            std::array::from_fn(|col| of_word(words_b[col * 4 + thread_b as usize], byte_b));
        let (mut a, mut b) = ([[0; 32]; 16], [[0; 32]; 8]);
        for (i, &slot) in of.a.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                let row = &mut a[lane / 4 + i % 2 * 8];
                row[i / 2 * 16 + lane % 4 * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
        for (i, &slot) in of.b.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                b[lane / 4][i * 16 + lane % 4 * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
        let mut sums = [[0; LANES]; 4];
        for (i, (sums, &slot)) in sums.iter_mut().zip(&of.c).enumerate() {
            let c = registers.word(program, slot, active)?;
            for (lane, (sum, &c)) in sums.iter_mut().zip(c).enumerate() {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let (of_row, of_column) =
                    ((&a[row][..], &scales_a[row][..]), (&b[column][..], &scales_b[column][..]));
                let terms = fp4_dot::terms(of.format, of_row, of_column);
                *sum = fp4_dot::step(f32::from_bits(c), terms).to_bits();
            }
        }
        for (sums, &slot) in sums.iter().zip(&of.d) {
            registers.set_word(slot, active, sums);
        }
        Ok(())
    }

    /// `ldmatrix` of four matrices (ISA 9.7.14).
    ///
    /// Lane 8·i + r holds the address of row r of matrix i. Lane l receives number 2·(l mod 4) and
    /// the next one of row l / 4.
    pub(super) fn load_matrices(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: [Slot; 4],
        from: Address,
    ) -> Step {
        if active != u32::MAX {
            return trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active });
        }
        self.check_address(grid, active, from)?;
        let access = self.begin_access(grid, active, Manner::Weak)?;
        let addresses: [u64; LANES] = std::array::from_fn(|lane| self.address(from, lane as u32));
        for (i, slot) in to.into_iter().enumerate() {
            let mut words = [0; LANES];
            for (lane, word) in words.iter_mut().enumerate() {
                let (address, at) = (addresses[i * 8 + lane / 4], lane % 4 * 4);
                let races = grid.races.as_ref().zip(access.map(|id| id + lane as u32));
                let located = grid.shared.locate(address, 16);
                let (memory, row) = located.or_else(|kind| trap((i * 8 + lane / 4) as u32, kind))?;
                match memory.load(row + at..row + at + 4, Manner::Weak, races) {
                    Ok(bytes) => *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                    Err(wrong) => {
                        return wrongly(grid, lane as u32, Space::Shared, address + at as u64, 4, wrong);
                    }
                }
            }
            self.registers.set_word(slot, active, &words);
        }
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
