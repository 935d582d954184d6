//! Quantizing activations: the row operations before it, and FP8 with f32 scales.
//!
//! Serving stacks quantize the input of every product. A fused quantizer first computes a row by
//! [`RmsNorm`] or a [`Glu`](crate::gate::Glu), rounds each result to the dtype T of the input, and
//! quantizes the rounded row. So it gives the bytes of separate kernels that pass the row in T.
//!
//! Block formats quantize as for weights: [`mx`](crate::mx) and [`nvfp4`](crate::nvfp4). FP8 has
//! [`E4m3`] codes and f32 scales, which multiply codes:
//!
//! | scales | rule | source |
//! |---|---|---|
//! | one | given | vLLM's `scaled_fp8_quant` with a scale, which multiplies by 1 / scale instead |
//! | per token | [`token_scale`] | vLLM's `scaled_fp8_quant`, dynamic per token |
//! | per tensor | [`token_scale`] | vLLM's `scaled_fp8_quant`, dynamic, which has no least scale |
//! | per [`GROUP`] columns | [`group_scale`] | DeepSeek-V3; vLLM's `per_token_group_quant_fp8` |
//!
//! amax is the largest finite magnitude. NaN and infinities become NaN codes, and do not change the
//! codes of other elements.

use crate::arithmetic::Fused;
use crate::fp8::E4m3;

/// Columns that share a scale in FP8 with scales per group.
pub const GROUP: usize = 128;

/// The smallest scale of a token: 1 / (448 · 512), as in vLLM.
pub const LEAST_TOKEN_SCALE: f32 = 1.0 / (E4m3::MAX * 512.0);

/// The smallest amax of a group, as in vLLM and DeepGEMM.
pub const LEAST_GROUP_AMAX: f32 = 1e-10;

/// Returns the FP8 scale of a token or a tensor: amax / 448, at least [`LEAST_TOKEN_SCALE`].
///
/// It does not decrease with amax: the largest scale of a tensor's rows is the tensor's.
#[inline(always)]
pub fn token_scale(amax: f32) -> f32 {
    (amax / E4m3::MAX).max(LEAST_TOKEN_SCALE)
}

/// Returns the FP8 scale of a group: amax / 448, where amax is at least [`LEAST_GROUP_AMAX`].
///
/// With `power_of_two` it is rounded up to a power of two, of at least 2^−33. Blackwell's products
/// read such scales as E8M0. `by_most` divides by 448.
#[inline(always)]
pub fn group_scale(amax: f32, power_of_two: bool, by_most: impl Fn(f32) -> f32) -> f32 {
    let scale = by_most(amax.max(LEAST_GROUP_AMAX));
    if !power_of_two {
        return scale;
    }
    let bits = scale.max(LEAST_GROUP_AMAX).to_bits();
    f32::from_bits(bits.wrapping_add(0x007F_FFFF) & 0x7F80_0000)
}

/// Returns the FP8 code of an element: x / scale in f32, rounded to [`E4m3`].
///
/// Quotients beyond ±448 saturate. NaN and infinities become NaN.
#[inline(always)]
pub fn encode_fp8(x: f32, scale: f32) -> E4m3 {
    if x.is_finite() { E4m3::from_f32(x / scale) } else { E4m3::NAN }
}

/// f32 operations that [`Fused`] lacks, each rounded once.
pub trait SquareRoot: Fused {
    /// √x
    fn sqrt(x: f32) -> f32;
}

/// Columns that a warp sums at a time: [`SUM_STEPS`] times [`SUM_COLUMNS`].
pub const SUM_PIECE: usize = SUM_COLUMNS * SUM_STEPS;
/// Partial sums of a piece.
pub const SUM_COLUMNS: usize = 256;
/// Elements of a partial sum.
pub const SUM_STEPS: usize = 4;

/// RMSNorm: x · (1 / √(mean(x²) + ε)) · (weight + offset).
///
/// All operations are in f32, and the result is rounded to the dtype T of the input.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct RmsNorm {
    /// ε, added to the mean of squares.
    pub epsilon: f32,
    /// Added to each weight: 1 in Gemma, otherwise 0.
    pub offset: f32,
    /// 1 to round x · (1 / √…) to T before the multiplication by the weight, as Llama's code in
    /// transformers and vLLM's kernels do. 0 to round only the result, as FlashInfer and Gemma do.
    pub rounds_before_weight: u32,
}

impl RmsNorm {
    /// RMSNorm of Llama, Qwen and DeepSeek, as in transformers and vLLM.
    pub const fn llama(epsilon: f32) -> Self {
        Self { epsilon, offset: 0.0, rounds_before_weight: 1 }
    }

    /// RMSNorm of Gemma.
    pub const fn gemma(epsilon: f32) -> Self {
        Self { epsilon, offset: 1.0, rounds_before_weight: 0 }
    }

    /// RMSNorm as FlashInfer computes it.
    pub const fn flashinfer(epsilon: f32) -> Self {
        Self { epsilon, offset: 0.0, rounds_before_weight: 0 }
    }

    /// Returns 1 / √(sum · (1 / columns) + ε), for a row's [`sum_of_squares`].
    ///
    /// `inverse_columns` is 1 / columns in f32.
    #[inline(always)]
    pub fn inverse_rms<F: SquareRoot>(&self, sum: f32, inverse_columns: f32) -> f32 {
        1.0 / F::sqrt(sum * inverse_columns + self.epsilon)
    }

