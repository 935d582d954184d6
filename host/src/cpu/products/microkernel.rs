//! The microkernel over vectors: one token per lane, several rows and tiles of tokens in registers.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m512;

use super::activations::{Aligned, Word};
use super::panels::{Lines, Microkernel, ROWS, lines_per_chunk};
use crate::cpu::simd::products::{Products, packed_index};
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx512, Avx512Bf16};
use crate::cpu::simd::{LANES, Lanes};

/// The terms that a lane multiplies and adds: elements, or pairs of elements.
pub(in crate::cpu) trait MultiplyAdd<V: Products> {
    const WORD: Word;

    /// Adds the products of a word of weights and a word of activations.
    fn add(&self, simd: V, sum: V::Number, weights: V::Number, x: V::Number) -> V::Number;
}

/// Single elements as f32.
pub(in crate::cpu) struct F32Terms;

impl<V: Products> MultiplyAdd<V> for F32Terms {
    const WORD: Word = Word::F32;

    #[inline(always)]
    fn add(&self, simd: V, sum: V::Number, weights: V::Number, x: V::Number) -> V::Number {
        simd.fma(weights, x, sum)
    }
}

/// Pairs of bf16, with the token of their instruction.
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) struct Bf16Terms(pub(in crate::cpu) Avx512Bf16);

#[cfg(target_arch = "x86_64")]
impl MultiplyAdd<Avx512> for Bf16Terms {
    const WORD: Word = Word::Bf16Pair;

    #[inline(always)]
    fn add(&self, _: Avx512, sum: __m512, weights: __m512, x: __m512) -> __m512 {
        self.0.add_pairs(sum, weights, x)
    }
}

/// The microkernel over vectors of these terms.
pub(in crate::cpu) struct VectorMicrokernel<A>(pub(in crate::cpu) A);

impl<V: Products, A: MultiplyAdd<V>> Microkernel<V> for VectorMicrokernel<A> {
    const WORD: Word = A::WORD;

    #[inline(always)]
    fn add(&self, simd: V, x: &[Lanes<f32>], weights: &[Lines], sums: &mut [Lines]) {
        let lines = weights.len() * LANES;
        let (two, one) = if V::MANY_REGISTERS { sums.as_chunks_mut() } else { (&mut [][..], sums) };
        let (of_two, of_one) = x.split_at(2 * two.len() * lines);
        for (sums, x) in two.iter_mut().zip(of_two.chunks_exact(2 * lines)) {
            let (first, second) = x.split_at(lines);
            for rows in 0..ROWS / 8 {
                multiply_block::<V, A, 8, 2>(simd, &self.0, [first, second], weights, sums, rows);
            }
        }
        for (sums, x) in one.iter_mut().zip(of_one.chunks_exact(lines)) {
            let sums = std::array::from_mut(sums);
            if V::MANY_REGISTERS {
                for rows in 0..ROWS / 16 {
                    multiply_block::<V, A, 16, 1>(simd, &self.0, [x], weights, sums, rows);
                }
            } else {
                for rows in 0..ROWS / 4 {
                    multiply_block::<V, A, 4, 1>(simd, &self.0, [x], weights, sums, rows);
                }
            }
        }
    }
}

/// Multiplies block `rows` of `R` rows by `T` tiles of tokens.
#[inline(always)]
fn multiply_block<V: Products, A: MultiplyAdd<V>, const R: usize, const T: usize>(
    simd: V,
    terms: &A,
    x: [&[Lanes<f32>]; T],
    weights: &[Lines],
    sums: &mut [Lines; T],
    rows: usize,
) {
    let lines = lines_per_chunk(A::WORD);
    let mut of_segment = [[simd.splat(0.0); T]; R];
    for (chunk, weights) in weights.chunks_exact(lines).enumerate() {
        for i in 0..LANES * lines {
            // Single elements are added in order, pairs at their packed positions.
            let (line, word) = match A::WORD {
                Word::F32 => (packed_index(i) % 2, packed_index(i) / 2),
                Word::Bf16Pair => (0, i),
            };
            let mut values = [simd.splat(0.0); T];
            for t in 0..T {
                values[t] = simd.load(&x[t][chunk * LANES * lines + i]);
            }
            let weights: &[_; R] = &weights[line].as_chunks().0[rows];
            for r in 0..R {
                let weight = simd.splat(weights[r].0[word]);
                for t in 0..T {
                    of_segment[r][t] = terms.add(simd, of_segment[r][t], weight, values[t]);
                }
            }
        }
    }
    for (sums, t) in sums.iter_mut().zip(0..T) {
        let sums: &mut [_; R] = &mut sums.as_chunks_mut().0[rows];
        for r in 0..R {
            sums[r] = Aligned(simd.store(simd.add(simd.load(&sums[r].0), of_segment[r][t])));
        }
    }
}

const _: () = assert!(ROWS.is_multiple_of(16));
