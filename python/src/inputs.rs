//! Activations of a product: an array of values, or a quantized array.

use microscale::Element;
use pyo3::intern;
use pyo3::prelude::*;

use crate::array::{Array, Kind};
use crate::errors::error;
use crate::operand::Operand;
use crate::rounding::Rounding;

/// Activations of a product.
pub(crate) enum Activations {
    /// Float32, float16 or bfloat16.
    Values(Array),
    /// A `Quantized`, and its shape.
    Quantized(Box<Operand>, Vec<usize>),
}

impl Activations {
    /// Takes them from the object, by a function that finds arrays.
    pub(crate) fn by(
        object: &Bound<'_, PyAny>,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let py = object.py();
        if !object.hasattr(intern!(py, "_global"))? {
            return Ok(Self::Values(array_of(object, "activations")?));
        }
        let shape = object.getattr(intern!(py, "shape"))?.extract()?;
        Ok(Self::Quantized(Operand::by(object, array_of)?.into(), shape))
    }

    /// The shape.
    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Self::Values(values) => values.dims(),
            Self::Quantized(_, shape) => shape,
        }
    }

    /// The rows, which have `cols` columns and no gaps.
    pub(crate) fn rows(&self, py: Python<'_>, cols: usize) -> PyResult<usize> {
        match self {
            Self::Values(values) => activation_rows(py, values, cols),
            // The product checks the columns.
            Self::Quantized(operand, _) => Ok(operand.shape.rows),
        }
    }

    /// The kind of the results, which values and results share.
    pub(crate) fn kind(&self, out: &Array) -> Kind {
        match self {
            Self::Values(values) => values.kind(),
            Self::Quantized(..) => out.kind(),
        }
    }

    /// The values. Quantized activations have none.
    pub(crate) fn values<T: Element>(&self) -> &[T] {
        match self {
            Self::Values(values) => values.values::<T>(),
            Self::Quantized(..) => &[],
        }
    }

    /// The error for results, or activations, that are not numbers.
    pub(crate) fn no_values(&self, out: &Array) -> PyErr {
        match self {
            Self::Values(values) => values.no_values(),
            Self::Quantized(..) => out.no_values(),
        }
    }

    /// Codes, scales and global scale, or the values.
    pub(crate) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Values(values) => vec![values],
            Self::Quantized(operand, _) => operand.arrays().collect(),
        }
    }

    /// Raises an error if quantized activations would be rounded.
    pub(crate) fn require_exact(&self, py: Python<'_>, rounding: Rounding) -> PyResult<()> {
        match self {
            Self::Quantized(..) if rounding != Rounding::Exact => {
                Err(error(py, "quantized activations are not rounded; leave activations out"))
            }
            _ => Ok(()),
        }
    }
}

/// The rows of activations with `cols` columns, without gaps.
fn activation_rows(py: Python<'_>, activations: &Array, cols: usize) -> PyResult<usize> {
    let shape = activations.rows(py)?;
    if shape.cols != cols {
        let found = shape.cols;
        return Err(error(
            py,
            format!("activations have {found} columns and the weights {cols}; they must have as many"),
        ));
    }
    if shape.row_stride != shape.cols {
        return Err(error(py, "activations must be contiguous; pass a contiguous copy of them"));
    }
    Ok(shape.rows)
}
