//! Tries every scale in f64, and measures the loss against the best.

use std::fmt;

use microscale::{Format, GlobalScale, QuantizedTensor};
use rayon::prelude::*;

use super::inputs::COLS;

/// E2M1's magnitudes, by code.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Returns the exact dequantization factor of a scale byte.
fn factor(tensor: &QuantizedTensor, byte: u8) -> f64 {
    if tensor.format() == Format::Mxfp4 {
        return 2f64.powi(i32::from(byte) - 127);
    }
    let (exponent, mantissa) = (i32::from(byte >> 3), f64::from(byte & 7));
    let scale = match exponent {
        0 => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    match tensor.global_scale() {
        None => scale,
        Some(GlobalScale::Divisor(divisor)) => scale / f64::from(divisor),
        Some(GlobalScale::Multiplier(multiplier)) => scale * f64::from(multiplier),
    }
}

/// Returns every scale byte except NaN, and except NVFP4's 0, which gives zeros and the largest
/// error.
fn scale_bytes(format: Format) -> std::ops::RangeInclusive<u8> {
    if format == Format::Mxfp4 { 0..=254 } else { 1..=126 }
}

/// Returns the weighted squared error of a block whose elements take the nearest magnitude.
///
/// Stops early once the sum reaches `enough`.
fn nearest_error(block: &[f64], importance: &[f64], factor: f64, enough: f64) -> f64 {
    let magnitudes = MAGNITUDES.map(|magnitude| factor * magnitude);
    let mut error = 0.0;
    for (a, weight) in block.iter().zip(importance) {
        let distance = magnitudes.iter().fold(f64::INFINITY, |least, value| {
            let distance = (a - value).abs();
            if distance < least { distance } else { least }
        });
        error += weight * distance * distance;
        if error >= enough {
            break;
        }
    }
    error
}

/// A block of a matrix and its quantization errors.
pub(crate) struct BlockErrors {
    /// The error of the written bytes.
    pub(crate) written: f64,
    /// The error of the best scale.
    pub(crate) least: f64,
    /// Σ w·x².
    pub(crate) energy: f64,
}

impl BlockErrors {
    /// Returns the excess of the written error over the least, as norms, in units of the block's
    /// norm.
    ///
    /// Let u be 2⁻²⁴, x the block and r its rest under a scale, all weighted. A search uses the
    /// factor f with an error of u, and its reciprocal with another. It may therefore take the
    /// farther of two magnitudes, if that is farther by at most 2u·a. An element's rest is rounded
    /// once. This adds up to u·f·q + 2u·a + u·|r| per element, and f·q is at most a + |r|: 3u·‖x‖ +
    /// 2u·‖r‖.
    ///
    /// The sum rounds a term at most eight times (weight, four of a chain, three sums), which gives
    /// 4u·‖r‖ of the norm. A norm is therefore off by less than 6u·(‖x‖ + ‖r‖), once for the chosen
    /// scale and once for the best. If the largest element is within u of 7 scales, skipping the
    /// double of a scale may cost 2u·‖x‖. Codes are written by the numerics' quotient with up to
    /// four roundings: 8u·‖x‖. The total is at most 22u·(‖x‖ + ‖r‖).
    fn excess(&self) -> f64 {
        (self.written.sqrt() - self.least.sqrt())
            / (self.energy.sqrt() + self.least.sqrt()).max(f64::MIN_POSITIVE)
    }
}

/// Upper bound of [`BlockErrors::excess`].
pub(crate) const TOLERANCE: f64 = 24.0 / (1 << 24) as f64;

/// Returns the written error, the best scale's error (0 without `brute`), and the energy of each
/// block.
pub(crate) fn errors(
    values: &[f32],
    importance: Option<&[f32]>,
    tensor: &QuantizedTensor,
    brute: bool,
) -> Vec<BlockErrors> {
    let size = tensor.format().block();
    let factors: Vec<f64> = scale_bytes(tensor.format()).map(|byte| factor(tensor, byte)).collect();
    let one = |(i, values): (usize, &[f32])| {
        let block: Vec<f64> = values.iter().map(|value| f64::from(value.abs())).collect();
        let weight = |k| importance.map_or(1.0, |importance| f64::from(importance[(i * size + k) % COLS]));
        let importance: Vec<f64> = (0..size).map(weight).collect();
        let scale = factor(tensor, tensor.scales()[i]);
        let mut written = 0.0;
        for (k, value) in values.iter().enumerate() {
            let code = tensor.codes()[(i * size + k) / 2] >> (4 * (k % 2)) & 15;
            let sign = if code < 8 { 1.0 } else { -1.0 };
            let rest = f64::from(*value) - sign * MAGNITUDES[usize::from(code % 8)] * scale;
            written += importance[k] * rest * rest;
        }
        let least = || {
            // Starts with a good scale, so that most others stop early.
            let begin = nearest_error(&block, &importance, scale, f64::INFINITY);
            factors
                .iter()
                .fold(begin, |least, factor| least.min(nearest_error(&block, &importance, *factor, least)))
        };
        let energy = block.iter().zip(&importance).map(|(a, weight)| weight * a * a).sum();
        BlockErrors { written, least: if brute { least() } else { 0.0 }, energy }
    };
    values.par_chunks(size).enumerate().map(one).collect()
}

/// Checks that no block's error exceeds the least one, and returns the largest excess.
///
/// The unit is [`TOLERANCE`].
pub(crate) fn check_optimal(what: &str, errors: &[BlockErrors]) -> f64 {
    let mut most = 0.0f64;
    for (i, block) in errors.iter().enumerate() {
        let excess = block.excess();
        assert!(
            excess <= TOLERANCE,
            "{what}, block {i}: the error is {:e}, the least is {:e}, {excess:e} of the norm",
            block.written,
            block.least,
        );
        most = most.max(excess);
    }
    most / TOLERANCE
}

/// The loss of a search compared with the full search.
pub(crate) struct Loss {
    /// Relative increase of the total squared error.
    total: f64,
    /// Blocks with a larger error, beyond rounding.
    pub(crate) blocks: usize,
    /// Number of all blocks.
    of: usize,
    /// Largest relative increase in a block.
    most: f64,
}

impl Loss {
    pub(crate) fn of(errors: &[BlockErrors], full: &[BlockErrors]) -> Self {
        let total = |errors: &[BlockErrors]| errors.iter().map(|block| block.written).sum::<f64>();
        let losses = errors.iter().zip(full).filter_map(|(block, full)| {
            let (norm, least) = (block.written.sqrt(), full.written.sqrt());
            (norm - least > TOLERANCE * (full.energy.sqrt() + least))
                .then(|| block.written / full.written - 1.0)
        });
        let losses: Vec<f64> = losses.collect();
        Self {
            total: total(errors) / total(full) - 1.0,
            blocks: losses.len(),
            of: full.len(),
            most: losses.into_iter().fold(0.0, f64::max),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.blocks == 0 {
            return f.write_str("nothing");
        }
        let blocks = self.blocks as f64 / self.of as f64 * 100.0;
        write!(f, "{:.4} %, in {blocks:.3} % of blocks", self.total * 100.0)?;
        // A ratio is meaningless if the full search has almost no error.
        if self.most < 10.0 { write!(f, ", at most {:.0} %", self.most * 100.0) } else { Ok(()) }
    }
}
