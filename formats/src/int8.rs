//! 4-bit weights times integer activations: the definition, and its error bounds.
//!
//! Integers are activations that are rounded to INT8, or activations in FP4. To round them to INT8
//! is an option, never the default: unlike [`weights`](crate::weights), it loses something.
//!
//! # Activations
//!
//! Each [`BLOCK`] of 32 activations along K gets the scale amax / 127, an f32, and codes
//! ([`quantize`]). A code is x · (127 / amax), rounded to f32 and then to the nearest integer, ties
//! to even. The last block of a row is padded with zeros. Two cases are special:
//!
//! - The scale would be below f32's normal numbers: scale and codes are 0. This includes blocks of
//!   zeros.
//! - A value is NaN or infinite: the scale is NaN, so each product with the token is NaN.
//!
//! ggml's Q8_0 (`quantize_row_q8_0_ref`) differs in three points: it multiplies by
//! 1 / (amax / 127), rounds ties away from zero, and stores the scale as f16.
//!
//! # Activations in FP4
//!
//! Twice an element is an integer, too. So activations in the format of the weights have the codes
//! 2 · element and the scale [`scale_of_twice`], half of their block's scale. They are exact. The
//! products and bounds below are the same for them.
//!
//! # Products
//!
//! Elements form groups of [`GROUP`]: a block of NVFP4, or half a block of MXFP4. Twice a weight is
//! an integer, so twice the sum of a group's products with codes is an integer as well
//! ([`twice_sum`]), of at most 16 · 12 · 127 = 24,384. Multiplied by the weights' scale it is exact
//! in f32. The result times the activations' scale is fused into one of [`LANES`] f32 sums
//! ([`add_nvfp4`], [`add_mxfp4`]), in the order of groups. Group g belongs to lane g mod 16. Lanes
//! are then added in f32, those next to each other first ([`total`]), so 0 + 1, then (0 + 1) + (2 +
//! 3), and so on. [`factor`] and the global scale are applied in f64, and the result is rounded
//! once.
//!
//! Every instruction set, every number of tokens and every number of threads gives these bits.
//!
//! # Error bounds
//!
//! Let x̂ be the activations after rounding, code times scale. A product goes through at most
//! ⌈K / 256⌉ roundings in its lane and four between lanes. While K is below 2^20 and no sum
//! overflows,
//!
//! ```text
//! |y − Σ w·x̂| ≤ ½ ulp(y) + γ · Σ |w·x̂| + δ        γ = (⌈K / 256⌉ + 5) · 2^−24
//! ```
//!
//! with [`gamma`] and w including the global scale. δ is ⌈K / 16⌉ · 2^−143 in NVFP4 and ⌈K / 16⌉ ·
//! 2^−152 in MXFP4, times the global scale: the loss of sums below f32's normal numbers. A lane
//! overflows when its products reach 128 times the largest f32 in NVFP4, and a quarter of it in
//! MXFP4. The result is infinite or NaN from there on.
//!
//! Rounding the activations loses, for every element of a block with largest magnitude amax,
//!
//! ```text
//! |x − x̂| ≤ (½ + 2^−15) · amax / 127 ≤ amax · 2^−7.98
//! ```
//!
//! or at most 2^−119 if the scale would not be normal. The error of a result is at most the sum of
//! these, each times the magnitude of its weight.

use crate::arithmetic::Fused;
use crate::weights::GROUP;
use crate::{E2m1x2, E4m3, E8m0, Format};

/// Activations per block.
pub const BLOCK: usize = 32;

/// Independent f32 sums per result.
pub const LANES: usize = 16;

/// The largest code.
pub const LARGEST: f32 = 127.0;

/// Rounds to an integer, ties to even, when added to an f32 of magnitude below 2^22.
///
/// The low bits of the sum are the integer in two's complement.
pub const ROUND: f32 = 12_582_912.0;

