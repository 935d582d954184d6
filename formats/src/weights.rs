//! Weights in four bits times activations in f32 or 16 bits: what GEMV computes for each row of its matrix and
//! each vector that is not quantized.
//!
//! The elements form groups of [`GROUP`]: a block of NVFP4, half a block of MXFP4. A group's products
//! with a 128th of the weights are fused to their sum, in order, each sum rounded to f32. That is the group's
//! [`fraction`]. Products of activations in 16 bits are exact in f32, whatever these are, so that fusing makes no
//! difference there. None of it can overflow: sixteen times 6/128 is below 1.
//!
//! A fraction times twice the block scale is fused to one of [`STREAMS`](crate::dot::STREAMS) sums of f32,
//! the one that the group's chunk has in [`dot`](crate::dot); groups come in order. Twice, because twice
//! 2^−127 is a normal number. The sums are then added as there, in f64, and 64 times that is the [`total`].
//! It comes under the matrix' global scale in f64 ([`scaled`](crate::dot::scaled)), and is rounded once.
//!
//! How far that is from the exact sum: with u = 2^−24, a product meets 15 roundings in its group, 2⌈K / 1024⌉
//! in its stream, and six of 2^−53 afterwards. So, while K is below 2^21 and no sum overflows,
//!
//! ```text
//! |y − Σ w·x| ≤ ½ ulp(y) + γ · Σ |w·x| + δ        γ = (16 + 2⌈K / 1024⌉) · 2^−24
//! ```
//!
//! with the global scale in w. δ is what sums of f32 lose below its normal numbers: nothing in NVFP4, whose
//! terms are multiples of 2^−149 here, and at most K · 2^−148 in MXFP4; of activations in f32, which may have lower
//! bits, K · 2^−142 times the largest block scale in either, if that is 1 or more, and K · 2^−142 if not. A stream overflows where its products
//! come to 64 times the largest f32, and are infinite or NaN from there.
//!
//! GPUs add the products by tensor cores, and differ from that in their last bits. A tensor core multiplies
//! 16 weights of a row, already scaled, with 16 activations exactly, truncates each product and the sum
//! before them to 24 bits of the largest one's, and adds. Eight such instructions follow each other from
//! zero: each loses at most 18 units of 2^−23 of what the eight come to without signs. Their sums are added
//! in f32, one for each k-iteration of 128 elements or more. So there γ is [`tensor_core_gamma`], and with
//! bf16, whose products may be below f32's normal numbers, K · 2^−110 comes to δ; with it, sums overflow at
//! 2^14 times the largest f32.
//!
//! With one token, weights are not scaled first: four multiplications with four products each make a group,
//! and lose six units each; groups come under their scales as they are fused to sums of f32, two for each 256
//! elements or more, and the sums of eight lanes in f32. γ is smaller then. δ is more, because sums of f32
//! are lower: by 2^14 with f16, where it is K · 2^−140 in MXFP4, and by 2^24 with bf16, where it is K ·
//! 2^−130. With bf16 there is K · 2^−101 times the largest block scale over elements that are not all zeros,
//! too, as though activations ended near 2^−101; less by 2^23 where tensor cores keep subnormal numbers. Sums
//! that are infinite or NaN, and those of bf16 activations from 2^24 on, are computed as on CPUs, so that
//! they are never less.
//!
//! With any number of tokens (GEMM), the instructions of a share of K follow each other in the tensor cores' own sums: all of a row's,
//! or those of a thread block's part of it, of which the sums are added in f32 in the order of K. γ is [`gemm_gamma`], most of which
//! never comes to pass; δ, and where sums overflow, are as for several tokens.
//!
//! What GPUs do with a sum before they store it, a bias, a [gate](crate::gate) and a residual, is done in f32 or f64: each step's result is off by
//! 2^−23 of it at most, besides what the sum was, and only the last one is rounded to the results' dtype. Activations in f32 are
//! three in bf16 there, of eight bits each, the sums of which are added in f64; of each the bounds above hold, with its own
//! magnitudes, of which the second's are 2^−7 of the first's, and δ is more by K · 2^−133 times the largest weight.
//!
//! # Many tokens on CPUs
//!
//! With five tokens and more where there are matrix tiles, a row's elements form segments of [`SEGMENT`]. So they do elsewhere with
//! thirteen and more, but not for what is left behind the last multiple of sixteen if that is up to eight tokens, which are
//! multiplied as few are. Weights come under their scales first: as 64ths in
//! NVFP4 ([`nvfp4_weight`]), over the row's largest scale in MXFP4 ([`mxfp4_weight`]). Either is exact, with six bits. A
//! [`segment`]'s products are fused to its sum, in order, each sum rounded to f32. The sums of all segments are added in f32, in
//! order, and come under [`NVFP4_FACTOR`] or the row's largest scale, and then under the global scale, in f64; that is rounded
//! once. γ is [`segments_gamma`], while K is below 2^19. δ is K · 2^−144 in NVFP4, and K · 2^−150 times the row's largest scale in MXFP4.
//!
//! Rows with scales that are NaN, or under which weights that are not zeros would be below f32's normal numbers ([`SPAN`]), and
//! sums that are infinite or NaN, are computed as of few tokens.
//!
//! Instructions that multiply and add pairs of bf16 (AVX-512 BF16) round twice for each pair, in an order that is theirs, and take
//! subnormal numbers for zeros. γ is the same with them; δ is K · 2^−114 in NVFP4, and K · 2^−123 times the row's largest scale in
//! MXFP4.
//!
//! Matrix tiles (AMX with BF16) multiply a segment 32 elements at a time, of which every fourth comes first, from the first one on, then every fourth from the
//! second one on, and so on: elements 0, 4, … 28, 1, 5, … 31 have the indices 0 to 31. An activation is a sum of
//! bf16, f32 of three and f16 of two: each has the upper eight bits of what is left, cut off, so that their magnitudes come to
//! that of the activation. The parts of 32 elements follow each other, the highest first. The products of one with the weights of an
//! even index are fused to a sum, in order, from zero, and those of an odd index to another; both are added, and then added to
//! the segment's sum, which is zero before the first. Each step rounds to nearest, and takes subnormal numbers for zeros, in operands
//! and in results. A product meets 41 roundings in its segment at most, so that γ is the same. δ is K · 2^−114 in NVFP4, and in MXFP4
//! the row's largest scale times K · 2^−123, or K · 2^−122 with activations in f32.
//!
//! # GPUs of several warps a row
//!
//! The order follows, too, from how many warps share a row (slices of K). For several tokens, runs of 128
//! elements go to a row's parts in turn: each warp has segments side by side, eight over the number of tokens
//! as a power of two. Parts are added in f64, warp by warp. For one token, chunks of 32 go to the lanes in
//! turn, four for each of a warp's two segments; lanes are added in f32, (0 + 1) + (2 + 3), then both
//! segments, and warps in f64.

