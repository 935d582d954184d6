//! Activations by definition: RMSNorm in the documented order of f32 operations, FP8 with f32
//! scales, and the layouts of block scales. Block formats have their own oracles.

use microscale::formats::activations::RmsNorm;
use microscale::formats::nvfp4::{Arithmetic, Direction};
use microscale::formats::{GlobalScale, NegativeZero, Ties, mx};
use microscale::{
    ActivationFormat, ActivationLayout, ActivationScale, Fp8Scale, Global, NonFinite, Recipe, Scheme, Shape,
};

use super::element::{E4M3, nearest};
use super::{Exact, layout};

/// Columns of a group of FP8.
const GROUP: usize = 128;

/// Quantized rows.
#[derive(Debug, Default, PartialEq)]
pub struct Expected {
    /// Codes.
    pub codes: Vec<u8>,
    /// Block scales in the layout.
    pub scales: Vec<u8>,
    /// Bits of f32 scales.
    pub f32_scales: Vec<u32>,
}

/// Returns x + residual of every element, added in f32 and rounded to T.
pub fn sums<T: Exact>(x: &[T], residual: &[T]) -> Vec<T> {
    x.iter().zip(residual).map(|(x, r)| T::round_f64(f64::from(wide(*x) + wide(*r)))).collect()
}

fn wide<T: Exact>(value: T) -> f32 {
    value.to_f64() as f32
}

/// Adds neighbours, then neighbours of the sums, and so on.
fn tree(numbers: &[f32]) -> f32 {
    match numbers {
        [one] => *one,
        _ => {
            let (left, right) = numbers.split_at(numbers.len() / 2);
            tree(left) + tree(right)
        }
    }
}

/// Returns the sum of squares: pieces of 1024 columns in order, each of 256 partial sums of columns
/// that are 256 apart.
pub fn sum_of_squares(x: &[f32]) -> f32 {
    let of_piece = |piece: &[f32]| {
        let partial = |first: usize| {
            let of_sum = piece.iter().skip(first).step_by(256);
            of_sum.fold(0.0f32, |sum, x| x.mul_add(*x, sum))
        };
        tree(&(0..256).map(partial).collect::<Vec<f32>>())
    };
    x.chunks(1024).map(of_piece).fold(0.0, |sum, piece| sum + piece)
}

/// Returns RMSNorm of a row in T.
pub fn normalized<T: Exact>(x: &[T], weights: Option<&[T]>, norm: RmsNorm) -> Vec<T> {
    let row: Vec<f32> = x.iter().map(|x| wide(*x)).collect();
    let inverse_columns = 1.0 / row.len() as f32;
    let mean = sum_of_squares(&row) * inverse_columns;
    let root = (mean + norm.epsilon).sqrt();
    let inverse = 1.0 / root;
    let narrow = |value: f32| T::round_f64(value.into());
    let of = |(column, x): (usize, &f32)| {
        let product = x * inverse;
        let product = if norm.rounds_before_weight == 1 { wide(narrow(product)) } else { product };
        narrow(match weights {
            None => product,
            Some(weights) => {
                let weight = wide(weights[column]) + norm.offset;
                product * weight
            }
        })
    };
    row.iter().enumerate().map(of).collect()
}

/// Returns the recipe for weights that is the same as a format for activations.
///
/// `given` is NVFP4's global scale. A multiplier stands for its inverse as a divisor.
///
/// # Panics
/// Panics for FP8.
pub fn recipe(format: ActivationFormat, given: Option<f32>) -> Recipe {
    let scheme = match format {
        ActivationFormat::Mxfp8(rule) => Scheme::Mxfp8E4m3(rule),
        ActivationFormat::Mxfp4(scale_rule) => {
            Scheme::Mxfp4(mx::Arithmetic { scale_rule, ties: Ties::Even, negative_zero: NegativeZero::Keep })
        }
        ActivationFormat::Nvfp4(scale) => {
            let global = match (scale, given) {
                (ActivationScale::Given(direction), Some(given)) => {
                    let multiplies = direction == Direction::Multiplier;
                    Global::Given(GlobalScale::Divisor(if multiplies { 1.0 / given } else { given }))
                }
                _ => Global::FromAmax,
            };
            Scheme::Nvfp4(Arithmetic::TRANSFORMER_ENGINE, global)
        }
        ActivationFormat::Fp8(_) => panic!("FP8 has no recipe for weights"),
    };
    Recipe { scheme, non_finite: NonFinite::Propagate, ..Recipe::default() }
}

