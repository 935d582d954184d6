//! Thirty-two 16-bit values at a time, f16 or bf16: one trait, and one file per instruction set.
//!
//! Without the sign bit, both dtypes order as integers do, so nothing is widened. The amax of a
//! block is its largest integer. The code of a magnitude is the number of [thresholds](Row) below
//! it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

/// Values per vector.
pub(in crate::cpu) const HALFWORDS: usize = 32;

/// The bits of a vector's values.
pub(in crate::cpu) type Halfwords = [u16; HALFWORDS];

/// The thresholds of E2M1 under one scale.
///
/// Entry `i` has the bits of the largest magnitude whose code is at most `i`. The last entry is
/// unused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub(in crate::cpu) struct Row(pub(in crate::cpu) [u16; 8]);

/// The sixteen values that codes have under one scale.
///
/// Low and high bytes are apart, because vectors look up bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(32))]
pub(in crate::cpu) struct ValueRow {
    pub(in crate::cpu) low: [u8; 16],
    pub(in crate::cpu) high: [u8; 16],
}

/// Vectors of thirty-two 16-bit values. Arguments named `magnitudes` have no sign bits.
///
/// The implementing type is a token, as for [`Vector`](super::vector::Vector).
pub(in crate::cpu) trait HalfwordVector: Copy {
    /// Thirty-two 16-bit values.
    type Halfwords: Copy;

    /// Sixteen u32.
    type Bits;

    /// One row of thresholds for all magnitudes, or one for each half.
    type Rows: Copy;

    /// Constants for [`Self::codes`].
    type Steps: Copy;

    /// Loads the constants, once before a loop.
    fn steps(self) -> Self::Steps;

    /// Loads a vector from memory.
    fn load_halfwords(self, halfwords: &Halfwords) -> Self::Halfwords;

    /// Stores a vector to memory.
    fn store_halfwords(self, halfwords: Self::Halfwords) -> Halfwords;

    /// Puts one value into every lane.
    fn splat_halfword(self, halfword: u16) -> Self::Halfwords;

    /// Clears the sign bits.
    #[inline(always)]
    fn magnitudes(self, halfwords: Self::Halfwords) -> Self::Halfwords {
        self.and_halfwords(halfwords, self.splat_halfword(0x7FFF))
    }

    /// The larger magnitude of each lane.
    fn max_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest magnitude of all lanes.
    fn max_halfword(self, magnitudes: Self::Halfwords) -> u16;

    /// The maxima of the lanes `i` and `i + 16`: of `a`, then of `b`.
    fn fold_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest magnitude of each half of each vector, in order.
    fn max_halfwords_of_halves(self, magnitudes: &[Self::Halfwords; 8]) -> Self::Bits;

    /// Prepares one row for all magnitudes.
    fn one_row(self, row: &Row) -> Self::Rows;

    /// Prepares one row for each half of the magnitudes.
    fn two_rows(self, first: &Row, second: &Row) -> Self::Rows;

    /// Encodes magnitudes to the low three bits. The fourth bit is undefined.
    fn codes(self, magnitudes: Self::Halfwords, rows: Self::Rows, steps: Self::Steps) -> Self::Halfwords;

    /// Sets bit 15 of each lane whose magnitude is not 0. The other bits are undefined.
    fn above_zero(self, magnitudes: Self::Halfwords) -> Self::Halfwords;

    /// a & b
    fn and_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// a | !b
    fn or_not_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// Moves bit 15 of `signs` to bit 3 of the codes.
    fn signed(self, codes: Self::Halfwords, signs: Self::Halfwords) -> Self::Halfwords;

    /// Packs the low four bits of all values, two per byte, the first one in the low half.
    fn pack(self, nibbles: &[Self::Halfwords; 4]) -> [u8; 2 * HALFWORDS];

    /// Looks up the values of codes packed by [`Self::pack`]. Each sixteen codes have their own
    /// row.
    fn decode(self, codes: &[u8; HALFWORDS], rows: [&ValueRow; 4]) -> [Self::Halfwords; 2];
}

#[cfg(test)]
mod tests;
