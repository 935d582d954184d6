//! Tests that each scale rule has its known error on normal data, and that sums are right.

use approx::assert_relative_eq;
use microscale::formats::ScaleRule;
use microscale::formats::mx::Arithmetic;
use microscale::{ErrorStats, Recipe, Scheme, Shape, Words, dequantize, quantize};

/// Returns N(0, 1) by Box and Muller.
fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let one = || {
        let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * rng.f64()).cos()) as f32
    };
    std::iter::repeat_with(one).take(count).collect()
}

#[test]
fn scale_rules_have_their_known_loss_on_normal_data() {
    let shape = Shape::new(1 << 10, 1 << 10);
    let values = normal(shape.elements(), 11);
    for scale_rule in ScaleRule::values() {
        let known = match scale_rule {
            ScaleRule::Floor => 0.01329,
            ScaleRule::Rceil => 0.01322,
            ScaleRule::Even => 0.01250,
            ScaleRule::Ceil => 0.02067,
        };
        let arithmetic = Arithmetic { scale_rule, ..Arithmetic::default() };
        let recipe = Recipe { scheme: Scheme::Mxfp4(arithmetic), ..Recipe::default() };
        let tensor = quantize(&values, shape, &recipe).expect("finite").tensor;
        let stats = ErrorStats::of_quantized(&values, shape, &tensor).expect("the tensor is of the shape");
        assert_relative_eq!(stats.relative_squared_error(), known, max_relative = 0.02);
        // In general, no scale has less than 0.01246.
        assert!(stats.relative_squared_error() > 0.01246 * 0.98, "{scale_rule:?}");
    }
}

#[test]
fn figures_equal_plain_sums() {
    let shape = Shape::new(37, 1111);
    let mut values = normal(37 * 1200, 12);
    let shape = shape.with_row_stride(1200);
    (values[5], values[1200]) = (f32::NAN, f32::INFINITY);
    let recipe = Recipe { non_finite: microscale::NonFinite::Saturate, ..Recipe::default() };
    let tensor = quantize(&values, shape, &recipe).expect("nothing is refused").tensor;
    let back: Vec<f32> = dequantize(&tensor);
    let original: Vec<f32> = values.chunks(1200).flat_map(|row| &row[..1111]).copied().collect();

    let pairs = original.iter().zip(&back).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let pairs: Vec<(f64, f64)> = pairs.filter(|(a, b)| a.is_finite() && b.is_finite()).collect();
    let sum = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>();
    let (signal, noise) = (sum(|(a, _)| a * a), sum(|(a, b)| (a - b) * (a - b)));
    let cosine = sum(|(a, b)| a * b) / (signal * sum(|(_, b)| b * b)).sqrt();
    let max_abs = pairs.iter().fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));

    let whole = ErrorStats::of_quantized(&values, shape, &tensor).expect("the tensor is of the shape");
    for stats in [whole, ErrorStats::between(&original, &back)] {
        assert_eq!((stats.elements(), stats.non_finite()), (37 * 1111 - 2, 2));
        assert_relative_eq!(stats.relative_squared_error(), noise / signal, max_relative = 1e-10);
        assert_relative_eq!(stats.sqnr_db(), 10.0 * (signal / noise).log10(), max_relative = 1e-10);
        assert_relative_eq!(stats.cosine(), cosine, max_relative = 1e-10);
        assert_eq!(stats.max_abs_error(), max_abs);
    }
}
