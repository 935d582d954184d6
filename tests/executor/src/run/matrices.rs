//! Products of a warp's matrices, and accesses to their fragments (ISA 9.7.14).

use microscale_formats::fp4_dot::{GROUP, STEP, step, terms};

use super::grid::{Grid, wrongly};
use super::registers::Registers;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::lanes::LANES;
use crate::program::{Address, Manner, Matrices, Program, ScaledMatrices, Scales, Slot, Space};
use crate::semantics::{DEPTH, Selector, dot};

impl Warp {
    /// `mma.sync` of all lanes (ISA 9.7.14, "Matrix Fragments for mma.m16n8k16").
    ///
    /// Lane 4·g + t holds rows g and g + 8 of A and column g of B, each at K indices 2t, 2t + 1, 2t
    /// + 8 and 2t + 9. Of C and D it holds the columns 2t and 2t + 1 of rows g and g + 8.
    pub(super) fn multiply(&mut self, program: &Program, active: u32, of: &Matrices) -> Step {
        complete(active)?;
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

    /// `mma.sync` of all lanes with block scales ("Matrix Fragments for mma.m16n8k64").
    ///
    /// Lane 4·g + t holds rows g and g + 8 of A and column g of B, each at K indices 8t to 8t + 7
    /// and 8t + 32 to 8t + 39. C and D are as in [`Self::multiply`]. [`Scales::thread`] selects the
    /// lanes whose scales count: 4·g + 2·thread and the next lane for rows g and g + 8 of A, and
    /// 4·g + thread for column g of B. Other lanes need no scales.
    ///
    /// [`fp4_dot`](microscale_formats::fp4_dot) has the arithmetic of GPUs. No approximation
    /// changes it.
    pub(super) fn multiply_scaled(&mut self, program: &Program, active: u32, of: &ScaledMatrices) -> Step {
        complete(active)?;
        let registers = &mut self.registers;
        let (mut a, mut b) = ([[0; STEP / 2]; 16], [[0; STEP / 2]; 8]);
        let spread = |word: u32, row: &mut [u8; STEP / 2], lane: usize, half: usize| {
            row[half * GROUP + lane % 4 * 4..][..4].copy_from_slice(&word.to_le_bytes());
        };
        for (i, &slot) in of.a.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                spread(word, &mut a[lane / 4 + i % 2 * 8], lane, i / 2);
            }
        }
        for (i, &slot) in of.b.iter().enumerate() {
            for (lane, &word) in registers.word(program, slot, active)?.iter().enumerate() {
                spread(word, &mut b[lane / 4], lane, i);
            }
        }
        let selector = Selector::of_a(of.format);
        let scales_a: [_; 16] = block_scales(registers, program, of.scales_a, selector, |row, thread| {
            row % 8 * 4 + thread * 2 + row / 8
        })?;
        let selector = Selector::of_b(of.format);
        let scales_b: [_; 8] =
            block_scales(registers, program, of.scales_b, selector, |column, thread| column * 4 + thread)?;
        let mut sums = [[0; LANES]; 4];
        for (i, (sums, &slot)) in sums.iter_mut().zip(&of.c).enumerate() {
            let c = registers.word(program, slot, active)?;
            for (lane, (sum, &c)) in sums.iter_mut().zip(c).enumerate() {
                let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
                let a = (&a[row][..], &scales_a[row][..]);
                let b = (&b[column][..], &scales_b[column][..]);
                *sum = step(f32::from_bits(c), terms(of.format, a, b)).to_bits();
            }
        }
        for (sums, &slot) in sums.iter().zip(&of.d) {
            registers.set_word(slot, active, sums);
        }
        Ok(())
    }

    /// `ldmatrix` of one, two or four matrices.
    ///
    /// Lane 8·i + r holds the address of row r of matrix i. Lane l receives number 2·(l mod 4) and
    /// the next one of row l / 4, or of column l / 4 if `transposed`.
    pub(super) fn load_matrices(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: &[Slot],
        from: Address,
        transposed: bool,
    ) -> Step {
        complete(active)?;
        self.check_address(grid, u32::MAX >> (LANES - to.len() * 8), from)?;
        let access = self.begin_access(grid, active, Manner::Weak)?;
        for (i, &slot) in to.iter().enumerate() {
            let mut words = [0; LANES];
            for (lane, word) in words.iter_mut().enumerate() {
                for half in 0..2 {
                    let (holder, at) = place(i, lane, half, transposed);
                    let address = self.address(from, holder);
                    let races = grid.races.as_ref().zip(access.map(|id| id + lane as u32));
                    let located = grid.shared.locate(address, 16);
                    let (memory, row) = located.or_else(|kind| trap(holder, kind))?;
                    match memory.load(row + at..row + at + 2, Manner::Weak, races) {
                        Ok(bytes) => {
                            *word |= u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << (half * 16);
                        }
                        Err(wrong) => {
                            return wrongly(grid, lane as u32, Space::Shared, address + at as u64, 2, wrong);
                        }
                    }
                }
            }
            self.registers.set_word(slot, active, &words);
        }
        Ok(())
    }

    /// `stmatrix` of one, two or four matrices, the reverse of [`Self::load_matrices`].
    pub(super) fn store_matrices(
        &mut self,
        grid: &mut Grid,
        active: u32,
        to: Address,
        from: &[Slot],
        transposed: bool,
    ) -> Step {
        complete(active)?;
        self.check_address(grid, u32::MAX >> (LANES - from.len() * 8), to)?;
        let access = self.begin_access(grid, active, Manner::Weak)?;
        for (i, &slot) in from.iter().enumerate() {
            let words = self.registers.word(&grid.kernel.program, slot, active)?;
            for (lane, word) in words.iter().enumerate() {
                for half in 0..2 {
                    let (holder, at) = place(i, lane, half, transposed);
                    let address = self.address(to, holder);
                    let races = grid.races.as_ref().zip(access.map(|id| id + lane as u32));
                    let located = grid.shared.locate(address, 16);
                    let (memory, row) = located.or_else(|kind| trap(holder, kind))?;
                    match memory.store(row + at..row + at + 2, races) {
                        Ok(place) => place.copy_from_slice(&word.to_le_bytes()[half * 2..][..2]),
                        Err(wrong) => {
                            return wrongly(grid, lane as u32, Space::Shared, address + at as u64, 2, wrong);
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the lane with the address of a number's row, and the number's byte in that row.
///
/// The number is half of `lane`'s register of matrix `matrix`.
fn place(matrix: usize, lane: usize, half: usize, transposed: bool) -> (u32, usize) {
    let (row, column) = (lane / 4, lane % 4 * 2 + half);
    let (row, column) = if transposed { (column, row) } else { (row, column) };
    ((matrix * 8 + row) as u32, column * 2)
}

/// Checks that all lanes execute an instruction.
fn complete(active: u32) -> Step {
    if active == u32::MAX {
        return Ok(());
    }
    trap(active.trailing_zeros(), FaultKind::IncompleteWarp { missing: !active })
}

/// Reads the block scales of each row of A or column of B. The first bytes are the ones to use.
///
/// `lane` returns the lane that holds the scales of a row, given the selected thread.
fn block_scales<const N: usize>(
    registers: &Registers,
    program: &Program,
    of: Scales,
    selector: Selector,
    lane: impl Fn(usize, usize) -> usize,
) -> Step<[[u8; 4]; N]> {
    let [byte, thread] = [
        uniform(registers.word(program, of.byte, u32::MAX)?)?,
        uniform(registers.word(program, of.thread, u32::MAX)?)?,
    ];
    if !selector.bytes.contains(&byte) || !selector.threads.contains(&thread) {
        return trap(0, FaultKind::ScaleSelector { byte, thread });
    }
    let lanes: [usize; N] = std::array::from_fn(|row| lane(row, thread as usize));
    let selected = lanes.iter().fold(0, |selected, lane| selected | 1 << lane);
    let words = registers.word(program, of.word, selected)?;
    Ok(lanes.map(|lane| (words[lane] >> (byte * 8)).to_le_bytes()))
}

/// Returns the value that all lanes have in a part of a scale selector.
fn uniform(words: &[u32; LANES]) -> Step<u32> {
    match words.iter().position(|word| *word != words[0]) {
        Some(lane) => trap(lane as u32, FaultKind::NotUniform("the selectors of block scales")),
        None => Ok(words[0]),
    }
}
