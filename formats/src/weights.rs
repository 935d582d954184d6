//! 4-bit weights times f32 or 16-bit activations: GEMV for vectors that are not quantized.
//!
//! Elements form groups of [`GROUP`]: a block of NVFP4, or half a block of MXFP4. A group's
//! [`fraction`] is the sum of its activations times a 128th of its weights. Products are fused into
//! the sum, in order, and each sum is rounded to f32. Products of 16-bit activations are exact in
//! f32 for any values, so fusing makes no difference for them. Nothing can overflow: sixteen times
//! 6/128 is below 1.
//!
//! A fraction times twice the block scale is fused into one of [`STREAMS`](crate::dot::STREAMS) f32
//! sums, in the order of groups. The stream is the one that [`dot`](crate::dot) assigns to the
//! group's chunk. The scale is doubled because twice 2^−127 is a normal number. The streams are
//! then added as in [`dot`](crate::dot), in f64, and 64 times the result is the [`total`]. The
//! matrix's global scale is applied in f64 ([`scaled`](crate::dot::scaled)), and the result is
//! rounded once.
//!
//! # Error bound
//! With u = 2^−24, a product goes through 15 roundings in its group, 2⌈K / 1024⌉ in its stream, and
//! six of 2^−53 afterwards. While K is below 2^21 and no sum overflows,
//!
//! ```text
//! |y − Σ w·x| ≤ ½ ulp(y) + γ · Σ |w·x| + δ        γ = (16 + 2⌈K / 1024⌉) · 2^−24
//! ```
//!
//! where w includes the global scale. δ is the loss of f32 sums below f32's normal numbers:
//!
//! - 0 in NVFP4, whose terms are multiples of 2^−149 here.
//! - At most K · 2^−148 in MXFP4.
//! - For f32 activations, which may have lower bits, K · 2^−142 times the largest block scale, or K
//!   · 2^−142 if that scale is below 1. This holds for both formats.
//!
//! A stream overflows if its products reach 64 times the largest f32. It is infinite or NaN from
//! there on.
//!
//! # GPUs, several tokens
//! Tensor cores add the products, so the last bits differ from the above. A tensor core multiplies
//! 16 scaled weights of a row with 16 activations exactly, truncates each product and the previous
//! sum to 24 bits of the largest of them, and adds. Eight such instructions form a chain that
//! starts from zero. Each loses at most 18 units of 2^−23 of the sum of all magnitudes in the
//! chain. The sums of chains are added in f32, one per k-iteration of 128 elements or more. γ is
//! then [`tensor_core_gamma`]. With bf16, whose products may be below f32's normal numbers, δ grows
//! by K · 2^−110, and sums overflow at 2^14 times the largest f32.
//!
//! # GPUs, one token
//! With one token, weights are not scaled first. Four multiplications of four products each make a
//! group and lose six units each. Block scales are applied when groups are fused into f32 sums, two
//! for each 256 elements or more. The sums of eight lanes are then added in f32. γ is smaller in
//! this case. δ is larger, because the f32 sums are lower:
//!
//! - By 2^14 with f16, so it is K · 2^−140 in MXFP4.
//! - By 2^24 with bf16, so it is K · 2^−130 in MXFP4.
//! - With bf16 it also includes K · 2^−101 times the largest block scale over elements that are not
//!   all zero, as if activations ended near 2^−101. Tensor cores that support subnormal numbers
//!   make this term smaller by 2^23.
//!
//! Sums that are infinite or NaN, and sums of bf16 activations from 2^24 on, are recomputed as on
//! CPUs, so results are never worse.
//!
//! # GPUs, any number of tokens (GEMM)
//! The instructions of a K split accumulate in the tensor cores' own sums. A split is a whole row,
//! or a thread block's part of it, and the partial sums are added in f32 in the order of K. γ is
//! [`gemm_gamma`], and most of that allowance never occurs. δ and the limits of overflow are the
//! same as for several tokens.
//!
//! # The epilogue on GPUs
//! A bias, a [gate](crate::gate) and a residual are applied in f32 or f64 before the result is
//! stored. Each step adds a relative error of at most 2^−23 to the error of the sum. Only the last
//! step rounds to the dtype of the results. f32 activations are split into three bf16 parts of
//! eight bits each, whose sums are added in f64. The bounds above hold for each part with its own
//! magnitudes, and the second part's magnitudes are 2^−7 of the first's. δ grows by K · 2^−133
//! times the largest weight.
//!
//! # Many tokens on CPUs
//!
//! With matrix tiles, five tokens or more use segments of [`SEGMENT`] elements of a row. Elsewhere
//! thirteen tokens or more do. There, tokens after the last multiple of sixteen are multiplied like
//! few tokens if they are at most eight.
//!
//! Weights are scaled first: to 64ths in NVFP4 ([`nvfp4_weight`]), relative to the row's largest
//! scale in MXFP4 ([`mxfp4_weight`]). Both are exact, with six bits. The products of a [`segment`]
//! are fused into its sum, in order, each sum rounded to f32. The sums of all segments are added in
//! f32, in order. Then [`NVFP4_FACTOR`] or the row's largest scale is applied in f64, followed by
//! the global scale, and the result is rounded once. γ is [`segments_gamma`] while K is below 2^19.
//! δ is K · 2^−144 in NVFP4, and K · 2^−150 times the row's largest scale in MXFP4.
//!
//! Three cases are computed as for few tokens: rows with NaN scales, rows with scales that would
//! take nonzero weights below f32's normal numbers ([`SPAN`]), and sums that are infinite or NaN.
//!
//! Instructions that multiply and add pairs of bf16 (AVX-512 BF16) round twice for each pair, in an
//! order of their own, and flush subnormal numbers to zero. γ is the same for them. δ is K · 2^−114
//! in NVFP4, and K · 2^−123 times the row's largest scale in MXFP4.
//!
//! Matrix tiles (AMX with BF16) multiply a segment 32 elements at a time. Within these, elements
//! with stride four are adjacent: elements 0, 4, … 28, 1, 5, … 31 have the indices 0 to 31. An
//! activation is a sum of bf16 parts, three for f32 and two for f16. Each part holds the upper
//! eight bits of the remainder, truncated, so the magnitudes of the parts add up to the
//! activation's. The parts of 32 elements follow each other, the highest first. The products of one
//! part with the weights of even indices are fused into a sum, in order, from zero, and the
//! products of odd indices into another. Both sums are added, and the result is added to the
//! segment's sum, which starts at zero. Each step rounds to nearest and flushes subnormal operands
//! and results to zero. A product goes through at most 41 roundings in its segment, so γ is the
//! same. δ is K · 2^−114 in NVFP4. In MXFP4 it is the row's largest scale times K · 2^−123, or K ·
//! 2^−122 with f32 activations.
//!
//! # GPUs with several warps per row
//!
//! The order also depends on the number of warps that share a row (slices of K). For several
//! tokens, runs of 128 elements go to the parts of a row in turn. Each warp has several segments
//! side by side: eight divided by the number of tokens, as a power of two. Parts are added in f64,
//! warp by warp. For one token, chunks of 32 go to the lanes in turn, four for each of a warp's two
//! segments. Lanes are added in f32, (0 + 1) + (2 + 3), then both segments, and warps in f64.

