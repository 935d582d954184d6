//! How products round activations, in the words of the package.

use microscale::{ActivationPrecision, Format, Fp8Options, QuantizedShape, Words};
use pyo3::prelude::*;

use crate::errors::{error, of_tensors};
use crate::recipe::word;

/// The words for FP8: a scale per row, or per 128 columns.
pub(crate) const FP8: [&str; 2] = ["fp8", "fp8-group128"];

/// How a product on a CPU rounds activations.
#[derive(Clone, Copy)]
pub(crate) enum Rounding {
    /// Not at all, or to INT8.
    Precision(ActivationPrecision),
    Fp8(Fp8Options),
}

impl Rounding {
    /// The rounding to a precision, or to FP8 by a word of [`FP8`]. Both together are an error.
    pub(crate) fn of(
        py: Python<'_>,
        precision: &str,
        fp8: Option<&str>,
        round_weights: bool,
    ) -> PyResult<Self> {
        let precision: ActivationPrecision = word(py, precision)?;
        match fp8 {
            None => Ok(Self::Precision(precision)),
            Some(fp8) if precision != ActivationPrecision::Exact => {
                let precision = precision.word();
                Err(error(
                    py,
                    format!(
                        "activations are rounded to {fp8} and to {precision}; pass activations or precision"
                    ),
                ))
            }
            Some(fp8) => fp8_options(py, fp8, round_weights).map(Self::Fp8),
        }
    }
}

/// The options that a word of [`FP8`] stands for.
pub(crate) fn fp8_options(py: Python<'_>, word: &str, round_weights: bool) -> PyResult<Fp8Options> {
    if !FP8.contains(&word) {
        let words = FP8.join(", ");
        return Err(error(py, format!("activations are not rounded to {word:?}; choose one of {words}")));
    }
    Ok(Fp8Options { per_group: word == FP8[1], round_weights })
}

/// Raises an error unless weights of a format are multiplied with activations in FP8, by a word of
/// [`FP8`].
#[pyfunction]
pub(crate) fn require_fp8(py: Python<'_>, format: &str, fp8: &str, round_weights: bool) -> PyResult<()> {
    let format: Format = word(py, format)?;
    let options = fp8_options(py, fp8, round_weights)?;
    options.check_weights(QuantizedShape::new(format, 0, 0)).map_err(|why| of_tensors(py, why))
}
