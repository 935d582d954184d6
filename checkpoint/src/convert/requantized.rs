//! Tensors that no cast keeps as they are: their values in f32, quantized again, and what that
//! loses.

use std::fmt;

use microscale::{Device, ErrorStats, GlobalScale, Position, QuantizedTensor, Recipe, Report, Shape};

use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;

/// A tensor whose values were quantized again, and the loss.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Requantized {
    /// The tensor.
    pub tensor: String,
    /// The format before, or the dtype of codes under scales.
    pub from: String,
    /// The format after, `fp8-block` or `bf16`.
    pub to: String,
    /// Values that are not the same f32. All NaN are the same.
    pub differing: u64,
    /// All values.
    pub values: u64,
    /// The difference of those after from those before.
    pub errors: ErrorStats,
    /// What could not be kept: blocks clipped, flushed to zero, scales out of range.
    pub report: Report,
}

impl Requantized {
    /// A tensor without any value yet.
    pub(crate) fn new(tensor: &str, from: impl fmt::Display, to: impl fmt::Display) -> Self {
        Self {
            tensor: tensor.into(),
            from: from.to_string(),
            to: to.to_string(),
            differing: 0,
            values: 0,
            errors: ErrorStats::default(),
            report: Report::default(),
        }
    }

    /// Adds the difference of a band, in the order of the bands.
    pub(crate) fn add(&mut self, band: &BandDifference) {
        self.differing += band.differing;
        self.values += band.values;
        self.errors = self.errors.and_parts(&band.parts);
        self.report += band.report;
    }
}

/// The difference of a band's values after a conversion from those before.
#[derive(Default)]
pub(crate) struct BandDifference {
    pub(crate) differing: u64,
    pub(crate) values: u64,
    /// Partial sums of the errors.
    pub(crate) parts: Vec<ErrorStats>,
    pub(crate) report: Report,
}

impl BandDifference {
    /// Compares values. All NaN are the same.
    pub(crate) fn between(before: &[f32], after: &[f32]) -> Self {
        let pairs = before.iter().zip(after);
        let differ = pairs.filter(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
        Self {
            differing: differ.count() as u64,
            values: before.len() as u64,
            parts: ErrorStats::parts_between(before, after),
            report: Report::default(),
        }
    }
}

/// Quantizes a band again, which begins with element `first`, under the global scale that the file
/// will hold.
pub(crate) fn requantize_band(
    packed: &Packed<'_>,
    storage: &Storage,
    (recipe, global_scale): (&Recipe, Option<GlobalScale>),
    (first, band): (usize, &QuantizedTensor),
    device: &Device,
) -> Result<(QuantizedTensor, BandDifference)> {
    let columns = packed.shape.last().copied().unwrap_or(1).max(1);
    let failed = |source: microscale::Error| {
        let of_tensor = |at: Position| {
            let at = first + at.col;
            Position { row: at / columns, col: at % columns }
        };
        packed.error(source.map_position(of_tensor))
    };
    let before: Vec<f32> = device.dequantize(band).map_err(failed)?;
    let quantized = device.quantize(&before, Shape::new(1, before.len()), recipe).map_err(failed)?;
    let report = quantized.report;
    let stored = global_scale.and_then(|scale| storage.stored_global_scale(Some(scale)));
    let after = match stored {
        Some(scale) => quantized.tensor.with_global_scale(scale).map_err(failed)?,
        None => quantized.tensor,
    };
    let values: Vec<f32> = device.dequantize(&after).map_err(failed)?;
    Ok((after, BandDifference { report, ..BandDifference::between(&before, &values) }))
}