use crate::arithmetic::Fused;
use crate::dot::Sums;
use crate::{E2m1, E2m1x2, E4m3, E8m0};

/// Elements of a group: the largest number that fits one block in either format.
pub const GROUP: usize = 16;

/// Returns a 128th of the sum of a group's products, without its scale.
///
/// Codes beyond the last activation are ignored.
pub fn fraction<F: Fused>(codes: &[u8], activations: &[f32]) -> f32 {
    let pairs = codes.iter().map(|codes| E2m1x2::from_bits(*codes));
    let weights = pairs.flat_map(|pair| [pair.low(), pair.high()]).map(|code| code.to_f32() / 128.0);
    weights.zip(activations).fold(0.0, |sum, (weight, x)| F::fma(weight, *x, sum))
}

/// Adds an NVFP4 group to a stream's sum. The result is NaN if the scale is.
#[inline(always)]
pub fn add_nvfp4<F: Fused>(sum: f32, fraction: f32, scale: E4m3) -> f32 {
    F::fma(fraction, 2.0 * scale.to_f32(), sum)
}

/// Adds an MXFP4 group to a stream's sum. The result is NaN if the scale is.
#[inline(always)]
pub fn add_mxfp4<F: Fused>(sum: f32, fraction: f32, scale: E8m0) -> f32 {
    match scale.to_bits() {
        255 => f32::NAN,
        // Twice 2^127 is not an f32. If twice the fraction overflows too, the term was already too
        // large.
        254 => F::fma(2.0 * fraction, scale.to_f32(), sum),
        byte => F::fma(fraction, f32::from_bits((u32::from(byte) + 1) << 23), sum),
    }
}

