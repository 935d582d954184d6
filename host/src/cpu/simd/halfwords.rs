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
pub(in crate::cpu) trait HalfwordVector: Copy {
    /// Thirty-two 16-bit values.
    type Halfwords: Copy;

    /// Sixteen of 32 bits.
    type Bits;

    /// The thresholds that magnitudes are compared with.
    type Rows: Copy;

    /// Constants for finding [codes](Self::codes).
    type Steps: Copy;

    /// Loads the constants, once for a loop.
    fn steps(self) -> Self::Steps;

    /// Loads a vector from memory.
    fn load_halfwords(self, halfwords: &Halfwords) -> Self::Halfwords;

    /// Stores a vector to memory.
    fn store_halfwords(self, halfwords: Self::Halfwords) -> Halfwords;

    /// This value, everywhere.
    fn splat_halfword(self, halfword: u16) -> Self::Halfwords;

    /// The magnitudes.
    #[inline(always)]
    fn magnitudes(self, halfwords: Self::Halfwords) -> Self::Halfwords {
        self.and_halfwords(halfwords, self.splat_halfword(0x7FFF))
    }

    /// The larger of magnitudes.
    fn max_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest one.
    fn max_halfword(self, magnitudes: Self::Halfwords) -> u16;

    /// The larger ones of the two halves of a, and after them those of b.
    fn fold_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// The largest magnitude of each half of the vectors, in order.
    fn max_halfwords_of_halves(self, magnitudes: &[Self::Halfwords; 8]) -> Self::Bits;

    /// The same row for all magnitudes.
    fn one_row(self, row: &Row) -> Self::Rows;

    /// A row for each half of them.
    fn two_rows(self, first: &Row, second: &Row) -> Self::Rows;

    /// The codes of magnitudes in the low three bits; the fourth is anything.
    fn codes(self, magnitudes: Self::Halfwords, rows: Self::Rows, steps: Self::Steps) -> Self::Halfwords;

    /// Values whose bit 15 is set if the magnitude is not 0.
    fn above_zero(self, magnitudes: Self::Halfwords) -> Self::Halfwords;

    /// a & b
    fn and_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// a | !b
    fn or_not_halfwords(self, a: Self::Halfwords, b: Self::Halfwords) -> Self::Halfwords;

    /// Codes with bit 15 of `signs` as their bit 3.
    fn signed(self, codes: Self::Halfwords, signs: Self::Halfwords) -> Self::Halfwords;

    /// Four bits of each value, two a byte, the earlier one in the low half.
    fn pack(self, nibbles: &[Self::Halfwords; 4]) -> [u8; 2 * HALFWORDS];

    /// The values of codes, which lie as [`Self::pack`] leaves them: each sixteen have a row of their own.
    fn decode(self, codes: &[u8; HALFWORDS], rows: [&ValueRow; 4]) -> [Self::Halfwords; 2];
}

#[cfg(test)]
mod tests;
