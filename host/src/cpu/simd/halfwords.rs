//! Thirty-two 16-bit values at a time, f16 or bf16 by their bits: as [`super::vector`] is for f32, one trait
//! and a thin file for each instruction set.
//!
//! Bits without the sign order as magnitudes do, so that nothing is widened: a block's largest magnitude is
//! its largest integer, and a code is how many [thresholds](Row) a magnitude is above.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

/// Values of a vector.
pub(in crate::cpu) const HALFWORDS: usize = 32;

/// Sixteen bits of each value.
pub(in crate::cpu) type Halfwords = [u16; HALFWORDS];

/// The thresholds between the codes of E2M1 under a scale: at `i`, the bits of the largest magnitude whose
/// code is at most `i`. The last counts for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub(in crate::cpu) struct Row(pub(in crate::cpu) [u16; 8]);

/// The sixteen values that codes have under a scale, their bits in two halves: vectors look bytes up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(32))]
pub(in crate::cpu) struct ValueRow {
    pub(in crate::cpu) low: [u8; 16],
    pub(in crate::cpu) high: [u8; 16],
}

/// Vectors of 16-bit values. Those called magnitudes have no sign bit.
pub(in crate::cpu) trait HalfwordVector {
    /// Thirty-two 16-bit values.
    type Halfwords: Copy;

    /// Sixteen of 32 bits.
    type Bits;

    /// The thresholds that magnitudes are compared with.
    type Rows: Copy;

    /// Constants for finding [codes](Self::codes).
    type Steps: Copy;

    /// Loads the constants, once for a loop.
    fn steps() -> Self::Steps;

    /// Loads a vector from memory.
    fn load_halfwords(halfwords: &Halfwords) -> Self::Halfwords;

    /// Stores a vector to memory.
    fn store_halfwords(halfwords: Self::Halfwords) -> Halfwords;

    /// This value, everywhere.
    fn splat_halfword(halfword: u16) -> Self::Halfwords;

    /// The magnitudes.
    #[inline(always)]
    fn magnitudes(halfwords: Self::Halfwords) -> Self::Halfwords {
        Self::and_halfwords(halfwords, Self::splat_halfword(0x7FFF))
    }

    /// The larger of magnitudes.
    fn max_halfwords(a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest one.
    fn max_halfword(magnitudes: Self::Halfwords) -> u16;

    /// The larger ones of the two halves of a, and after them those of b.
    fn fold_halfwords(a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest magnitude of each half of the vectors, in order.
    fn max_halfwords_of_halves(magnitudes: &[Self::Halfwords; 8]) -> Self::Bits;

    /// The same row for all magnitudes.
    fn one_row(row: &Row) -> Self::Rows;

    /// A row for each half of them.
    fn two_rows(first: &Row, second: &Row) -> Self::Rows;

    /// The codes of magnitudes in the low three bits; the fourth is anything.
    fn codes(magnitudes: Self::Halfwords, rows: Self::Rows, steps: Self::Steps) -> Self::Halfwords;

    /// Values whose bit 15 is set if the magnitude is not 0.
    fn above_zero(magnitudes: Self::Halfwords) -> Self::Halfwords;

    /// a & b
    fn and_halfwords(a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// a | !b
    fn or_not_halfwords(a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// Codes with bit 15 of `signs` as their bit 3.
    fn signed(codes: Self::Halfwords, signs: Self::Halfwords) -> Self::Halfwords;

    /// Four bits of each value, two a byte, the earlier one in the low half.
    fn pack(nibbles: &[Self::Halfwords; 4]) -> [u8; 2 * HALFWORDS];

    /// The values of codes, which lie as [`Self::pack`] leaves them: each sixteen have a row of their own.
    fn decode(codes: &[u8; HALFWORDS], rows: [&ValueRow; 4]) -> [Self::Halfwords; 2];
}

#[cfg(test)]
mod tests;
