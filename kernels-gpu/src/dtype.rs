//! The dtypes of unquantized values, 16 bytes at a time: what a lane loads, or stores, at once.

use microscale_formats::Ties;
use microscale_formats::e2m1::{self, identity};
use microscale_kernels_abi::launch::{WARP, WARP_ELEMENTS};

use crate::ptx;

/// 16 bytes of values: four f32 or eight 16-bit ones, the first in the lowest bits.
pub(crate) type Chunk = [u32; 4];

/// The sign bits of two 16-bit values in a word.
const SIGNS_16: u32 = 0x8000_8000;

/// A dtype of unquantized values.
pub(crate) trait Dtype {
    /// Bytes of a value.
    const BYTES: u32;
    /// Bits of a significand.
    const SIGNIFICAND: u32;
    /// Values in a chunk.
    const CHUNK: u32 = 16 / Self::BYTES;
    /// Chunks that a lane handles, so that a warp handles as many blocks of 32 as it has lanes.
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

    /// Magnitude bits as those of an f32.
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

    /// Marks, at their sign bits, which of a word's values are not zero: a magnitude plus one less than the sign bit
    /// reaches it unless it is zero.
    #[inline(always)]
    fn non_zero_signs(word: u32) -> u32 {
        let each = Self::SIGNS >> (8 * Self::BYTES - 1);
        ((word & !Self::SIGNS) + (Self::SIGNS - each)) & Self::SIGNS
    }

    /// The smaller of each two values as signed integers, of which −0 is the least.
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

    /// The chunk's codes, ties to even, for finite values and the scale byte b: value / 2^(b − 127), the first value in
    /// the lowest nibble.
    fn encode_even(chunk: &Chunk, scale: u32) -> u32;

    /// A value rounded to the dtype and widened again.
    fn round(value: f32) -> f32;

    /// Values rounded to the dtype; the first [`Dtype::CHUNK`] count.
    fn narrow(values: &[f32; 8]) -> Chunk;
}

/// The codes of a chunk for any rule of ties.
#[inline(always)]
pub(crate) fn encode<D: Dtype>(chunk: &Chunk, scale: u32, ties: Ties) -> u32 {
    if matches!(ties, Ties::Even) {
        return D::encode_even(chunk, scale);
    }
    // A unit in the last place above a power of two, for ties away from zero: see `magnitude_code`.
    let reciprocal = f32::from_bits(reciprocal(scale).to_bits() + u32::from(matches!(ties, Ties::Away)));
    let mut codes = 0;
    for i in 0..D::CHUNK {
        let value = D::widen(chunk, i);
        let code = magnitude_code(ptx::mul_magnitude_toward_zero(value, reciprocal));
        codes |= (code | value.to_bits() >> 28 & 8) << (4 * i);
    }
    codes
}

/// The codes of a chunk, ties to even, for values that `scale` brings to magnitudes below 7.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(crate) fn encode_scaled<D: Dtype>(chunk: &Chunk, scale: impl Fn(f32) -> f32) -> u32 {
    // The identity without its last term. Below the base, the bits of the codes are zeros down to the lowest.
    const BASE: f32 = identity::LOW_BASE_F32;
    let code = |i| {
        let scaled = scale(D::widen(chunk, i));
        let halves = ptx::fma_magnitude_f32(scaled, 2.0, BASE).to_bits();
        let ones = ptx::fma_magnitude_f32(scaled, 1.0, BASE + 2.0).to_bits();
        let twos = ptx::fma_magnitude_f32(scaled, 0.5, BASE + 4.0).to_bits();
        halves.min(ones).min(twos)
    };
    if D::CHUNK == 8 {
        let codes = [0, 2, 4, 6].map(|i| ptx::multiply_add(code(i + 1), 1 << 16, code(i)));
        pack_nibbles(&codes, chunk)
    } else {
        pack_f32([0, 1, 2, 3].map(code), chunk)
    }
}

