//! Slow and obvious implementations of every format.
//!
//! They follow the formats' definitions and the libraries' formulas, and share no code with the
//! library.

pub mod activations;
pub mod dot;
mod element;
mod exact;
pub mod layout;
pub mod mx;
pub mod nvfp4;

use microscale::formats::{GlobalScale, NegativeZero, Ties};
use microscale::{
    Amax, Format, Global, NonFinite, Position, QuantizedTensor, Recipe, Report, ScaleLayout, Scheme, Shape,
};

pub use element::{E4M3, E5M2, MAGNITUDES, e2m1_value, e4m3_value, e5m2_value, nearest, power_of_two};
pub use exact::Exact;
pub use mx::MxElement;

/// Formats for comparison are tested by `tests/comparison.rs`, which has its own oracle.
const NO_COMPARISON: &str = "no oracle here";

/// The result of quantizing a matrix. The policy `error` gives the same result as `propagate`.
#[derive(Debug, Default, PartialEq)]
pub struct Expected {
    /// Packed codes.
    pub codes: Vec<u8>,
    /// Scale bytes, in the recipe's layout.
    pub scales: Vec<u8>,
    /// NVFP4's global scale, if it has one.
    pub global_scale: Option<GlobalScale>,
    /// Counts of lossy events.
    pub report: Report,
}

/// A quantized block of finite elements.
struct Block {
    scale: u8,
    /// One code per element.
    codes: Vec<u8>,
    clipped: bool,
    flushed: bool,
    scale_saturated: bool,
}

/// Returns whether the code of an element has its sign bit set.
fn is_negative(magnitude: u8, value: f64, negative_zero: NegativeZero) -> bool {
    match negative_zero {
        _ if magnitude != 0 => value < 0.0,
        NegativeZero::Keep => value.is_sign_negative(),
        NegativeZero::DropInput => value < 0.0,
        NegativeZero::Drop => false,
        NegativeZero::Force => value <= 0.0,
    }
}

/// Returns the elements of a matrix in row-major order, with their positions.
pub fn elements<T: Exact>(values: &[T], shape: Shape) -> impl Iterator<Item = (Position, T)> {
    let cols = move |row: usize| (0..shape.cols).map(move |col| Position { row, col });
    (0..shape.rows).flat_map(cols).map(move |at| (at, values[at.row * shape.row_stride + at.col]))
}

/// Returns the amax of a matrix.
pub fn amax<T: Exact>(values: &[T], shape: Shape) -> Amax {
    let all = || elements(values, shape).map(|(_, value)| value.to_f64());
    let finite = all().filter(|value| value.is_finite()).fold(0.0, |amax: f64, value| amax.max(value.abs()));
    Amax { finite: finite as f32, nan: all().any(f64::is_nan), infinite: all().any(f64::is_infinite) }
}

/// Quantizes a matrix.
pub fn quantize<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) -> Expected {
    let mut expected = Expected::default();
    for (at, value) in elements(values, shape) {
        let value = value.to_f64();
        expected.report.nan += u64::from(value.is_nan());
        expected.report.infinite += u64::from(value.is_infinite());
        if !value.is_finite() && expected.report.first_non_finite.is_none() {
            expected.report.first_non_finite = Some(at);
        }
    }
    // An empty matrix needs no global scale.
    if !shape.is_empty() {
        expected.global_scale = expected_global_scale(values, shape, recipe);
    }
    let format = recipe.format();
    for row in 0..shape.rows {
        for first in (0..shape.cols).step_by(format.block()) {
            let mut block = vec![0.0; format.block()];
            for col in first..shape.cols.min(first + format.block()) {
                block[col - first] = values[row * shape.row_stride + col].to_f64();
            }
            if recipe.non_finite == NonFinite::Saturate {
                let saturate =
                    |v: &mut f64| *v = if v.is_nan() { 0.0 } else { v.clamp(-T::LARGEST, T::LARGEST) };
                block.iter_mut().for_each(saturate);
            }
            expected.add_block::<T>(&block, recipe);
        }
    }
    if recipe.scale_layout == ScaleLayout::Swizzled {
        expected.scales = layout::swizzle(&expected.scales, shape.rows, shape.cols.div_ceil(format.block()));
    }
    expected
}

fn expected_global_scale<T: Exact>(values: &[T], shape: Shape, recipe: &Recipe) -> Option<GlobalScale> {
    match recipe.scheme {
        Scheme::Nvfp4(_, Global::Given(given)) => Some(given),
        Scheme::Nvfp4(arithmetic, Global::FromAmax) => {
            let all = elements(values, shape).map(|(_, value)| value);
            let amax = nvfp4::tensor_amax(all, recipe.non_finite);
            Some(nvfp4::global_scale::<T>(nvfp4::numerics(arithmetic), amax))
        }
        _ => None,
    }
}

