//! What quantizing and dequantizing do together.

use half::{bf16, f16};
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::{NonFinite, Recipe, Shape, dequantize, quantize};
use microscale_tests::oracle::{BLOCK, Exact, MAGNITUDES, power_of_two};
use proptest::prelude::*;

use super::inputs::{Matrix, matrix, recipe, runs};

/// With `floor`, amax lies in [4, 8) scales, so its code is 4 or 6 and amax of the dequantized block in [4, 8) scales
/// too: the scale is found again, and with it every code, clipped ones included. At the clamped scale 2^−127 amax only
/// shrinks, and the scale stays clamped.
///
/// With `even`, amax lies in [3.5, 7) scales and its code is 4 or 6 (unless the tie 3.5 goes down): the same, except
/// where 4·2^126 is beyond the type.
///
/// −0 survives if it is kept, and if none is ever written.
fn is_repeatable(recipe: &Recipe) -> bool {
    let arithmetic = &recipe.arithmetic;
    let scale = match arithmetic.scale_rule {
        ScaleRule::Floor => true,
        ScaleRule::Even => arithmetic.ties != Ties::Zero,
        ScaleRule::Ceil | ScaleRule::Rceil => false,
    };
    scale && matches!(arithmetic.negative_zero, NegativeZero::Keep | NegativeZero::Drop)
}

/// The whole tensor fits into `T` exactly, and nothing in it is NaN.
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

/// The difference is at most half a step at the element's magnitude, times the scale; exactly, for the scale in f64 and
/// values as they are. Elements beyond 6 scales give ±6.
fn assert_error_bound<T: Exact>(matrix: &Matrix<T>, recipe: &Recipe) {
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..*recipe };
    let quantized = quantize(&matrix.values, matrix.shape, &recipe).expect("nothing is refused");
    let Shape { rows, cols, row_stride } = matrix.shape;
    let mut clipped = vec![false; quantized.tensor.scales().len()];
    let back: Vec<f32> = dequantize(&quantized.tensor);
    for (index, back) in back.into_iter().map(f64::from).enumerate() {
        let (row, col) = (index / cols, index % cols);
        let block = row * quantized.tensor.blocks_per_row() + col / BLOCK;
        let value = matrix.values[row * row_stride + col].to_f64();
        if quantized.tensor.scales()[block] == 255 || !back.is_finite() {
            continue;
        }
        let scale = power_of_two(i32::from(quantized.tensor.scales()[block]) - 127);
        let magnitude = value.abs() / scale;
        if magnitude > 6.0 {
            clipped[block] = true;
            assert_eq!(back, 6f64.copysign(value) * scale);
            continue;
        }
        let upper = MAGNITUDES.iter().position(|v| *v >= magnitude).expect("at most 6").max(1);
        let half_step = (MAGNITUDES[upper] - MAGNITUDES[upper - 1]) / 2.0;
        assert!((value - back).abs() <= scale * half_step, "{value:e} became {back:e}, scale {scale:e}");
    }
    let clipped = clipped.into_iter().filter(|clipped| *clipped).count() as u64;
    assert_eq!((quantized.report.clipped_blocks, rows), (clipped, rows));
}

proptest! {
    #![proptest_config(runs(1000))]

    #[test]
    fn a_dequantized_tensor_gives_its_codes_again(
        f32s in matrix::<f32>(),
        f16s in matrix::<f16>(),
        bf16s in matrix::<bf16>(),
        recipe in recipe().prop_filter("repeatable", is_repeatable),
    ) {
        assert_repeatable(&f32s, &recipe);
        assert_repeatable(&f16s, &recipe);
        assert_repeatable(&bf16s, &recipe);
    }

    #[test]
    fn the_error_is_at_most_half_a_step(
        f32s in matrix::<f32>(),
        f16s in matrix::<f16>(),
        bf16s in matrix::<bf16>(),
        recipe in recipe(),
    ) {
        assert_error_bound(&f32s, &recipe);
        assert_error_bound(&f16s, &recipe);
        assert_error_bound(&bf16s, &recipe);
    }
}

/// `ceil` and `rceil` clip nothing that is not beyond the largest scale's reach; `rceil` is the smallest that does not.
#[test]
fn ceil_and_rceil_never_clip() {
    let mut rng = fastrand::Rng::with_seed(10);
    let values: Vec<f32> = (0..1 << 16).map(|_| f32::from_bits(rng.u32(..0x7F80_0000))).collect();
    for scale_rule in [ScaleRule::Ceil, ScaleRule::Rceil] {
        let mut recipe = Recipe::default();
        recipe.arithmetic.scale_rule = scale_rule;
        // A block an element: the others are padding.
        let quantized = quantize(&values, Shape::new(values.len(), 1), &recipe).expect("finite");
        assert_eq!(quantized.report.clipped_blocks, 0, "{scale_rule:?}");
        for (value, scale) in values.iter().zip(quantized.tensor.scales()) {
            let half_scale = power_of_two(i32::from(*scale) - 128);
            let smaller_would_clip = f64::from(*value) > 6.0 * half_scale;
            assert!(scale_rule == ScaleRule::Ceil || *scale == 0 || smaller_would_clip, "{value:e}");
        }
    }
}