/// The codes of eight values, ties to even, for a factor of `NvShortcut`: products are cut to f16, with the factor's last bit set in
/// them, and encoded two at a time.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(crate) fn encode_by_shortcut<D: Dtype>(chunk: &Chunk, factor: u32) -> u32 {
    const BASE: u32 = identity::BASE_F16X2;
    let last_bits = (factor & 1) * 0x0001_0001;
    let factor = f32::from_bits(factor);
    let codes = [0, 2, 4, 6].map(|i| {
        let [low, high] = [i, i + 1].map(|i| D::widen(chunk, i) * factor);
        let a = (ptx::f16x2_toward_zero(high, low) & !SIGNS_16) | last_bits;
        let halves = ptx::fma_f16x2(a, 0x4000_4000, BASE);
        let ones = ptx::fma_f16x2(a, 0x3C00_3C00, BASE + 0x0002_0002);
        let twos = ptx::fma_f16x2(a, 0x3800_3800, BASE + 0x0004_0004);
        ptx::min_positive_f16x2(ptx::min_positive_f16x2(halves, ones), twos)
    });
    pack_nibbles(&codes, chunk)
}

/// A scaled value with the sign of what was scaled, where the hardware encodes it: a sum of two products of −0 may be +0. Elsewhere signs
/// come from the chunk itself.
#[inline(always)]
pub(crate) fn signed_for_hardware(scaled: f32, value: f32) -> f32 {
    if cfg!(microscale_fp4) { scaled.copysign(value) } else { scaled }
}

/// The codes of a chunk, ties to even, for values that `scale` brings to the range of E2M1.
#[cfg(microscale_fp4)]
#[inline(always)]
pub(crate) fn encode_scaled<D: Dtype>(chunk: &Chunk, scale: impl Fn(f32) -> f32) -> u32 {
    let [a, b, c, d] = [0, 1, 2, 3].map(|i| scale(D::widen(chunk, i)));
    if D::CHUNK == 8 {
        let [e, f, g, h] = [4, 5, 6, 7].map(|i| scale(D::widen(chunk, i)));
        ptx::e2m1x8(a, b, c, d, e, f, g, h)
    } else {
        ptx::e2m1x4(a, b, c, d)
    }
}

/// The [`identity`]: the code of a magnitude in the low half, above it bits of the base.
#[cfg(not(microscale_fp4))]
#[inline(always)]
fn magnitude_code_even(a: f32) -> u32 {
    use identity::BASE_F32 as BASE;
    let halves = ptx::fma_f32(a, 2.0, BASE).to_bits();
    let ones = (a + (BASE + 2.0)).to_bits();
    let twos = ptx::fma_f32(a, 0.5, BASE + 4.0).to_bits();
    halves.min(ones).min(twos.min((BASE + 7.0).to_bits()))
}

/// Packs four codes, each in the low half of a word, with the signs of four f32.
#[cfg(not(microscale_fp4))]
#[inline(always)]
fn pack_f32(codes: [u32; 4], values: &Chunk) -> u32 {
    // The codes' low 16 bits are theirs alone, so multiplying and adding packs them.
    let packed = codes.iter().rev().fold(0u32, |packed, code| packed.wrapping_mul(16).wrapping_add(*code));
    // Copies of the signs: of values 0 and 2 for bits 3 and 11, of 1 and 3 for bits 7 and 15.
    let even = ptx::permute(values[0], values[2], 0x00FB);
    let odd = ptx::permute(values[1], values[3], 0x00FB);
    packed | ((even & 0x0808) | (odd & 0x8080))
}

/// 2^(127 − b), for b ≤ 253.
#[inline(always)]
pub(crate) fn reciprocal(scale: u32) -> f32 {
    f32::from_bits((254 - scale) << 23)
}