/// Quantizes rows without an operation. `given` is the given scale.
pub fn quantize<T: Exact>(
    rows: &[T],
    columns: usize,
    format: ActivationFormat,
    layout: ActivationLayout,
    given: Option<f32>,
) -> Expected {
    let mut expected = Expected::default();
    let count = rows.len() / columns;
    for row in rows.chunks(columns) {
        let shape = Shape::new(1, columns);
        match format {
            // One part, below.
            ActivationFormat::Fp8(Fp8Scale::PerTensor) => {}
            ActivationFormat::Fp8(scale) => {
                let width = if matches!(scale, Fp8Scale::PerGroup { .. }) { GROUP } else { columns };
                for part in row.chunks(width) {
                    expected.add_fp8(part, scale, given);
                }
            }
            _ => {
                let made = super::quantize(row, shape, &recipe(format, given));
                expected.codes.extend(made.codes);
                expected.scales.extend(made.scales);
                if format == ActivationFormat::Nvfp4(ActivationScale::PerToken) {
                    let global = made.global_scale.expect("NVFP4 has a global scale");
                    assert_eq!(global.direction(), Direction::Divisor);
                    expected.f32_scales.push((1.0 / global.value()).to_bits());
                }
            }
        }
    }
    if format == ActivationFormat::Fp8(Fp8Scale::PerTensor) {
        expected.add_fp8(rows, Fp8Scale::PerTensor, None);
    }
    expected.scales = match layout {
        _ if matches!(format, ActivationFormat::Fp8(_)) => Vec::new(),
        ActivationLayout::Linear => expected.scales,
        ActivationLayout::Swizzled128x4 => {
            layout::swizzle(&expected.scales, count, columns.div_ceil(format.block()))
        }
        ActivationLayout::Swizzled8x4 => {
            tiles_of_8x4(&expected.scales, count, columns.div_ceil(format.block()))
        }
    };
    expected
}

impl Expected {
    /// Adds elements that share a scale.
    fn add_fp8<T: Exact>(&mut self, elements: &[T], rule: Fp8Scale, given: Option<f32>) {
        let finite = elements.iter().map(|x| wide(*x).abs()).filter(|x| x.is_finite());
        let amax = finite.fold(0.0f32, |amax, x| if x > amax { x } else { amax });
        let scale = match rule {
            Fp8Scale::Given => given.expect("a given scale"),
            Fp8Scale::PerToken | Fp8Scale::PerTensor => {
                let least = 1.0 / (448.0f32 * 512.0);
                let scale = amax / 448.0;
                if scale < least { least } else { scale }
            }
            Fp8Scale::PerGroup { power_of_two } => {
                let scale = if amax < 1e-10 { 1e-10f32 } else { amax } / 448.0;
                match power_of_two {
                    false => scale,
                    true => {
                        let exponent = (-33..128).find(|k| 2f64.powi(*k) >= f64::from(scale));
                        2f64.powi(exponent.expect("at most 2^120")) as f32
                    }
                }
            }
        };
        if rule != Fp8Scale::Given {
            self.f32_scales.push(scale.to_bits());
        }
        self.codes.extend(elements.iter().map(|x| fp8(wide(*x), scale)));
    }
}

/// Returns the FP8 code of x / scale.
fn fp8(x: f32, scale: f32) -> u8 {
    if !x.is_finite() {
        return 0x7F;
    }
    let quotient = x / scale;
    nearest(&E4M3, f64::from(quotient).abs(), Ties::Even) | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Lays linear scales out in tiles of 8 rows by 4 blocks, row by row. Missing scales are zero.
pub fn tiles_of_8x4(linear: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(linear.len(), rows * blocks);
    let mut bytes = Vec::new();
    for first_row in (0..rows).step_by(8) {
        for first_block in (0..blocks).step_by(4) {
            for row in first_row..first_row + 8 {
                for block in first_block..first_block + 4 {
                    let exists = row < rows && block < blocks;
                    bytes.push(if exists { linear[row * blocks + block] } else { 0 });
                }
            }
        }
    }
    bytes
}
