//! Tensors that no cast keeps as they are: their values in f32, quantized again, and what that loses.

use std::fmt;

use microscale::{Device, ErrorStats, GlobalScale, Position, QuantizedTensor, Recipe, Report, Shape};
use rayon::prelude::*;

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

    /// Takes in the next values.
    pub(crate) fn add(&mut self, before: &[f32], after: &[f32]) {
        let pairs = before.par_iter().zip(after);
        let differ = pairs.filter(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
        self.differing += differ.count() as u64;
        self.values += before.len() as u64;
        self.errors = self.errors.and_between(before, after);
    }

    /// Quantizes a band again, of which `first` elements are before, under what the file will hold as its global scale.
    pub(crate) fn band(
        &mut self,
        packed: &Packed<'_>,
        storage: &Storage,
        (recipe, global_scale): (&Recipe, Option<GlobalScale>),
        (first, band): (usize, &QuantizedTensor),
        device: &Device,
    ) -> Result<QuantizedTensor> {
        let columns = packed.shape.last().copied().unwrap_or(1).max(1);
        let failed = |source| {
            packed.error(match source {
                microscale::Error::NonFinite { first: at, report } => {
                    let at = first + at.col;
                    let first = Position { row: at / columns, col: at % columns };
                    microscale::Error::NonFinite { first, report }
                }
                source => source,
            })
        };
        let before: Vec<f32> = device.dequantize(band).map_err(failed)?;
        let quantized = device.quantize(&before, Shape::new(1, before.len()), recipe).map_err(failed)?;
        self.report += quantized.report;
        let stored = global_scale.and_then(|scale| storage.stored_global_scale(Some(scale)));
        let after = match stored {
            Some(scale) => quantized.tensor.with_global_scale(scale).map_err(failed)?,
            None => quantized.tensor,
        };
        let values: Vec<f32> = device.dequantize(&after).map_err(failed)?;
        self.add(&before, &values);
        Ok(after)
    }
}