/// [`identity`] with ties toward zero. Rounding y so is ⌈y − ½⌉; both sums may be rounded upward themselves, because integers are
/// part of the finer grid.
///
/// Ties away from zero are those toward zero of the next larger f32: a tie is then above itself, and what was below it reaches
/// it at most. That f32 is the product with 1 + 2^−23, cut: it adds one unit in the last place or more, and less than two.
/// Below the normal numbers it may not, and is far from any tie.
#[inline(always)]
fn magnitude_code(a: f32) -> u32 {
    let line = |y: f32, offset: f32| {
        ptx::add_upward(ptx::add_upward(y, -0.5), identity::BASE_F32 + offset).to_bits()
    };
    let most = (identity::BASE_F32 + 7.0).to_bits();
    line(a * 2.0, 0.0).min(line(a, 2.0)).min(line(a * 0.5, 4.0).min(most)) & 7
}

/// The identity on packed pairs, for a 16-bit dtype: eight codes, in order.
#[cfg(not(microscale_fp4))]
macro_rules! encode_packed {
    ($chunk:expr, $reciprocal:expr, $base:expr, $half:literal, $one:literal, $two:literal,
     $scale:expr, $fma:path, $min:path) => {{
        const BASE: u32 = $base;
        let chunk: &Chunk = $chunk;
        let codes = chunk.map(|word| {
            let a = $scale(word, $reciprocal);
            let halves = $fma(a, $two, BASE);
            let ones = $fma(a, $one, BASE + 0x0002_0002);
            let twos = $fma(a, $half, BASE + 0x0004_0004);
            $min($min(halves, ones), $min(twos, BASE + 0x0007_0007))
        });
        pack_nibbles(&codes, chunk)
    }};
}

/// Packs eight codes, each the low byte of a half, with the signs of eight 16-bit values.
///
/// Codes and signs are brought to bytes in the order 1 0 3 2. Times 0x1001, a word of nibbles n₁ n₀ n₃ n₂ (lowest byte first)
/// has n₁ n₀ in its second byte, the first in the high half, and n₃ n₂ in its fourth: a multiplication, which leaves the
/// busier logic unit alone.
#[cfg(not(microscale_fp4))]
#[inline(always)]
fn pack_nibbles(codes: &Chunk, values: &Chunk) -> u32 {
    let two_words = |i: usize| {
        let codes = ptx::permute(codes[i], codes[i + 1], 0x4602);
        let signs = ptx::permute(values[i], values[i + 1], 0xDF9B);
        let nibbles = (signs & 0x0808_0808) | codes;
        nibbles.wrapping_mul(0x1001)
    };
    ptx::permute(two_words(0), two_words(2), 0x7531)
}

/// bfloat16.
pub(crate) struct Bf16;

impl Dtype for Bf16 {
    const BYTES: u32 = 2;
    const SIGNIFICAND: u32 = 8;
    const INFINITY: u32 = 0x7F80;
    const MAX: f32 = f32::from_bits(0x7F7F_0000);
    const MIN_POSITIVE: f32 = f32::MIN_POSITIVE;
    const SIGNS: u32 = SIGNS_16;
    const NAN_WORD: u32 = 0x7FC0_7FC0;

    #[inline(always)]
    fn max_magnitudes(a: u32, b: u32) -> u32 {
        ptx::max_magnitude_bf16x2(a, b)
    }

    #[inline(always)]
    fn min_as_integers(a: u32, b: u32) -> u32 {
        ptx::min_signed_16x2(a, b)
    }

    #[inline(always)]
    fn magnitude_to_f32_bits(magnitude: u32) -> u32 {
        magnitude << 16
    }

    #[inline(always)]
    fn widen(chunk: &Chunk, i: u32) -> f32 {
        f32::from_bits(Self::bits(chunk, i) << 16)
    }