/// Elements of a segment. Its products with activations are added into one f32 sum.
pub const SEGMENT: usize = 256;

/// Factor that undoes the scaling of [`nvfp4_weight`] in a sum.
pub const NVFP4_FACTOR: f64 = 64.0;

/// Largest exponent difference between a row's largest and smallest scale for [`mxfp4_weight`].
///
/// Up to it, every weight is a normal number.
pub const SPAN: u8 = 125;

/// Returns a 64th of a weight under its scale, exactly.
pub fn nvfp4_weight(code: E2m1, scale: E4m3) -> f32 {
    code.to_f32() / 64.0 * scale.to_f32()
}

/// Returns a weight under its scale, divided by the largest scale of the row.
///
/// Exact if at most [`SPAN`] exponents lie between the two scales, or if the code is zero.
pub fn mxfp4_weight(code: E2m1, scale: E8m0, largest: E8m0) -> f32 {
    // Beyond the span, the code is zero.
    let ratio = largest.to_bits().saturating_sub(scale.to_bits()).min(SPAN + 1);
    code.to_f32() * f32::from_bits(u32::from(127 - ratio) << 23)
}

/// Returns the sum of the products of a segment's weights, added in order.
pub fn segment<F: Fused>(weights: &[f32], activations: &[f32]) -> f32 {
    weights.iter().zip(activations).fold(0.0, |sum, (weight, x)| F::fma(*weight, *x, sum))
}

/// Returns γ of many tokens on CPUs, for rows of `cols` elements.
pub fn segments_gamma(cols: usize) -> f64 {
    (SEGMENT + 1 + cols.div_ceil(SEGMENT)) as f64 / f64::from(1 << 24)
}

/// Returns γ of sums by tensor cores, for rows of `cols` elements.
pub fn tensor_core_gamma(cols: usize) -> f64 {
    let k_iterations = cols.div_ceil(128) as f64;
    (2.0 * 8.0 * 18.0 + k_iterations) / f64::from(1 << 24)
}

/// Returns γ of a GEMM by tensor cores, for rows of `cols` elements.
///
/// Each k-iteration of 128 loses as much as one of [`tensor_core_gamma`]. The splits of K are then
/// added, the global scale is applied, and the sum is rounded to f32.
pub fn gemm_gamma(cols: usize) -> f64 {
    let k_iterations = cols.div_ceil(128) as f64;
    (2.0 * 8.0 * 18.0 * k_iterations + k_iterations + 2.0) / f64::from(1 << 24)
}

/// Returns the sum of all streams, times 64.
pub fn total(streams: Sums) -> f64 {
    64.0 * streams.total()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::MulAdd;

    #[test]
    fn a_group_is_a_128th_of_its_sum() {
        // 6 · 2 − 4 · 0.5 + 0.5 · 3 = 11.5. The last code has no activation.
        assert_eq!(fraction::<MulAdd>(&[0xE7, 0x71], &[2.0, 0.5, 3.0]), 11.5 / 128.0);
        assert_eq!(fraction::<MulAdd>(&[0x77; 8], &[f32::MAX; 16]), 0.75 * f32::MAX);
        // Exact down to the smallest bf16.
        let least = f32::from_bits(1 << 16);
        assert_eq!(fraction::<MulAdd>(&[0x01], &[least, 0.0]), least / 256.0);
    }

    #[test]
    fn every_scale_is_doubled() {
        for byte in 0..=254 {
            let scale = E8m0::from_bits(byte);
            let expected = f64::from(0.3125f32) * 2.0 * f64::from(scale.to_f32());
            assert_eq!(add_mxfp4::<MulAdd>(0.0, 0.3125, scale), expected as f32);
        }
        for byte in 0..=0x7E {
            let scale = E4m3::from_bits(byte);
            assert_eq!(add_nvfp4::<MulAdd>(1.0, 0.5, scale), 1.0 + scale.to_f32());
        }
        assert!(add_mxfp4::<MulAdd>(0.0, 0.0, E8m0::NAN).is_nan());
        assert!(add_nvfp4::<MulAdd>(0.0, 0.0, E4m3::NAN).is_nan());
    }

    #[test]
    fn the_total_is_64_times_the_streams() {
        assert_eq!(total(Sums::of([0.25; crate::dot::STREAMS])), 512.0);
    }
}
