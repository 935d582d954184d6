//! How products round activations, in the words of the package.

use microscale::{ActivationPrecision, Error, Format, Fp8Options, OperandFault, QuantizedShape, Words};
use pyo3::prelude::*;

use crate::errors::{error, of_tensors};
use crate::recipe::word;

/// The words for FP8: a scale per row, or per 128 columns.
pub(crate) const FP8: [&str; 2] = ["fp8", "fp8-group128"];

/// The formats of 4 bits that activations are quantized to.
pub(crate) const FP4: [Format; 2] = [Format::Mxfp4, Format::Nvfp4];

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
        return Err(no_word(py, word));
    }
    Ok(Fp8Options { per_group: word == FP8[1], round_weights })
}

/// The words for rounded activations: [`FP8`], and the formats in [`FP4`].
pub(crate) fn all_words() -> Vec<&'static str> {
    [FP8, FP4.map(|format| format.word())].concat()
}

/// The error for a word that does not name a rounding of activations.
fn no_word(py: Python<'_>, word: &str) -> PyErr {
    let words = all_words().join(", ");
    error(py, format!("activations are not rounded to {word:?}; choose one of {words}"))
}

/// Raises an error unless weights of a format are multiplied with activations that are rounded to a
/// word of [`FP8`], or quantized to a format of [`FP4`].
#[pyfunction]
pub(crate) fn require_activations(
    py: Python<'_>,
    format: &str,
    activations: &str,
    round_weights: bool,
) -> PyResult<()> {
    let format: Format = word(py, format)?;
    let shape = QuantizedShape::new(format, 0, 0);
    match FP4.into_iter().find(|format| format.word() == activations) {
        None => fp8_options(py, activations, round_weights)?.check_weights(shape),
        Some(vector) if vector == format => Ok(()),
        Some(vector) => Err(Error::Operands(OperandFault::Formats { matrix: format, vector })),
    }
    .map_err(|why| of_tensors(py, why))
}