    #[cfg(not(microscale_fp4))]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        // The reciprocal's bf16 bits are its exponent field.
        let reciprocal = (254 - scale) * 0x0080_0080;
        encode_packed!(
            chunk,
            reciprocal,
            identity::BASE_BF16X2,
            0x3F00_3F00,
            0x3F80_3F80,
            0x4000_4000,
            ptx::scale_magnitude_bf16x2,
            ptx::fma_bf16x2,
            ptx::min_positive_bf16x2
        )
    }

    #[cfg(microscale_fp4)]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        encode_hardware_x8::<Self>(chunk, scale)
    }

    #[inline(always)]
    fn limit(chunk: &Chunk, limit: f32) -> Chunk {
        let limit = ptx::bf16x2(limit, limit);
        chunk.map(|word| ptx::min_positive_bf16x2(word & !SIGNS_16, limit) | (word & SIGNS_16))
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        f32::from_bits(ptx::bf16x2(value, 0.0))
    }

    #[inline(always)]
    fn narrow(values: &[f32; 8]) -> Chunk {
        [0, 2, 4, 6].map(|i| ptx::bf16x2(values[i + 1], values[i]))
    }
}

/// IEEE binary16.
pub(crate) struct F16;

impl Dtype for F16 {
    const BYTES: u32 = 2;
    const SIGNIFICAND: u32 = 11;
    const INFINITY: u32 = 0x7C00;
    const MAX: f32 = 65504.0;
    const MIN_POSITIVE: f32 = 6.103_515_6e-5;
    const SIGNS: u32 = SIGNS_16;
    const NAN_WORD: u32 = 0x7E00_7E00;

    #[inline(always)]
    fn max_magnitudes(a: u32, b: u32) -> u32 {
        ptx::max_magnitude_f16x2(a, b)
    }

    #[inline(always)]
    fn min_as_integers(a: u32, b: u32) -> u32 {
        ptx::min_signed_16x2(a, b)
    }

    #[inline(always)]
    fn magnitude_to_f32_bits(magnitude: u32) -> u32 {
        ptx::f16_low_to_f32(magnitude).to_bits()
    }

    #[inline(always)]
    fn widen(chunk: &Chunk, i: u32) -> f32 {
        let word = chunk[(i / 2) as usize];
        if i % 2 == 0 { ptx::f16_low_to_f32(word) } else { ptx::f16_high_to_f32(word) }
    }

    #[cfg(not(microscale_fp4))]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        // 1/s goes up to 2^26 (the smallest subnormal's block) and f16 only to 2^15. Blocks of small values, with scales
        // below 2^-13, are multiplied by 2^12 first: exact, and below 4 afterwards. Zero blocks have b = 0: any factor does.
        let small = scale < 127 - 13;
        let pre = if small { 0x6C00_6C00 } else { 0x3C00_3C00 };
        let exponent = 127 - scale as i32 - if small { 12 } else { 0 };
        let exponent = if exponent > 14 { 14 } else { exponent };
        // 2^exponent has the f16 exponent field exponent + 15; -14 (the widest scale) is still normal.
        let reciprocal = (exponent + 15) as u32 * 0x0400_0400;
        let scaled =
            |word, reciprocal| ptx::scale_magnitude_f16x2(ptx::scale_magnitude_f16x2(word, pre), reciprocal);
        encode_packed!(
            chunk,
            reciprocal,
            identity::BASE_F16X2,
            0x3800_3800,
            0x3C00_3C00,
            0x4000_4000,
            scaled,
            ptx::fma_f16x2,
            ptx::min_positive_f16x2
        )
    }

    #[cfg(microscale_fp4)]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        encode_hardware_x8::<Self>(chunk, scale)
    }

    #[inline(always)]
    fn limit(chunk: &Chunk, limit: f32) -> Chunk {
        let limit = ptx::f16x2(limit, limit);
        chunk.map(|word| ptx::min_positive_f16x2(word & !SIGNS_16, limit) | (word & SIGNS_16))
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        ptx::f16_low_to_f32(ptx::f16x2(0.0, value))
    }

    #[inline(always)]
    fn narrow(values: &[f32; 8]) -> Chunk {
        [0, 2, 4, 6].map(|i| ptx::f16x2(values[i + 1], values[i]))
    }
}

/// IEEE binary32.
pub(crate) struct F32;

