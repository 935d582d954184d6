//! Quantized activations on every instruction set, and bounds of row operations.

use microscale::cpu::{Isa, quantize_activations_with};
use microscale::formats::Ties;
use microscale::formats::activations::{GROUP, LEAST_GROUP_AMAX, SUM_PIECE};
use microscale::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationRecipe, Fp8Scale, QuantizedActivations,
    Result, Shape,
};

use crate::oracle::{E4M3, Exact, e4m3_value, nearest, power_of_two};

/// Half the distance of 1 to the next f32: the relative error of one rounding.
pub const U: f64 = 1.0 / (1 << 24) as f64;

/// FP8 with a scale per group.
pub const PER_GROUP: Fp8Scale = Fp8Scale::PerGroup { power_of_two: false };

/// Returns a recipe of FP8 without an operation.
pub const fn fp8(scale: Fp8Scale) -> ActivationRecipe {
    ActivationRecipe::new(ActivationFormat::Fp8(scale))
}

/// The parts of an input besides its values.
#[derive(Debug)]
pub struct Parts<'a, T> {
    /// The residual, before it is replaced.
    pub residual: Option<&'a [T]>,
    /// RMSNorm's weights.
    pub weights: Option<&'a [T]>,
    /// Given scales.
    pub scales: &'a [f32],
    /// Rows by expert.
    pub experts: Option<ActivationExperts<'a>>,
}

impl<T> Default for Parts<'_, T> {
    fn default() -> Self {
        Self { residual: None, weights: None, scales: &[], experts: None }
    }
}

/// Quantizes with every instruction set, and returns the result and the residual.
///
/// # Errors
/// Returns the errors of [`quantize_activations_with`].
///
/// # Panics
/// Panics if instruction sets give different results.
pub fn quantized<T: Exact>(
    values: &[T],
    shape: Shape,
    recipe: &ActivationRecipe,
    parts: &Parts<'_, T>,
) -> Result<(QuantizedActivations, Option<Vec<T>>)> {
    let mut results = Isa::available().map(|isa| {
        let mut residual = parts.residual.map(<[T]>::to_vec);
        let input = ActivationInput {
            values,
            shape,
            residual: residual.as_deref_mut(),
            weights: parts.weights,
            scales: parts.scales,
            experts: parts.experts,
        };
        let result = quantize_activations_with(isa, input, recipe);
        (isa, result.map(|result| (result, residual)))
    });
    let (_, first) = results.next().expect("an instruction set");
    for (isa, result) in results {
        match (&first, &result) {
            (Ok(first), Ok(result)) => {
                assert_eq!(result.0, first.0, "{isa:?}, {shape:?}, {recipe:?}");
                assert_eq!(bits(&result.1), bits(&first.1), "{isa:?}, {recipe:?}: residual");
            }
            (Err(first), Err(error)) => assert_eq!(first.to_string(), error.to_string(), "{isa:?}"),
            _ => panic!("{isa:?}, {shape:?}, {recipe:?}: {result:?}, not {first:?}"),
        }
    }
    first
}

/// Returns the bits, and one pattern for all NaN.
fn bits<T: Exact>(values: &Option<Vec<T>>) -> Option<Vec<u32>> {
    let of = |value: &T| if value.to_f64().is_nan() { u32::MAX } else { value.bits() };
    values.as_ref().map(|values| values.iter().map(of).collect())
}

/// Bounds of a value.
#[derive(Clone, Copy, Debug)]
pub struct Within {
    /// The least value.
    pub low: f64,
    /// The largest value.
    pub high: f64,
}

impl Within {
    /// Returns the bounds of a value with an error.
    pub fn around(value: f64, error: f64) -> Self {
        Self { low: value - error, high: value + error }
    }

    /// Returns the neighbours of a number.
    pub fn neighbours<T: Exact>(value: T) -> Self {
        let bits = value.bits();
        let magnitude = bits & !(1 << (T::BITS - 1));
        let far = T::of_bits(magnitude + 1).to_f64();
        let near = if magnitude == 0 { -far } else { T::of_bits(magnitude - 1).to_f64() };
        let (low, high) = (near.min(far), near.max(far));
        if magnitude == bits { Self { low, high } } else { Self { low: -high, high: -low } }
    }

    fn magnitudes(self) -> (f64, f64) {
        let (low, high) = (self.low.abs(), self.high.abs());
        (if self.low * self.high <= 0.0 { 0.0 } else { low.min(high) }, low.max(high))
    }
}

/// Returns the value of the code that is nearest to a quotient.
pub fn rounded(quotient: f64) -> f64 {
    e4m3_value(nearest(&E4M3, quotient.abs(), Ties::Even)) * if quotient < 0.0 { -1.0 } else { 1.0 }
}