impl Expected {
    fn add_block<T: Exact>(&mut self, block: &[f64], recipe: &Recipe) {
        if block.iter().any(|value| !value.is_finite()) {
            self.scales.push(nan_scale(recipe.format()));
            self.codes.extend(vec![0; recipe.format().block_bytes()]);
            return;
        }
        let even_keeping = (Ties::Even, NegativeZero::Keep);
        let made = match recipe.scheme {
            Scheme::Mxfp4(a) => MxElement::e2m1().quantize(block, a.scale_rule, a.ties, a.negative_zero),
            Scheme::Mxfp8E4m3(rule) => {
                MxElement::e4m3().quantize(block, rule, even_keeping.0, even_keeping.1)
            }
            Scheme::Mxfp8E5m2(rule) => {
                MxElement::e5m2().quantize(block, rule, even_keeping.0, even_keeping.1)
            }
            Scheme::Nvfp4(arithmetic, _) => {
                let numerics = nvfp4::numerics(arithmetic);
                let global = self.global_scale.map_or(1.0, GlobalScale::value);
                nvfp4::Rule { numerics, global, negative_zero: arithmetic.negative_zero }.quantize::<T>(block)
            }
            Scheme::Comparison(_) => unreachable!("{NO_COMPARISON}"),
        };
        self.scales.push(made.scale);
        match recipe.format() {
            Format::Mxfp4 | Format::Nvfp4 => {
                self.codes.extend(made.codes.chunks(2).map(|pair| pair[0] + 16 * pair[1]));
            }
            Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => self.codes.extend(made.codes),
            Format::Comparison(_) => unreachable!("{NO_COMPARISON}"),
        }
        self.report.clipped_blocks += u64::from(made.clipped);
        self.report.flushed_blocks += u64::from(made.flushed);
        self.report.saturated_scales += u64::from(made.scale_saturated);
    }
}

/// Returns the scale byte of a block with a NaN or an infinity.
pub fn nan_scale(format: Format) -> u8 {
    match format {
        Format::Nvfp4 => 0x7F,
        Format::Mxfp4 | Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => 255,
        Format::Comparison(_) => unreachable!("{NO_COMPARISON}"),
    }
}

/// Returns the value of a code under a scale byte and a global scale.
///
/// The value is not yet rounded to an output type.
///
/// It is exact for the MX formats, and rounded to f32 in two steps for NVFP4.
pub fn value(format: Format, code: u8, scale: u8, global: Option<GlobalScale>) -> f64 {
    match format {
        Format::Mxfp4 => e2m1_value(code) * mx::scale_value(scale),
        Format::Mxfp8E4m3 => e4m3_value(code) * mx::scale_value(scale),
        Format::Mxfp8E5m2 => e5m2_value(code) * mx::scale_value(scale),
        Format::Comparison(_) => unreachable!("{NO_COMPARISON}"),
        Format::Nvfp4 if scale == 0x7F => f64::NAN,
        Format::Nvfp4 => (e2m1_value(code) as f32 * nvfp4::factor(scale, global)).into(),
    }
}

/// Returns the values of a tensor, row by row, before rounding to an output type.
pub fn dequantize(tensor: &QuantizedTensor) -> Vec<f64> {
    let (format, in_row) = (tensor.format(), tensor.blocks_per_row());
    let codes = unpack(format, tensor.codes());
    let scales = match tensor.shape().scale_layout {
        ScaleLayout::Linear => tensor.scales().to_vec(),
        ScaleLayout::Swizzled => layout::unswizzle(tensor.scales(), tensor.rows(), in_row),
    };
    let mut values = Vec::with_capacity(tensor.rows() * tensor.cols());
    for row in 0..tensor.rows() {
        for col in 0..tensor.cols() {
            let block = row * in_row + col / format.block();
            let code = codes[block * format.block() + col % format.block()];
            values.push(value(format, code, scales[block], tensor.global_scale()));
        }
    }
    values
}

/// Unpacks codes. With 4 bits, the low nibble comes first.
pub fn unpack(format: Format, packed: &[u8]) -> Vec<u8> {
    match format {
        Format::Mxfp4 | Format::Nvfp4 => packed.iter().flat_map(|byte| [byte % 16, byte / 16]).collect(),
        Format::Mxfp8E4m3 | Format::Mxfp8E5m2 => packed.to_vec(),
        Format::Comparison(_) => unreachable!("{NO_COMPARISON}"),
    }
}
