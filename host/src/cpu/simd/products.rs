//! Products of 4-bit codes: one trait, and one file per instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use microscale_formats::dot::CHUNK;
use microscale_formats::e2m1;

use super::tokens::{LANES, Lanes};
use super::vector::Vector;

/// Bytes of codes that are multiplied per step: eight chunks, or sixteen groups of 16 elements.
pub(in crate::cpu) const STEP: usize = 128;

/// Bytes of codes that are decoded per tile: one chunk per lane.
pub(in crate::cpu) const TILE: usize = 256;

/// The bf16 weights of the sixteen codes under one block scale.
pub(in crate::cpu) type Table = [u16; 16];

/// The position of an element of a chunk in decoded lines.
///
/// 16 bits hold four codes. Decoded lines have the first code of every 16 bits, then the second,
/// and so on. So decoding shifts codes but never moves them to other lanes.
pub(in crate::cpu) const fn packed_index(element: usize) -> usize {
    element % 4 * (CHUNK / 4) + element / 4
}

/// Added to twice a code of the matrix, to make it unsigned, as one factor must be on x86.
pub(in crate::cpu) const OFFSET: i32 = 12;

/// [`STEP`] bytes of codes of a vector, prepared as the right-hand factor.
#[repr(C, align(64))]
pub(in crate::cpu) struct DoubledCodes {
    /// Twice the elements with an even index.
    pub(in crate::cpu) even: [i8; STEP],
    /// Twice the elements with an odd index.
    pub(in crate::cpu) odd: [i8; STEP],
    /// The share of [`OFFSET`] in the sums of groups: even groups, then odd groups.
    pub(in crate::cpu) surplus: Lanes<i32>,
}

impl DoubledCodes {
    pub(in crate::cpu) fn of(codes: &[u8; STEP]) -> Self {
        let [even, odd] =
            [0, 4].map(|shift| codes.map(|byte| RAISED[usize::from(byte >> shift & 15)] - OFFSET as i8));
        let mut surplus = [0; LANES];
        for (i, twice) in
            even.iter().zip(&odd).map(|(even, odd)| i32::from(*even) + i32::from(*odd)).enumerate()
        {
            let group = i / 8;
            surplus[group % 2 * 8 + group / 2] += OFFSET * twice;
        }
        Self { even, odd, surplus }
    }
}

/// The chunk that a lane holds in tiles of sixteen chunks.
///
/// Lanes are a transposed 4 × 4 square of chunks, which is the cheapest order to produce.
pub(in crate::cpu) const fn chunk_of_lane(lane: usize) -> usize {
    lane % 4 * 4 + lane / 4
}

/// Twice each code, plus [`OFFSET`].
pub(super) const RAISED: [i8; 16] = {
    let twice = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut raised = [0; 16];
    let mut code = 0;
    while code < 16 {
        raised[code] = (OFFSET + if code < 8 { twice[code] } else { -twice[code - 8] }) as i8;
        code += 1;
    }
    raised
};

/// Each code divided by 128.
pub(in crate::cpu) const FRACTIONS: Lanes<f32> = {
    let mut fractions = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        let magnitude = e2m1::VALUES[code % 8] / 128.0;
        fractions[code] = if code < 8 { magnitude } else { -magnitude };
        code += 1;
    }
    fractions
};

/// Byte `shift / 8` of each of [`FRACTIONS`]. Their bytes 0 and 1 are 0.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const fn bytes_of_fractions(shift: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = (FRACTIONS[code].to_bits() >> shift) as u8;
        code += 1;
    }
    bytes
}

/// Vectors that multiply codes.
pub(in crate::cpu) trait Products: Vector {
    /// Eight f64.
    type Sums: Copy;

    /// Four bytes of codes in each lane.
    type Column: Copy;

    /// Rows of weights per call of the few-token loop. Above one only if all sums fit registers.
    const ROWS: usize = 1;

    /// True if 24 vectors of sums fit registers.
    const MANY_REGISTERS: bool = false;

    /// Returns zeros.
    fn no_sums(self) -> Self::Sums;

    /// Stores sums to memory.
    fn store_sums(self, sums: Self::Sums) -> [f64; 8];

    /// Picks one byte for each lane by index, or 0 where the index is above 127.
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> Self::Bits;

    /// Converts signed integers to f32.
    fn numbers(self, integers: Self::Bits) -> Self::Number;

    /// Four times the dot product of each group of 16 elements: even groups, then odd groups.
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> Self::Bits;

    /// Adds the first eight numbers to the sums, then the last eight.
    fn add_halves(self, sums: Self::Sums, terms: Self::Number) -> Self::Sums;

    /// Adds `(integers[i] + integers[i + 8]) · 2^(bytes[i] − 127) · powers[i]` to each sum.
    ///
    /// Only the addition to the sum rounds.
    fn add_scaled(
        self,
        sums: Self::Sums,
        integers: Self::Bits,
        bytes: &[u8; 8],
        powers: &[f64; 8],
    ) -> Self::Sums;

    /// Loads the codes of sixteen [chunks](chunk_of_lane), eight elements of each per column.
    fn columns(self, codes: &[u8; TILE]) -> [Self::Column; 4];

    /// Decodes a column to the weights divided by 128, in the order of elements.
    fn fractions(self, column: Self::Column) -> [Self::Number; 8];

    /// Looks up the weights of a chunk: `tables[0]` has its first half, `tables[1]` its second.
    ///
    /// Each lane holds the two weights at adjacent [packed positions](packed_index).
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> Self::Bits;
}

/// Converts non-negative E4M3 numbers to f32, divided by 256.
///
/// Shifted left by 7, their bits are an f16: its exponent has one bit more, and a bias larger by 8.
#[inline(always)]
pub(in crate::cpu) fn e4m3_over_256<V: Vector>(simd: V, bytes: V::Bits) -> V::Number {
    simd.f16_to_f32(simd.shift_left(bytes, 7))
}

#[cfg(test)]
mod tests;