    /// Returns the result for one element before its last rounding to T.
    ///
    /// `narrow` rounds to T. Without a weight nothing is multiplied.
    #[inline(always)]
    pub fn of(&self, x: f32, inverse_rms: f32, weight: Option<f32>, narrow: impl Fn(f32) -> f32) -> f32 {
        let normalized = x * inverse_rms;
        let normalized = if self.rounds_before_weight != 0 { narrow(normalized) } else { normalized };
        weight.map_or(normalized, |weight| normalized * (weight + self.offset))
    }
}

/// Returns the sum of squares of a row, in the order of a GPU's warps.
///
/// A piece of [`SUM_PIECE`] columns has [`SUM_COLUMNS`] partial sums. Each sums [`SUM_STEPS`]
/// squares, [`SUM_COLUMNS`] columns apart, by fused multiply-adds. Partial sums are added as a
/// binary tree of neighbours, and pieces in order.
pub fn sum_of_squares<F: Fused>(columns: usize, x: impl Fn(usize) -> f32) -> f32 {
    let mut sum = 0.0;
    let mut start = 0;
    while start < columns {
        let mut partial = [0.0; SUM_COLUMNS];
        for column in start..columns.min(start + SUM_PIECE) {
            let x = x(column);
            let partial = &mut partial[(column - start) % SUM_COLUMNS];
            *partial = F::fma(x, x, *partial);
        }
        sum += tree_sum(&mut partial);
        start += SUM_PIECE;
    }
    sum
}

/// Adds the partial sums of a piece as a binary tree of neighbours.
#[inline(always)]
pub fn tree_sum(partial: &mut [f32; SUM_COLUMNS]) -> f32 {
    let mut width = SUM_COLUMNS / 2;
    while width > 0 {
        for i in 0..width {
            partial[i] = partial[2 * i] + partial[2 * i + 1];
        }
        width /= 2;
    }
    partial[0]
}

/// Multiplies a vector by the orthonormal Hadamard matrix of its length, 16 to 128.
///
/// Sums and differences of elements 1, 2, 4, … apart are rounded to f32, and the result is
/// multiplied by 1 / √length. The matrix is its own inverse.
#[inline(always)]
pub fn hadamard(values: &mut [f32]) {
    let mut distance = 1;
    while distance < values.len() {
        for i in (0..values.len()).filter(|i| i & distance == 0) {
            let (a, b) = (values[i], values[i + distance]);
            (values[i], values[i + distance]) = (a + b, a - b);
        }
        distance *= 2;
    }
    let factor = hadamard_factor(values.len());
    for value in values {
        *value *= factor;
    }
}

/// Returns 1 / √`width`, rounded to f32, for a power of two.
#[inline(always)]
pub const fn hadamard_factor(width: usize) -> f32 {
    let log2 = width.trailing_zeros();
    let half = f32::from_bits((127 - log2 / 2) << 23);
    if log2.is_multiple_of(2) { half } else { half * core::f32::consts::FRAC_1_SQRT_2 }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;
    use crate::arithmetic::MulAdd;

    impl SquareRoot for MulAdd {
        fn sqrt(x: f32) -> f32 {
            x.sqrt()
        }
    }

    #[test]
    fn scales_of_groups_round_up_to_powers_of_two() {
        for bits in (0..f32::INFINITY.to_bits()).step_by(99_991) {
            let amax = f32::from_bits(bits);
            let [exact, rounded] = [false, true].map(|round| group_scale(amax, round, |x| x / E4m3::MAX));
            assert_eq!(rounded.to_bits() & 0x007F_FFFF, 0);
            assert!(rounded >= exact);
            assert!(rounded == 2f32.powi(-33) || rounded < 2.0 * exact, "{amax:e}");
        }
    }

    #[test]
    fn fp8_codes_of_values_that_are_not_finite_are_nan() {
        for x in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(encode_fp8(x, 1.0).is_nan());
        }
        assert_eq!(encode_fp8(-1e9, 1.0).to_f32(), -448.0);
    }

    /// The error of γ(n) = n · u / (1 − n · u) for the additions on the path of an element.
    #[test]
    fn sums_of_squares_are_within_the_bound_of_their_tree() {
        for columns in [1_usize, 255, 256, 1024, 1025, 5000, 14336] {
            let x: Vec<f32> = (0..columns).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.37).collect();
            let right: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let operations = (SUM_STEPS + 8 + columns.div_ceil(SUM_PIECE)) as f64;
            let found = f64::from(sum_of_squares::<MulAdd>(columns, |i| x[i]));
            assert!((found - right).abs() <= operations * 2f64.powi(-24) * 1.001 * right, "{columns}");
        }
    }

    #[test]
    fn rows_of_equal_values_normalize_to_their_weights() {
        let norm = RmsNorm::flashinfer(0.0);
        let sum = sum_of_squares::<MulAdd>(2048, |_| 4.0);
        let inverse = norm.inverse_rms::<MulAdd>(sum, 1.0 / 2048.0);
        assert_eq!(norm.of(4.0, inverse, Some(0.75), |x| x), 0.75);
        assert_eq!(RmsNorm::gemma(0.0).of(4.0, inverse, Some(0.75), |x| x), 1.75);
    }

    #[test]
    fn hadamard_is_its_own_inverse_and_preserves_the_norm() {
        for width in [16, 32, 64, 128] {
            let before: Vec<f32> = (0..width).map(|i| (i * i % 23) as f32 - 11.0).collect();
            let mut values = before.clone();
            hadamard(&mut values);
            let norm = |values: &[f32]| values.iter().map(|x| f64::from(x * x)).sum::<f64>();
            assert!((norm(&values) / norm(&before) - 1.0).abs() < 1e-6);
            hadamard(&mut values);
            for (found, right) in values.iter().zip(&before) {
                assert!((found - right).abs() < 1e-4, "{width}");
            }
        }
    }
}
