//! Chunks, 16 bytes of values, and what every dtype does with them.

use microscale_kernels_abi::launch::{WARP, WARP_ELEMENTS};

/// 16 bytes of values: four f32 or eight 16-bit ones, the first in the lowest bits.
pub(crate) type Chunk = [u32; 4];

/// The sign bits of two 16-bit values in a word.
pub(super) const SIGNS_16: u32 = 0x8000_8000;

/// A dtype of unquantized values.
pub(crate) trait Dtype {
    /// Bytes of a value.
    const BYTES: u32;
    /// Bits of a significand.
    const SIGNIFICAND: u32;
    /// Values in a chunk.
    const CHUNK: u32 = 16 / Self::BYTES;
    /// Chunks per lane. A warp then has 32 blocks of 32.
    const STEPS: u32 = WARP_ELEMENTS / WARP / Self::CHUNK;
    /// The magnitude bits of infinity; NaN is above.
    const INFINITY: u32;
    /// The largest finite value.
    const MAX: f32;
    /// The smallest normal number.
    const MIN_POSITIVE: f32;
    /// The canonical NaN, repeated over a word.
    const NAN_WORD: u32;

    /// The sign bits of a word's values.
    const SIGNS: u32;

    /// The larger magnitudes of two words, value by value, with any sign; NaN is the largest.
    fn max_magnitudes(a: u32, b: u32) -> u32;

    /// The largest magnitude's bits in a word.
    #[inline(always)]
    fn largest(word: u32) -> u32 {
        let magnitudes = word & !Self::SIGNS;
        if Self::BYTES == 4 { magnitudes } else { (magnitudes & 0xFFFF).max(magnitudes >> 16) }
    }

    /// The f32 bits of a magnitude.
    fn magnitude_to_f32_bits(magnitude: u32) -> u32;

    /// The bits of value `i`.
    #[inline(always)]
    fn bits(chunk: &Chunk, i: u32) -> u32 {
        let word = chunk[(i * Self::BYTES / 4) as usize];
        if Self::BYTES == 4 { word } else { word >> (16 * (i & 1)) & 0xFFFF }
    }

    /// A chunk with `bits` for value `i`, given that it holds zero there.
    #[inline(always)]
    fn insert(chunk: &mut Chunk, i: u32, bits: u32) {
        chunk[(i * Self::BYTES / 4) as usize] |= if Self::BYTES == 4 { bits } else { bits << (16 * (i & 1)) };
    }

    /// Puts the value that `word` repeats in the place of value `i`.
    #[inline(always)]
    fn replace(chunk: &mut Chunk, i: u32, word: u32) {
        let of_value = if Self::BYTES == 4 { u32::MAX } else { 0xFFFF << (16 * (i & 1)) };
        let old = &mut chunk[(i * Self::BYTES / 4) as usize];
        *old = (*old & !of_value) | (word & of_value);
    }

    /// A chunk with magnitudes of at most `limit`, rounded to the dtype.
    fn limit(chunk: &Chunk, limit: f32) -> Chunk;

    /// Value `i`, widened.
    fn widen(chunk: &Chunk, i: u32) -> f32;

    /// Marks, at their sign bits, which of a word's values are not zero: a magnitude plus one less
    /// than the sign bit reaches it unless it is zero.
    #[inline(always)]
    fn non_zero_signs(word: u32) -> u32 {
        let each = Self::SIGNS >> (8 * Self::BYTES - 1);
        ((word & !Self::SIGNS) + (Self::SIGNS - each)) & Self::SIGNS
    }

    /// The smaller of each two values as signed integers. −0 is the least.
    fn min_as_integers(a: u32, b: u32) -> u32;

    /// Whether one of a word's values is −0.
    #[inline(always)]
    fn has_least_integer(word: u32) -> bool {
        if Self::BYTES == 4 { word == Self::SIGNS } else { word << 16 == 0x8000_0000 || word >> 16 == 0x8000 }
    }

    /// A word with +0 for each −0.
    #[inline(always)]
    fn drop_negative_zeros(word: u32) -> u32 {
        word & (!Self::SIGNS | Self::non_zero_signs(word))
    }

    /// A word with −0 for each zero.
    #[inline(always)]
    fn force_negative_zeros(word: u32) -> u32 {
        word | (Self::SIGNS ^ Self::non_zero_signs(word))
    }

    /// The chunk's codes, ties to even, for finite values and the scale byte b: value / 2^(b −
    /// 127), the first value in the lowest nibble.
    fn encode_even(chunk: &Chunk, scale: u32) -> u32;

    /// A value rounded to the dtype and widened again.
    fn round(value: f32) -> f32;

    /// Values rounded to the dtype; the first [`Dtype::CHUNK`] count.
    fn narrow(values: &[f32; 8]) -> Chunk;
}