use crate::arithmetic::Fused;
use crate::dot::Sums;
use crate::{E2m1, E2m1x2, E4m3, E8m0};

/// Elements of a group: the largest number that is in one block of either format.
pub const GROUP: usize = 16;

/// A 128th of the sum of a group's products, without its scale. Where there are no activations left, nothing
/// is added.
pub fn fraction<F: Fused>(codes: &[u8], activations: &[f32]) -> f32 {
    let pairs = codes.iter().map(|codes| E2m1x2::from_bits(*codes));
    let weights = pairs.flat_map(|pair| [pair.low(), pair.high()]).map(|code| code.to_f32() / 128.0);
    weights.zip(activations).fold(0.0, |sum, (weight, x)| F::fma(weight, *x, sum))
}

/// Adds a group of NVFP4 to a stream's sum. NaN if the scale is.
#[inline(always)]
pub fn add_nvfp4<F: Fused>(sum: f32, fraction: f32, scale: E4m3) -> f32 {
    F::fma(fraction, 2.0 * scale.to_f32(), sum)
}

/// Adds a group of MXFP4 to a stream's sum. NaN if the scale is.
#[inline(always)]
pub fn add_mxfp4<F: Fused>(sum: f32, fraction: f32, scale: E8m0) -> f32 {
    match scale.to_bits() {
        255 => f32::NAN,
        // Twice 2^127 is no f32. If twice the fraction is none either, the term was too large already.
        254 => F::fma(2.0 * fraction, scale.to_f32(), sum),
        byte => F::fma(fraction, f32::from_bits((u32::from(byte) + 1) << 23), sum),
    }
}

