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
pub(super) const WORDS: usize = 32;

/// Sixteen bits of each value.
pub(super) type Words = [u16; WORDS];

/// The thresholds between the codes of E2M1 under a scale: at `i`, the bits of the largest magnitude whose
/// code is at most `i`. The last counts for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub(super) struct Row(pub(super) [u16; 8]);

/// The sixteen values that codes have under a scale, their bits in two halves: vectors look bytes up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(32))]
pub(super) struct ValueRow {
    pub(super) low: [u8; 16],
    pub(super) high: [u8; 16],
}

/// Vectors of 16-bit values. Those called magnitudes have no sign bit.
pub(super) trait WordVector {
    /// Thirty-two 16-bit values.
    type Words: Copy;

    /// Sixteen of 32 bits.
    type Bits;

    /// The thresholds that magnitudes are compared with.
    type Rows: Copy;

    /// Constants for finding [codes](Self::codes).
    type Steps: Copy;

    /// Loads the constants, once for a loop.
    fn steps() -> Self::Steps;

    /// From memory.
    fn load_words(words: &Words) -> Self::Words;

    /// To memory.
    fn store_words(words: Self::Words) -> Words;

    /// This value, everywhere.
    fn splat_word(word: u16) -> Self::Words;

    /// The magnitudes.
    #[inline(always)]
    fn magnitudes(words: Self::Words) -> Self::Words {
        Self::and_words(words, Self::splat_word(0x7FFF))
    }

    /// The larger of magnitudes.
    fn larger(a: Self::Words, b: Self::Words) -> Self::Words;

    /// The largest one.
    fn largest(magnitudes: Self::Words) -> u16;

    /// The larger ones of the two halves of a, and after them those of b.
    fn folded_words(a: Self::Words, b: Self::Words) -> Self::Words;

    /// The largest magnitude of each half of the vectors, in order.
    fn largest_words_of_halves(magnitudes: &[Self::Words; 8]) -> Self::Bits;

    /// The same row for all magnitudes.
    fn one_row(row: &Row) -> Self::Rows;

    /// A row for each half of them.
    fn two_rows(first: &Row, second: &Row) -> Self::Rows;

    /// The codes of magnitudes in the low three bits; the fourth is anything.
    fn codes(magnitudes: Self::Words, rows: Self::Rows, steps: Self::Steps) -> Self::Words;

    /// Values whose bit 15 is set if the magnitude is not 0.
    fn above_zero(magnitudes: Self::Words) -> Self::Words;

    /// a & b
    fn and_words(a: Self::Words, b: Self::Words) -> Self::Words;

    /// a | !b
    fn or_not_words(a: Self::Words, b: Self::Words) -> Self::Words;

    /// Codes with bit 15 of `signs` as their bit 3.
    fn signed(codes: Self::Words, signs: Self::Words) -> Self::Words;

    /// Four bits of each value, two a byte, the earlier one in the low half.
    fn pack(nibbles: &[Self::Words; 4]) -> [u8; 2 * WORDS];

    /// The values of codes, which lie as [`Self::pack`] leaves them: each sixteen have a row of their own.
    fn decode(codes: &[u8; WORDS], rows: [&ValueRow; 4]) -> [Self::Words; 2];
}

#[cfg(test)]
mod tests;