/// Asserts that FP8 codes and scales per group are possible for rows of values within bounds.
///
/// Quotients and scales may have one more rounding to f32 each. Returns the share of elements of
/// which the bounds leave more than one code.
pub fn assert_within(found: &QuantizedActivations, within: &[Within], columns: usize, what: &str) -> f64 {
    assert_eq!(found.codes.len(), within.len(), "{what}");
    let groups = columns.div_ceil(GROUP);
    assert_eq!(found.f32_scales.len(), within.len() / columns * groups, "{what}");
    let mut loose = 0;
    for (row, (codes, within)) in found.codes.chunks(columns).zip(within.chunks(columns)).enumerate() {
        for (group, (codes, within)) in codes.chunks(GROUP).zip(within.chunks(GROUP)).enumerate() {
            let scale = f64::from(found.f32_scales[row * groups + group]);
            let of = |amax: f64| amax.max(f64::from(LEAST_GROUP_AMAX)) / 448.0;
            let least = within.iter().map(|value| value.magnitudes().0).fold(0.0, f64::max);
            let most = within.iter().map(|value| value.magnitudes().1).fold(0.0, f64::max);
            let fits = of(least) * (1.0 - 2.0 * U) <= scale && scale <= of(most) * (1.0 + 2.0 * U);
            assert!(fits, "{what}: row {row}, group {group}: {scale:e} for {least:e} to {most:e}");
            for (column, (code, value)) in codes.iter().zip(within).enumerate() {
                let margin = |value: f64| 2.0 * U * (value / scale).abs();
                let low = rounded(value.low / scale - margin(value.low));
                let high = rounded(value.high / scale + margin(value.high));
                let code = e4m3_value(*code);
                let at = || format!("{what}: row {row}, column {}", group * GROUP + column);
                assert!(low <= code && code <= high, "{}: {code} for {value:?} / {scale:e}", at());
                loose += usize::from(low != high);
            }
        }
    }
    loose as f64 / within.len() as f64
}

/// Returns the bound of a gate's error.
///
/// `argument` is the sigmoid's, with an error of `roundings` roundings, which are constants' too.
/// A relative error of the sigmoid results, as e^x has the derivative e^x. Far above 0 the sigmoid
/// is 1. The sigmoid itself is within 2^−21.5 or 2^−125, and four operations are rounded. Products
/// may be subnormal.
pub fn gate_error(expected: f64, gate: f64, up: f64, argument: f64, roundings: f64) -> f64 {
    let of_argument = if argument > 30.0 { U } else { roundings * U * argument.abs() };
    let relative = 2f64.powf(-21.5) + 4.0 * U + of_argument;
    expected.abs() * relative * 1.01
        + power_of_two(-125) * 1.01 * gate.abs() * up.abs()
        + power_of_two(-149) * (2.0 + up.abs())
}

/// Returns Φ(x) = (1 + erf(x / √2)) / 2, with a relative error of about 10^−14.
pub fn normal_cdf(x: f64) -> f64 {
    let a = x.abs();
    let density = (-a * a / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let tail = if a < 2.0 {
        // Φ(a) − 1/2 is the density times a + a³/3 + a⁵/(3 · 5) + …
        let terms = (1..60).scan(a, |term, i| {
            *term *= a * a / f64::from(2 * i + 1);
            Some(*term)
        });
        0.5 - density * (a + terms.sum::<f64>())
    } else {
        // The density over a + 1 / (a + 2 / (a + 3 / …)).
        density / (1..250).rev().fold(a, |below, i| a + f64::from(i) / below)
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Returns the bound of the error of Φ in f32.
pub fn normal_cdf_error(expected: f64) -> f64 {
    (expected * power_of_two(-21)).max(power_of_two(-125))
}

/// Returns the bound of the error of GELU times `up`: of Φ, and of two products, which may be
/// subnormal.
pub fn gelu_error(gate: f64, up: f64) -> f64 {
    let cdf = normal_cdf(gate);
    let expected = (up * gate * cdf).abs();
    ((up * gate).abs() * normal_cdf_error(cdf) + 2.0 * U * expected) * 1.01
        + power_of_two(-149) * (2.0 + up.abs())
}

/// Returns the bound of the relative error of RMSNorm in f32, before its rounding to T.
///
/// `sum` is the number of roundings on the path of an element through the sum of squares. With
/// 1 / K, the product and the addition of ε they count half, because of the root. The root, the
/// reciprocal, and three operations of an element follow.
pub fn norm_error(sum: usize) -> f64 {
    ((sum as f64 + 3.0) / 2.0 + 5.0) * U * 1.01
}

/// Roundings of the documented sum of squares: four squares, a tree of 256, and pieces.
pub fn sum_roundings(columns: usize) -> usize {
    4 + 8 + columns.div_ceil(SUM_PIECE)
}