impl Dtype for F32 {
    const BYTES: u32 = 4;
    const SIGNIFICAND: u32 = f32::MANTISSA_DIGITS;
    const INFINITY: u32 = 0x7F80_0000;
    const MAX: f32 = f32::MAX;
    const MIN_POSITIVE: f32 = f32::MIN_POSITIVE;
    const SIGNS: u32 = 0x8000_0000;
    const NAN_WORD: u32 = 0x7FC0_0000;

    #[inline(always)]
    fn max_magnitudes(a: u32, b: u32) -> u32 {
        ptx::max_magnitude_f32(f32::from_bits(a), f32::from_bits(b)).to_bits()
    }

    #[inline(always)]
    fn min_as_integers(a: u32, b: u32) -> u32 {
        (a as i32).min(b as i32) as u32
    }

    #[inline(always)]
    fn magnitude_to_f32_bits(magnitude: u32) -> u32 {
        magnitude
    }

    #[inline(always)]
    fn widen(chunk: &Chunk, i: u32) -> f32 {
        f32::from_bits(chunk[i as usize])
    }

    #[cfg(not(microscale_fp4))]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        let codes =
            chunk.map(|bits| magnitude_code_even(f32::from_bits(bits & 0x7FFF_FFFF) * reciprocal(scale)));
        pack_f32(codes, chunk)
    }

    #[cfg(microscale_fp4)]
    #[inline(always)]
    fn encode_even(chunk: &Chunk, scale: u32) -> u32 {
        let [a, b, c, d] = chunk.map(|word| f32::from_bits(word) * reciprocal(scale));
        ptx::e2m1x4(a, b, c, d)
    }

    #[inline(always)]
    fn limit(chunk: &Chunk, limit: f32) -> Chunk {
        chunk.map(|bits| (bits & !Self::SIGNS).min(limit.to_bits()) | (bits & Self::SIGNS))
    }

    #[inline(always)]
    fn round(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn narrow(values: &[f32; 8]) -> Chunk {
        [0, 1, 2, 3].map(|i| values[i].to_bits())
    }
}

/// The codes of eight 16-bit values by the hardware's conversion.
#[cfg(microscale_fp4)]
#[inline(always)]
fn encode_hardware_x8<D: Dtype>(chunk: &Chunk, scale: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| D::widen(chunk, i) * reciprocal(scale));
    ptx::e2m1x8(a, b, c, d, e, f, g, h)
}

/// Up to eight codes, the first in the lowest nibble, as exact f32.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(crate) fn decode(codes: u32) -> [f32; 8] {
    // Nibbles k and k + 4 go to the two halves of a word: three bits where f16 has the end of its exponent and the start of
    // its mantissa, the sign on top. That is the value times 2^-14, subnormals included.
    let pairs = [0, 1, 2, 3].map(|k| {
        let codes = codes >> (4 * k);
        let scaled = (codes << 9 & 0x0E00_0E00) | (codes << 12 & SIGNS_16);
        ptx::fma_f16x2(scaled, 0x7400_7400, SIGNS_16)
    });
    let mut values = [0.0; 8];
    for k in 0..4 {
        values[k] = ptx::f16_low_to_f32(pairs[k]);
        values[k + 4] = ptx::f16_high_to_f32(pairs[k]);
    }
    values
}

/// Up to eight codes, the first in the lowest nibble, as exact f32.
#[cfg(microscale_fp4)]
#[inline(always)]
pub(crate) fn decode(codes: u32) -> [f32; 8] {
    let mut values = [0.0; 8];
    for i in 0..4 {
        let pair = ptx::e2m1x2_to_f16x2(codes >> (8 * i));
        values[2 * i as usize] = ptx::f16_low_to_f32(pair);
        values[2 * i as usize + 1] = ptx::f16_high_to_f32(pair);
    }
    values
}

/// No code's magnitude is zero where the sign stays.
#[inline(always)]
pub(crate) fn drop_negative_zero_codes(codes: u32) -> u32 {
    let non_zero = (codes | codes >> 1 | codes >> 2) & 0x1111_1111;
    codes & (0x7777_7777 | non_zero << 3)
}

const _: () = assert!(e2m1::VALUES[7] == e2m1::MAX);
