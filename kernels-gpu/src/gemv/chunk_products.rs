//! Products of two quantized chunks, by integers or by pairs of f16.
//!
//! Without E2M1 hardware, elements are looked up as bytes with twice their magnitude, positive and
//! negative ones separately: `prmt` returns a byte's sign, here zero, for codes with the sign bit.
//! One instruction computes four products and their sum. Sums start as the bits of 1.5 · 2^23,
//! whose last bits count integers. Their difference as floats is the sum of products, without a
//! conversion. With E2M1 hardware, elements are pairs of f16, which also hold the sums of a group
//! exactly.

use crate::hardware::ptx;
use crate::product::operand::Codes;
#[cfg(microscale_fp4)]
use crate::product::product_format::e2m1_to_f16_pairs;

/// The products of two chunks.
pub(crate) trait Products {
    /// A chunk of the vector, ready to be multiplied.
    type Vector: Copy;

    /// Prepares constants before the loop. `ones` are all ones, a value that the assembler does not
    /// know.
    fn new(ones: u32) -> Self;

    /// Decodes a chunk of the vector.
    fn vector(&self, codes: Codes) -> Self::Vector;

    /// Four times the sum of the products of each half. Both are integers.
    fn quarters(&self, matrix: Codes, vector: &Self::Vector) -> [f32; 2];
}

/// Products of bytes with twice the elements. The assembler copies a known constant to a register
/// at each use, unless it is an immediate operand, as one half of the table is.
#[cfg(not(microscale_fp4))]
pub(crate) struct OfBytes {
    /// Twice the magnitudes, in the order of codes.
    twice: [u32; 2],
    /// 1.5 · 2^23.
    zero: u32,
}

#[cfg(not(microscale_fp4))]
impl OfBytes {
    /// All signs.
    const SIGNS: u32 = 0x8888_8888;

    /// Twice the elements of four codes, given in the low half, as bytes. Negative ones become 0.
    #[inline(always)]
    fn positive(&self, codes: u32) -> u32 {
        ptx::permute(self.twice[0], self.twice[1], codes)
    }

    /// Twice the elements of four codes, as signed bytes.
    #[inline(always)]
    fn signed(&self, codes: u32) -> u32 {
        let (positive, negative) = (self.positive(codes), self.positive(codes ^ Self::SIGNS));
        // No byte borrows from the next: one of the two is zero, the other at most 12.
        ((positive | 0x8080_8080) - negative) ^ 0x8080_8080
    }
}

#[cfg(not(microscale_fp4))]
impl Products for OfBytes {
    type Vector = [u32; 8];

    #[inline(always)]
    fn new(ones: u32) -> Self {
        let opaque = |constant| constant & ones;
        Self { twice: [opaque(0x0302_0100), 0x0C08_0604], zero: opaque(0x4B40_0000) }
    }

    #[inline(always)]
    fn vector(&self, [a, b, c, d]: Codes) -> [u32; 8] {
        [a, a >> 16, b, b >> 16, c, c >> 16, d, d >> 16].map(|codes| self.signed(codes))
    }

    #[inline(always)]
    fn quarters(&self, matrix: Codes, vector: &[u32; 8]) -> [f32; 2] {
        [0, 1].map(|half| {
            let (mut sum, mut negated) = (self.zero, self.zero);
            for i in 2 * half..2 * half + 2 {
                let (codes, opposite) = (matrix[i], matrix[i] ^ Self::SIGNS);
                sum = ptx::dot_bytes(self.positive(codes), vector[2 * i], sum);
                sum = ptx::dot_bytes(self.positive(codes >> 16), vector[2 * i + 1], sum);
                negated = ptx::dot_bytes(self.positive(opposite), vector[2 * i], negated);
                negated = ptx::dot_bytes(self.positive(opposite >> 16), vector[2 * i + 1], negated);
            }
            f32::from_bits(sum) - f32::from_bits(negated)
        })
    }
}

/// Products by pairs of f16.
#[cfg(microscale_fp4)]
pub(crate) struct OfPairs;

#[cfg(microscale_fp4)]
impl Products for OfPairs {
    type Vector = [[u32; 4]; 4];

    #[inline(always)]
    fn new(_: u32) -> Self {
        Self
    }

    #[inline(always)]
    fn vector(&self, codes: Codes) -> [[u32; 4]; 4] {
        codes.map(e2m1_to_f16_pairs)
    }

    #[inline(always)]
    fn quarters(&self, matrix: Codes, vector: &[[u32; 4]; 4]) -> [f32; 2] {
        [0, 2].map(|first| {
            // Eight products in each half: at most 288, in units of a quarter.
            let mut sums = 0;
            for i in first..first + 2 {
                let pairs = e2m1_to_f16_pairs(matrix[i]);
                for k in 0..4 {
                    sums = ptx::fma_f16x2(pairs[k], vector[i][k], sums);
                }
            }
            4.0 * (ptx::f16_low_to_f32(sums) + ptx::f16_high_to_f32(sums))
        })
    }
}

#[cfg(not(microscale_fp4))]
pub(crate) type Machine = OfBytes;
#[cfg(microscale_fp4)]
pub(crate) type Machine = OfPairs;
