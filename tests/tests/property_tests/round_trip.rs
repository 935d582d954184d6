//! Tests properties of quantization followed by dequantization.

use half::{bf16, f16};
use microscale::formats::mx::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{Format, GlobalScale, NonFinite, Recipe, ScaleLayout, Scheme, Shape, dequantize, quantize};
use microscale_test_support::oracle::{self, E4M3, E5M2, Exact, MAGNITUDES, power_of_two};
use proptest::prelude::*;

use super::inputs::{Case, Matrix, case, matrix, mxfp4_recipe, runs};

/// Returns whether requantizing a dequantized tensor gives the same codes.
///
/// With `floor`, amax is in [4, 8) scales. Its code is 4 or 6, so amax of the dequantized block is
/// in [4, 8) scales too. The same scale results, and every code with it, including clipped ones. At
/// the clamped scale 2^−127 amax can only shrink, and the scale stays clamped.
///
/// With `even`, amax is in [3.5, 7) scales and its code is 4 or 6 (unless the tie 3.5 goes down).
/// The same holds, except where 4·2^126 is beyond the type.
///
/// −0 survives if it is preserved, or if it is never written.
fn is_repeatable(recipe: &Recipe) -> bool {
    let Scheme::Mxfp4(arithmetic) = recipe.scheme else { return false };
    let scale = match arithmetic.scale_rule {
        ScaleRule::Floor => true,
        ScaleRule::Even => arithmetic.ties != Ties::Zero,
        ScaleRule::Ceil | ScaleRule::Rceil => false,
    };
    scale && matches!(arithmetic.negative_zero, NegativeZero::Keep | NegativeZero::Drop)
}

/// Requires that the whole tensor is exact in `T` and contains no NaN.
fn assert_repeatable<T: Exact>(matrix: &Matrix<T>, recipe: &Recipe) {
    let recipe = Recipe { non_finite: NonFinite::Saturate, ..*recipe };
    let first = quantize(&matrix.values, matrix.shape, &recipe).expect("nothing is refused").tensor;
    let back: Vec<T> = dequantize(&first);
    let exact: Vec<f64> = dequantize::<f32>(&first).into_iter().map(f64::from).collect();
    if back.iter().zip(&exact).any(|(v, exact)| v.to_f64() != *exact || !exact.is_finite()) {
        return;
    }
    let shape = Shape::new(matrix.shape.rows, matrix.shape.cols);
    let again = quantize(&back, shape, &recipe).expect("nothing is refused").tensor;
    assert_eq!(again, first);
}

/// Returns the exact factor from code to value of a block: its scale under the global scale.
///
/// Everything is exact in f64 except a division by G, which is off by an f64 rounding.
fn exact_scale(format: Format, byte: u8, global: Option<GlobalScale>) -> f64 {
    match (format, global) {
        (Format::Nvfp4, None) => oracle::e4m3_value(byte),
        (Format::Nvfp4, Some(GlobalScale::Divisor(divisor))) => oracle::e4m3_value(byte) / f64::from(divisor),
        (Format::Nvfp4, Some(GlobalScale::Multiplier(multiplier))) => {
            oracle::e4m3_value(byte) * f64::from(multiplier)
        }
        _ => oracle::mx::scale_value(byte),
    }
}

/// Asserts that the error is at most half a step at the element's magnitude, times the scale.
///
/// Elements beyond the largest give the largest. For the MX formats this is exact in f64. NVFP4
/// rounds to f32 up to five times, and `slack` allows for that, relative to the element.
fn assert_error_bound<T: Exact>(Case { matrix, recipe }: &Case<T>) {
    let recipe = Recipe { non_finite: NonFinite::Propagate, scale_layout: ScaleLayout::Linear, ..*recipe };
    let format = recipe.format();
    let quantized = quantize(&matrix.values, matrix.shape, &recipe).expect("nothing is refused");
    let (magnitudes, slack): (&[f64], f64) = match format {
        Format::Mxfp4 => (&MAGNITUDES, 0.0),
        Format::Nvfp4 => (&MAGNITUDES, 5.0 * power_of_two(-24)),
        Format::Mxfp8E4m3 => (&E4M3, 0.0),
        Format::Mxfp8E5m2 => (&E5M2, 0.0),
        Format::Comparison(_) => unreachable!("tested by `comparison`"),
    };
    let largest = magnitudes[magnitudes.len() - 1];
    let Shape { cols, .. } = matrix.shape;
    let mut clipped = vec![false; quantized.tensor.scales().len()];
    let back: Vec<f32> = dequantize(&quantized.tensor);
    let elements = oracle::elements(&matrix.values, matrix.shape);
    for ((at, value), back) in elements.zip(back.into_iter().map(f64::from)) {
        let (value, block) =
            (value.to_f64(), at.row * quantized.tensor.blocks_per_row() + at.col / format.block());
        let byte = quantized.tensor.scales()[block];
        let scale = exact_scale(format, byte, quantized.tensor.global_scale());
        // Relative bounds do not hold for subnormal scales, and under a scale of 0 nothing is left.
        if format.is_nan_scale(byte) || !back.is_finite() || (format == Format::Nvfp4 && scale < 1e-30) {
            continue;
        }
        let magnitude = value.abs() / scale;
        let what = || format!("{value:e} became {back:e}, scale {scale:e}, {at:?} of {cols}, {recipe:?}");
        if magnitude > largest * (1.0 + slack) {
            clipped[block] = true;
            let right = largest.copysign(value) * scale;
            assert!((back - right).abs() <= slack * right.abs(), "{}", what());
            continue;
        }
        let upper = magnitudes.iter().position(|v| *v >= magnitude).unwrap_or(magnitudes.len() - 1).max(1);
        let half_step = (magnitudes[upper] - magnitudes[upper - 1]) / 2.0;
        let bound = scale * (half_step + slack * magnitude) + slack * back.abs();
        assert!((value - back).abs() <= bound, "{}", what());
    }
    let clipped = clipped.into_iter().filter(|clipped| *clipped).count() as u64;
    if format != Format::Nvfp4 {
        assert_eq!(quantized.report.clipped_blocks, clipped, "{recipe:?}");
    }
}

