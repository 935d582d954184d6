//! Inputs and comparisons.

use microscale::formats::mxfp4::Arithmetic;
use microscale::formats::{NegativeZero, ScaleRule, Ties};
use microscale::gpu::Gpu;
use microscale::{Element, Format, NonFinite, Quantized, Recipe, Shape, Words, quantize};

/// Random bit patterns in which a few rows of every magnitude, zeros, subnormals and non-finite values all occur.
pub(crate) fn patterns<T: Element>(elements: usize, non_finite: bool, seed: u64) -> Vec<T> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut values = Vec::with_capacity(elements);
    while values.len() < elements {
        // A stretch shares a magnitude, so that blocks with ordinary amax / element ratios occur at every exponent.
        let exponent = rng.i32(-149..=127);
        let kind = rng.u32(0..8);
        for _ in 0..rng.usize(1..=40) {
            values.push(one(&mut rng, exponent, kind, non_finite));
        }
    }
    values.truncate(elements);
    values
}

fn one<T: Element>(rng: &mut fastrand::Rng, exponent: i32, kind: u32, non_finite: bool) -> T {
    let mantissa = 1.0 + f64::from(rng.u32(0..64)) / 64.0;
    let magnitude = mantissa * 2f64.powi(exponent - rng.i32(0..6));
    let wide = match kind {
        0 if rng.bool() => 0.0,
        1 => f64::from(f32::from_bits(rng.u32(..))),
        _ => magnitude,
    };
    let value = T::from_f32(if rng.bool() { wide as f32 } else { -wide as f32 });
    if non_finite && rng.u32(0..200) == 0 {
        return T::from_f32([f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rng.usize(0..3)]);
    }
    if non_finite || value.to_f32().is_finite() { value } else { T::from_f32(1.0) }
}

/// Every recipe that cannot refuse.
pub(crate) fn recipes() -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for (_, scale_rule) in ScaleRule::WORDS {
        for (_, ties) in Ties::WORDS {
            for (_, negative_zero) in NegativeZero::WORDS {
                for non_finite in [NonFinite::Propagate, NonFinite::Saturate] {
                    let arithmetic =
                        Arithmetic { scale_rule: *scale_rule, ties: *ties, negative_zero: *negative_zero };
                    recipes.push(Recipe { format: Format::Mxfp4, arithmetic, non_finite });
                }
            }
        }
    }
    recipes
}

/// Asserts that a result is the CPU's, naming the first block that is not.
pub(crate) fn assert_is_cpus<T: Element>(found: &Quantized, values: &[T], shape: Shape, recipe: &Recipe) {
    let expected = quantize(values, shape, recipe).expect("the CPU quantizes");
    let what = format!("{} {shape:?} {recipe:?}", T::DTYPE.word());
    for (block, (ours, cpus)) in found.tensor.scales().iter().zip(expected.tensor.scales()).enumerate() {
        assert_eq!(ours, cpus, "scale of block {block}: {what}");
    }
    let blocks = found.tensor.codes().chunks(16).zip(expected.tensor.codes().chunks(16));
    for (block, (ours, cpus)) in blocks.enumerate() {
        assert_eq!(ours, cpus, "codes of block {block}: {what}");
    }
    assert_eq!(found, &expected, "{what}");
}

/// Quantizes on the GPU from host memory and compares.
pub(crate) fn check<T: Element>(gpu: &Gpu, values: &[T], shape: Shape, recipe: &Recipe) {
    let found = gpu.quantize(values, shape, recipe).expect("the GPU quantizes");
    assert_is_cpus(&found, values, shape, recipe);
}

/// Shapes with whole and cut blocks, aligned and odd rows, gaps, and more than a thread block's worth.
pub(crate) const SHAPES: [Shape; 14] = [
    Shape::new(1, 1),
    Shape::new(1, 31),
    Shape::new(3, 32),
    Shape::new(2, 33),
    Shape::new(5, 64),
    Shape::new(7, 100),
    Shape::new(4, 104),
    Shape::new(1000, 8),
    Shape::new(333, 40).with_row_stride(48),
    Shape::new(65, 96).with_row_stride(97),
    Shape::new(129, 256).with_row_stride(272),
    Shape::new(3, 4096),
    Shape::new(2, 4097),
    Shape::new(17, 1056),
];
