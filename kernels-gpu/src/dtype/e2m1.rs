//! The E2M1 codes of chunks, and the values of codes.

use microscale_formats::Ties;
use microscale_formats::e2m1::{self, identity};

#[cfg(not(microscale_fp4))]
use super::chunk::SIGNS_16;
use super::chunk::{Chunk, Dtype};
use crate::hardware::ptx;

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
    // The identity without its last term. Below the base, the bits of the codes are zeros down to
    // the lowest.
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

/// The codes of eight values, ties to even, for a factor of `NvShortcut`: products are cut to f16,
/// with the factor's last bit set in them, and encoded two at a time.
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

/// A scaled value with the sign of `value`, where the hardware encodes it: a sum of two products of
/// −0 may be +0. Without hardware, signs come from the chunk itself.
#[inline(always)]
pub(crate) fn signed_for_hardware(scaled: f32, value: f32) -> f32 {
    if cfg!(microscale_fp4) { scaled.copysign(value) } else { scaled }
}

/// The [`identity`]: the code of a magnitude in the low half, above it bits of the base.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(super) fn magnitude_code_even(a: f32) -> u32 {
    use identity::BASE_F32 as BASE;
    let halves = ptx::fma_f32(a, 2.0, BASE).to_bits();
    let ones = (a + (BASE + 2.0)).to_bits();
    let twos = ptx::fma_f32(a, 0.5, BASE + 4.0).to_bits();
    halves.min(ones).min(twos.min((BASE + 7.0).to_bits()))
}

/// Packs four codes, each in the low half of a word, with the signs of four f32.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(super) fn pack_f32(codes: [u32; 4], values: &Chunk) -> u32 {
    // The codes' low 16 bits have no other bits, so multiplying and adding packs them.
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

/// [`identity`] with ties toward zero. Rounding y so is ⌈y − ½⌉; both sums may be rounded upward
/// themselves, because integers are part of the finer grid.
///
/// Ties away from zero are ties toward zero of the next larger f32: a tie becomes larger than the
/// tie, and values below become at most the tie. The next larger f32 is the product with 1 + 2^−23,
/// truncated, which adds at least one unit in the last place and less than two. Subnormal numbers
/// may stay, but they are far from any tie.
#[inline(always)]
fn magnitude_code(a: f32) -> u32 {
    let line = |y: f32, offset: f32| {
        ptx::add_upward(ptx::add_upward(y, -0.5), identity::BASE_F32 + offset).to_bits()
    };
    let most = (identity::BASE_F32 + 7.0).to_bits();
    line(a * 2.0, 0.0).min(line(a, 2.0)).min(line(a * 0.5, 4.0).min(most)) & 7
}

/// Packs eight codes, each the low byte of a half, with the signs of eight 16-bit values.
///
/// Codes and signs are brought to bytes in the order 1 0 3 2. Times 0x1001, a word of nibbles n₁ n₀
/// n₃ n₂ (lowest byte first) has n₁ n₀ in its second byte, the first in the high half, and n₃ n₂ in
/// its fourth: a multiplication, so the busier logic unit is not used.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(super) fn pack_nibbles(codes: &Chunk, values: &Chunk) -> u32 {
    let two_words = |i: usize| {
        let codes = ptx::permute(codes[i], codes[i + 1], 0x4602);
        let signs = ptx::permute(values[i], values[i + 1], 0xDF9B);
        let nibbles = (signs & 0x0808_0808) | codes;
        nibbles.wrapping_mul(0x1001)
    };
    ptx::permute(two_words(0), two_words(2), 0x7531)
}

/// Up to eight codes, the first in the lowest nibble, as exact f32.
#[cfg(not(microscale_fp4))]
#[inline(always)]
pub(crate) fn decode(codes: u32) -> [f32; 8] {
    // Nibbles k and k + 4 go to the two halves of a word: three bits where f16 has the end of its
    // exponent and the start of its mantissa, the sign on top. That is the value times 2^-14,
    // subnormals included.
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