/// The largest MXFP4 scale byte whose double times a group's sum is below f32's infinity.
pub const LARGEST_SCALE: u8 = 238;

/// Quantizes a block. Returns its scale and codes.
///
/// Takes up to [`BLOCK`] values, and pads them with zeros.
pub fn quantize(values: &[f32]) -> (f32, [i8; BLOCK]) {
    let mut codes = [0; BLOCK];
    let amax = values.iter().fold(0, |amax, x| amax.max(x.to_bits() & 0x7FFF_FFFF));
    let (scale, inverse) = scales(f32::from_bits(amax));
    if inverse != 0.0 {
        for (code, x) in codes.iter_mut().zip(values) {
            *code = (x * inverse + ROUND).to_bits() as i8;
        }
    }
    (scale, codes)
}

/// Returns the scale of a block, and the factor that its values are multiplied by.
///
/// The factor is 0 if all codes are 0. The scale is NaN if amax is NaN or infinite.
#[inline(always)]
pub fn scales(amax: f32) -> (f32, f32) {
    let scale = amax / LARGEST;
    if !amax.is_finite() {
        (f32::NAN, 0.0)
    } else if scale < f32::MIN_POSITIVE {
        (0.0, 0.0)
    } else {
        (scale, LARGEST / amax)
    }
}

/// Returns half of a block's scale, exactly: the scale of codes that are twice the elements.
#[inline(always)]
pub fn scale_of_twice(format: Format, scale: u8) -> f32 {
    0.5 * match format {
        Format::Nvfp4 => E4m3::from_bits(scale).to_f32(),
        _ => E8m0::from_bits(scale).to_f32(),
    }
}

/// Returns twice the sum of the products of a group's weights and codes of activations.
pub fn twice_sum(codes: &[u8], activations: &[i8]) -> i32 {
    let pairs = codes.iter().map(|codes| E2m1x2::from_bits(*codes));
    let weights = pairs.flat_map(|pair| [pair.low(), pair.high()]).map(|code| (2.0 * code.to_f32()) as i32);
    weights.zip(activations).map(|(weight, x)| weight * i32::from(*x)).sum()
}

/// Adds an NVFP4 group to a lane's sum. The result is NaN if a scale is.
#[inline(always)]
pub fn add_nvfp4<F: Fused>(sum: f32, twice_sum: i32, weights: E4m3, activations: f32) -> f32 {
    F::fma(twice_sum as f32 * (weights.to_f32() / 256.0), activations, sum)
}

/// Adds an MXFP4 group to a lane's sum. The result is NaN if a scale is.
///
/// Scales above [`LARGEST_SCALE`] need the range of f64. Only the addition rounds there, twice.
#[inline(always)]
pub fn add_mxfp4<F: Fused>(sum: f32, twice_sum: i32, weights: E8m0, activations: f32) -> f32 {
    match weights.to_bits() {
        255 => f32::NAN,
        byte if byte > LARGEST_SCALE => {
            let term = f64::from(twice_sum) * 2.0 * f64::from(weights.to_f32()) * f64::from(activations);
            (f64::from(sum) + term) as f32
        }
        byte => F::fma(twice_sum as f32 * f32::from_bits((u32::from(byte) + 1) << 23), activations, sum),
    }
}

/// Returns the sum of all lanes.
pub fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for i in 0..count {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    lanes[0]
}

/// Returns the factor of a [`total`]: the factors of [`add_nvfp4`] and [`add_mxfp4`] undone.
#[inline(always)]
pub const fn factor(format: Format) -> f64 {
    match format {
        Format::Nvfp4 => 128.0,
        _ => 0.25,
    }
}

