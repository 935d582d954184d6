//! What multiplying codes needs of vectors: as [`super::vector`], one trait and a thin file for each
//! instruction set.

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

/// Bytes of codes whose products are summed at once: of eight chunks, or sixteen groups of 16 elements.
pub(in crate::cpu) const STEP: usize = 128;

/// Bytes of codes that are decoded at once: of a chunk for each lane.
pub(in crate::cpu) const TILE: usize = 256;

/// The weights of the sixteen codes under a block scale, in bf16.
pub(in crate::cpu) type Table = [u16; 16];

/// The place of an element of a chunk in decoded lines: of the four codes in each 16 bits the first ones, then the second ones, and so on.
/// So no code is moved when it is decoded, only shifted.
pub(in crate::cpu) const fn packed_index(element: usize) -> usize {
    element % 4 * (CHUNK / 4) + element / 4
}

/// What is added to twice a code of the matrix, so that it is not negative, as x86 asks of one of two
/// factors.
pub(in crate::cpu) const OFFSET: i32 = 12;

/// The codes of [`STEP`] bytes of a vector, to be multiplied with.
#[repr(C, align(64))]
pub(in crate::cpu) struct DoubledCodes {
    /// Twice the elements with an even index.
    pub(in crate::cpu) even: [i8; STEP],
    /// Twice the others.
    pub(in crate::cpu) odd: [i8; STEP],
    /// What the offset adds to the groups' sums: of those with an even index, then of the others.
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

/// The chunk whose elements a lane has where lanes are chunks: rows of four and columns are exchanged, which
/// costs vectors least.
pub(in crate::cpu) const fn chunk_of_lane(lane: usize) -> usize {
    lane % 4 * 4 + lane / 4
}

/// Twice each code and [`OFFSET`].
const RAISED: [i8; 16] = {
    let twice = [0, 1, 2, 3, 4, 6, 8, 12];
    let mut raised = [0; 16];
    let mut code = 0;
    while code < 16 {
        raised[code] = (OFFSET + if code < 8 { twice[code] } else { -twice[code - 8] }) as i8;
        code += 1;
    }
    raised
};

/// A 128th of each code.
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

/// The upper bytes of [`FRACTIONS`], whose lower two are 0, from bit `shift` on.
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

    /// Rows of weights that are multiplied at once: several, where there are registers for the sums of all.
    const ROWS: usize = 1;

    /// True if there are registers for 24 vectors of sums.
    const MANY_REGISTERS: bool = false;

    /// Zeros.
    fn no_sums(self) -> Self::Sums;

    /// To memory.
    fn store_sums(self, sums: Self::Sums) -> [f64; 8];

    /// Some bytes, each in a lane: by their index, and 0 where that is above 127.
    fn bytes(self, bytes: &[u8; LANES], order: &[u8; LANES]) -> Self::Bits;

    /// The numbers of signed integers.
    fn numbers(self, integers: Self::Bits) -> Self::Number;

    /// Four times the sums of the products of each two groups: of those with an even index, then of the
    /// others.
    fn quarters(self, codes: &[u8; STEP], by: &DoubledCodes) -> Self::Bits;

    /// Adds the first eight numbers, then the others.
    fn add_halves(self, sums: Self::Sums, terms: Self::Number) -> Self::Sums;

    /// Adds the first eight integers and the others, together, times 2^(byte − 127) and a power of two:
    /// without rounding before the sum.
    fn add_scaled(
        self,
        sums: Self::Sums,
        integers: Self::Bits,
        bytes: &[u8; 8],
        powers: &[f64; 8],
    ) -> Self::Sums;

    /// The codes of sixteen [chunks](chunk_of_lane), eight elements of each at a time.
    fn columns(self, codes: &[u8; TILE]) -> [Self::Column; 4];

    /// A 128th of each of their weights, the elements in order.
    fn fractions(self, column: Self::Column) -> [Self::Number; 8];

    /// The entries of a chunk's codes, those of its first half in one table and of the other in another, at the places that
    /// [`packed_index`](packed_index) names: a pair of places in each lane.
    fn lookup(self, codes: &[u8; CHUNK / 2], tables: [&Table; 2]) -> Self::Bits;
}

/// E4M3 of no sign that are numbers: f16 has a bit more of exponent, whose bias is larger by 8.
#[inline(always)]
pub(in crate::cpu) fn e4m3_over_256<V: Vector>(simd: V, bytes: V::Bits) -> V::Number {
    simd.f16_to_f32(simd.shift_left(bytes, 7))
}

#[cfg(test)]
mod tests;
