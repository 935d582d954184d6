//! The dtypes: bf16, f16 and f32.

#[cfg(not(microscale_fp4))]
use microscale_formats::e2m1::identity;

use super::chunk::{Chunk, Dtype, SIGNS_16};
use super::e2m1::reciprocal;
#[cfg(not(microscale_fp4))]
use super::e2m1::{magnitude_code_even, pack_f32, pack_nibbles};
use crate::hardware::ptx;

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
        // 1/s goes up to 2^26 (the smallest subnormal's block) and f16 only to 2^15. Blocks of
        // small values, with scales below 2^-13, are multiplied by 2^12 first: exact, and below 4
        // afterwards. Zero blocks have b = 0: any factor does.
        let small = scale < 127 - 13;
        let pre = if small { 0x6C00_6C00 } else { 0x3C00_3C00 };
        let exponent = 127 - scale as i32 - if small { 12 } else { 0 };
        let exponent = if exponent > 14 { 14 } else { exponent };
        // 2^exponent has the f16 exponent field exponent + 15; -14 (the widest scale) is still
        // normal.
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