/// Returns γ, for rows of `cols` elements.
pub fn gamma(cols: usize) -> f64 {
    (cols.div_ceil(LANES * GROUP) + 5) as f64 / f64::from(1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::MulAdd;

    #[test]
    fn codes_round_to_nearest_ties_to_even() {
        let (scale, codes) = quantize(&[127.0, 2.5, 3.5, -0.5, -1.5, -127.0, 0.49, -126.6]);
        assert_eq!(scale, 1.0);
        assert_eq!(codes[..9], [127, 2, 4, 0, -2, -127, 0, -127, 0]);
    }

    #[test]
    fn every_block_is_within_half_a_step() {
        let mut state = 1u64;
        for exponent in -118..128 {
            for _ in 0..20 {
                let values: [f32; BLOCK] = core::array::from_fn(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let fraction = (state >> 40) as f32 / (1 << 24) as f32;
                    (2.0 * fraction - 1.0) * f32::from_bits(((127 + exponent.min(127)) as u32) << 23)
                });
                let (scale, codes) = quantize(&values);
                let amax = values.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                let error = (0.5 + 1.0 / 32768.0) * f64::from(amax) / 127.0;
                for (x, code) in values.iter().zip(codes) {
                    let near = f64::from(scale) * f64::from(code);
                    assert!(scale == 0.0 && amax < 1.6e-36 || (f64::from(*x) - near).abs() <= error);
                }
            }
        }
    }

    #[test]
    fn zeros_and_tiny_blocks_are_zeros() {
        for x in [0.0, -0.0, f32::from_bits(1), 126.0 * f32::MIN_POSITIVE] {
            assert_eq!(quantize(&[x; BLOCK]), (0.0, [0; BLOCK]));
        }
        let least = 127.0 * f32::MIN_POSITIVE;
        assert_eq!(quantize(&[least, -least]).1[..3], [127, -127, 0]);
        assert_eq!(quantize(&[f32::MAX, f32::MIN]).1[..2], [127, -127]);
    }

    #[test]
    fn what_is_not_finite_makes_the_scale_nan() {
        for x in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (scale, codes) = quantize(&[1.0, x, 2.0]);
            assert!(scale.is_nan() && codes == [0; BLOCK]);
        }
    }

    #[test]
    fn a_group_is_twice_its_sum() {
        // 6 · 2 − 4 · 3 + 0.5 · 5 = 2.5. The last code has no activation.
        assert_eq!(twice_sum(&[0xE7, 0x71], &[2, 3, 5]), 5);
        assert_eq!(twice_sum(&[0x77; 8], &[-127; 16]), -24384);
    }

    #[test]
    fn factors_undo_the_scales() {
        for byte in 0..=254 {
            let scale = E8m0::from_bits(byte);
            // 7 halves, times the scale, times 2^−1 or 2^−100.
            for activations in [0.5, f32::from_bits(27 << 23)] {
                let sum = add_mxfp4::<MulAdd>(0.0, 7, scale, activations);
                let expected = 3.5 * f64::from(scale.to_f32()) * f64::from(activations);
                let is_normal =
                    (f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX) / 8.0).contains(&(4.0 * expected));
                assert!(!is_normal || f64::from(sum) * factor(Format::Mxfp4) == expected, "{byte}");
            }
        }
        for byte in 0..=0x7E {
            let scale = E4m3::from_bits(byte);
            let sum = add_nvfp4::<MulAdd>(0.0, -7, scale, 0.5);
            assert_eq!(f64::from(sum) * factor(Format::Nvfp4), -1.75 * f64::from(scale.to_f32()));
        }
        assert!(add_mxfp4::<MulAdd>(0.0, 0, E8m0::NAN, 1.0).is_nan());
        assert!(add_nvfp4::<MulAdd>(0.0, 0, E4m3::NAN, 1.0).is_nan());
        assert!(add_nvfp4::<MulAdd>(0.0, 0, E4m3::from_bits(1), f32::NAN).is_nan());
    }

    #[test]
    fn lanes_are_added_to_their_neighbours_first() {
        let mut lanes = [0.0; LANES];
        (lanes[0], lanes[1], lanes[2], lanes[15]) = (1e30, -1e30, 1.0, 2.0);
        assert_eq!(total(lanes), 3.0);
    }
}
