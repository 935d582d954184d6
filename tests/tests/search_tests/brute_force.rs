//! Every scale tried in f64, and the loss against the best.

use std::fmt;

use microscale::{Format, GlobalScale, QuantizedTensor};
use rayon::prelude::*;

use super::inputs::COLS;

/// E2M1's magnitudes, by code.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The factor of codes under a scale byte, as a real number.
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

/// Every byte that a scale can have, but for NaN, and for NVFP4's 0: that makes zeros, and no scale errs
/// more.
fn scale_bytes(format: Format) -> std::ops::RangeInclusive<u8> {
    if format == Format::Mxfp4 { 0..=254 } else { 1..=126 }
}

/// The weighted squared error of a block if every element takes the magnitude that is nearest; or, once the
/// sum is `enough`, what it has come to.
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

/// A block of a matrix, and what quantizing made of it.
pub(crate) struct BlockErrors {
    /// The error of the bytes that were written.
    pub(crate) written: f64,
    /// The error of the best scale.
    pub(crate) least: f64,
    /// Σ w·x².
    pub(crate) energy: f64,
}

impl BlockErrors {
    /// The excess of the written error over the least, as norms, in units of the block's.
    ///
    /// Let u be 2⁻²⁴, x the block, r what a scale leaves of it, all weighted. A search sees the factor f with
    /// an error of u, and its reciprocal with another, which may take the farther of two magnitudes where
    /// that is farther by no more than 2u·a. What an element leaves is rounded once. That is u·f·q + 2u·a +
    /// u·|r| an element, and f·q is at most a + |r|: 3u·‖x‖ + 2u·‖r‖. The sum rounds a term at most eight
    /// times (weight, four of a chain, three sums), which makes 4u·‖r‖ of the norm. So a norm is off by less
    /// than 6u·(‖x‖ + ‖r‖), once for the scale that is taken and once for the best. Where the largest element
    /// is within u of 7 scales, skipping the double of a scale may cost 2u·‖x‖. Codes are written by the
    /// convention's quotient, which up to four roundings lie in: 8u·‖x‖. In all 22u·(‖x‖ + ‖r‖) at most.
    fn excess(&self) -> f64 {
        (self.written.sqrt() - self.least.sqrt())
            / (self.energy.sqrt() + self.least.sqrt()).max(f64::MIN_POSITIVE)
    }
}

/// [`BlockErrors::excess`] must not be more.
pub(crate) const TOLERANCE: f64 = 24.0 / (1 << 24) as f64;

/// The error of what was written, of the best scale if `brute` (else 0), and the energy, block by block.
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
            // Begun with a good one, so that most others are soon enough.
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

/// Checks that no block's error is more than the least there is, and returns the largest excess in units of
/// [`TOLERANCE`].
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

/// The loss of a search against the full one.
pub(crate) struct Loss {
    /// The loss in the total squared error, relative to that of full.
    total: f64,
    /// Blocks in which it errs more by more than rounding.
    pub(crate) blocks: usize,
    /// The number of all blocks.
    of: usize,
    /// The largest loss in a block, relative to the error of full there.
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
        // A ratio says nothing where full errs by almost nothing.
        if self.most < 10.0 { write!(f, ", at most {:.0} %", self.most * 100.0) } else { Ok(()) }
    }
}