/// Elements of a segment, whose products with activations are added in one sum of f32.
pub const SEGMENT: usize = 256;

/// The factor of sums with [`nvfp4_weight`].
pub const NVFP4_FACTOR: f64 = 64.0;

/// The exponents from the largest scale of a row to the smallest one under which every weight is a normal number by [`mxfp4_weight`].
pub const SPAN: u8 = 125;

/// A 64th of a weight under its scale: exact.
pub fn nvfp4_weight(code: E2m1, scale: E4m3) -> f32 {
    code.to_f32() / 64.0 * scale.to_f32()
}

/// A weight under its scale over the largest scale of the row: exact, if there are no more than [`SPAN`] exponents between them, or
/// the code is zero.
pub fn mxfp4_weight(code: E2m1, scale: E8m0, largest: E8m0) -> f32 {
    // Beyond the span, the code is zero.
    let ratio = largest.to_bits().saturating_sub(scale.to_bits()).min(SPAN + 1);
    code.to_f32() * f32::from_bits(u32::from(127 - ratio) << 23)
}

/// The sum of the products of a segment's weights, one after the other.
pub fn segment<F: Fused>(weights: &[f32], activations: &[f32]) -> f32 {
    weights.iter().zip(activations).fold(0.0, |sum, (weight, x)| F::fma(*weight, *x, sum))
}

/// γ of sums of many tokens on CPUs, for rows of so many elements.
pub fn segments_gamma(cols: usize) -> f64 {
    (SEGMENT + 1 + cols.div_ceil(SEGMENT)) as f64 / f64::from(1 << 24)
}

/// γ of sums by tensor cores, for rows of so many elements.
pub fn tensor_core_gamma(cols: usize) -> f64 {
    let k_iterations = cols.div_ceil(128) as f64;
    (2.0 * 8.0 * 18.0 + k_iterations) / f64::from(1 << 24)
}

/// γ of sums of any number of tokens by tensor cores, for rows of so many elements: each k-iteration of 128 loses what
/// [`tensor_core_gamma`] says of one, shares of K are added, and the sum comes under the global scale and is rounded to f32.
pub fn gemm_gamma(cols: usize) -> f64 {
    let k_iterations = cols.div_ceil(128) as f64;
    (2.0 * 8.0 * 18.0 * k_iterations + k_iterations + 2.0) / f64::from(1 << 24)
}

/// The sum of all streams, times 64.
pub fn total(streams: Sums) -> f64 {
    64.0 * streams.total()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exact;

    impl Fused for Exact {
        // Enough for numbers of few bits.
        fn fma(a: f32, b: f32, c: f32) -> f32 {
            (f64::from(a) * f64::from(b) + f64::from(c)) as f32
        }
    }

    #[test]
    fn a_group_is_a_128th_of_its_sum() {
        // 6 · 2 − 4 · 0.5 + 0.5 · 3 = 11.5; the code after them meets no activation.
        assert_eq!(fraction::<Exact>(&[0xE7, 0x71], &[2.0, 0.5, 3.0]), 11.5 / 128.0);
        assert_eq!(fraction::<Exact>(&[0x77; 8], &[f32::MAX; 16]), 0.75 * f32::MAX);
        // Exact down to where a bf16 ends.
        let least = f32::from_bits(1 << 16);
        assert_eq!(fraction::<Exact>(&[0x01], &[least, 0.0]), least / 256.0);
    }

    #[test]
    fn every_scale_is_doubled() {
        for byte in 0..=254 {
            let scale = E8m0::from_bits(byte);
            let expected = f64::from(0.3125f32) * 2.0 * f64::from(scale.to_f32());
            assert_eq!(add_mxfp4::<Exact>(0.0, 0.3125, scale), expected as f32);
        }
        for byte in 0..=0x7E {
            let scale = E4m3::from_bits(byte);
            assert_eq!(add_nvfp4::<Exact>(1.0, 0.5, scale), 1.0 + scale.to_f32());
        }
        assert!(add_mxfp4::<Exact>(0.0, 0.0, E8m0::NAN).is_nan());
        assert!(add_nvfp4::<Exact>(0.0, 0.0, E4m3::NAN).is_nan());
    }

    #[test]
    fn the_total_is_64_times_the_streams() {
        assert_eq!(total(Sums::of([0.25; crate::dot::STREAMS])), 512.0);
    }
}