proptest! {
    #![proptest_config(runs(1000))]

    #[test]
    fn requantizing_a_dequantized_tensor_gives_its_codes(
        f32s in matrix::<f32>(),
        f16s in matrix::<f16>(),
        bf16s in matrix::<bf16>(),
        recipe in mxfp4_recipe().prop_filter("repeatable", is_repeatable),
    ) {
        assert_repeatable(&f32s, &recipe);
        assert_repeatable(&f16s, &recipe);
        assert_repeatable(&bf16s, &recipe);
    }

    #[test]
    fn the_error_is_at_most_half_a_step(
        f32s in case::<f32>(),
        f16s in case::<f16>(),
        bf16s in case::<bf16>(),
    ) {
        assert_error_bound(&f32s);
        assert_error_bound(&f16s);
        assert_error_bound(&bf16s);
    }

    /// Flushed blocks dequantize to zeros, and no other nonzero blocks do.
    #[test]
    fn flushed_blocks_dequantize_to_zeros(case in case::<f32>()) {
        let recipe = Recipe { non_finite: NonFinite::Saturate, ..case.recipe };
        let Matrix { values, shape } = &case.matrix;
        let quantized = quantize(values, *shape, &recipe).expect("nothing is refused");
        let back: Vec<f64> = oracle::dequantize(&quantized.tensor);
        let mut alive = std::collections::BTreeMap::new();
        for ((at, value), back) in oracle::elements(values, *shape).zip(&back) {
            let (was, is) = alive.entry((at.row, at.col / recipe.format().block())).or_insert((false, false));
            *was |= value != 0.0 && !value.is_nan();
            *is |= *back != 0.0;
        }
        let flushed = alive.values().filter(|(was, is)| *was && !is).count();
        // An element that underflows in dequantization was not flushed by quantization.
        let underflows = recipe.format() == Format::Nvfp4 && case.matrix.amax() < 1e-30;
        if !underflows {
            prop_assert_eq!(quantized.report.flushed_blocks, flushed as u64, "{:?}", recipe);
        }
    }
}

/// `ceil` and `rceil` never clip within the largest scale's range. `rceil` is the smallest such
/// scale.
#[test]
fn ceil_and_rceil_never_clip() {
    let mut rng = fastrand::Rng::with_seed(10);
    let values: Vec<f32> = (0..1 << 16).map(|_| f32::from_bits(rng.u32(..0x7F80_0000))).collect();
    for scale_rule in [ScaleRule::Ceil, ScaleRule::Rceil] {
        let arithmetic = Arithmetic { scale_rule, ..Arithmetic::default() };
        let recipe = Recipe { scheme: Scheme::Mxfp4(arithmetic), ..Recipe::default() };
        // One block per element. The rest is padding.
        let quantized = quantize(&values, Shape::new(values.len(), 1), &recipe).expect("finite");
        assert_eq!(quantized.report.clipped_blocks, 0, "{scale_rule:?}");
        for (value, scale) in values.iter().zip(quantized.tensor.scales()) {
            let half_scale = power_of_two(i32::from(*scale) - 128);
            let smaller_would_clip = f64::from(*value) > 6.0 * half_scale;
            assert!(scale_rule == ScaleRule::Ceil || *scale == 0 || smaller_would_clip, "{value:e}");
        }
    }
}
