//! How products round activations, in the words of the package.

use microscale::{ActivationRounding, Error, Format, Fp8Options, OperandFault, QuantizedShape, Words};
use pyo3::prelude::*;

use crate::errors::{error, of_tensors};
use crate::recipe::word;

/// The words for FP8: a scale per row, per 128 columns, or per row with fast accumulation on GPUs.
const FP8: [&str; 3] = ["fp8", "fp8-group128", "fp8-fast"];

/// The formats of 4 bits that activations are quantized to.
const FP4: [Format; 2] = [Format::Mxfp4, Format::Nvfp4];

/// The word for activations in MXFP4, whose products on GPUs may have fast accumulation.
const MXFP4_FAST: &str = "mxfp4-fast";

/// How a product rounds activations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Exact,
    Int8,
    Fp8(Fp8Options),
    /// Activations are in MXFP4 already. Products on GPUs may have fast accumulation.
    Mxfp4Fast,
}

impl Rounding {
    /// The rounding that a word stands for. Formats of 4 bits are quantized to in Python.
    pub(crate) fn of(py: Python<'_>, activations: Option<&str>, round_weights: bool) -> PyResult<Self> {
        match activations {
            None => Ok(Self::Exact),
            Some(word) if word == ActivationRounding::Int8.word() => Ok(Self::Int8),
            Some(MXFP4_FAST) => Ok(Self::Mxfp4Fast),
            Some(word) if FP8.contains(&word) => {
                let (per_group, fast_accumulation) = (word == FP8[1], word == FP8[2]);
                Ok(Self::Fp8(Fp8Options { per_group, round_weights, fast_accumulation }))
            }
            Some(word) => {
                let words = all_words().join(", ");
                Err(error(py, format!("activations are not rounded to {word:?}; choose one of {words}")))
            }
        }
    }

    /// The options of FP8 on a GPU, if activations are rounded to it.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(self, py: Python<'_>) -> PyResult<Option<Fp8Options>> {
        match self {
            Self::Exact | Self::Mxfp4Fast => Ok(None),
            Self::Fp8(options) => Ok(Some(options)),
            Self::Int8 => Err(error(
                py,
                "GPUs do not multiply with activations in int8; choose other activations, or arrays of the CPU",
            )),
        }
    }
}

/// The words for rounded activations: INT8, [`FP8`], the formats in [`FP4`], and [`MXFP4_FAST`].
pub(crate) fn all_words() -> Vec<&'static str> {
    let int8 = [ActivationRounding::Int8.word()];
    int8.into_iter().chain(FP8).chain(FP4.map(|format| format.word())).chain([MXFP4_FAST]).collect()
}

/// Raises an error unless weights of a format are multiplied with activations that are rounded to
/// one of [`all_words`].
#[pyfunction]
pub(crate) fn require_activations(
    py: Python<'_>,
    format: &str,
    activations: &str,
    round_weights: bool,
) -> PyResult<()> {
    let format: Format = word(py, format)?;
    let in_fp4 = if activations == MXFP4_FAST { Format::Mxfp4.word() } else { activations };
    match FP4.into_iter().find(|format| format.word() == in_fp4) {
        Some(vector) if vector == format => Ok(()),
        Some(vector) => Err(Error::Operands(OperandFault::Formats { matrix: format, vector })),
        None => match Rounding::of(py, Some(activations), round_weights)? {
            Rounding::Fp8(options) => options.check_weights(QuantizedShape::new(format, 0, 0)),
            Rounding::Exact | Rounding::Int8 | Rounding::Mxfp4Fast => Ok(()),
        },
    }
    .map_err(|why| of_tensors(py, why))
}
