//! Matrix–vector products of quantized operands: operands, and checks that they match.
//!
//! [`microscale_formats::dot`] and [`microscale_formats::weights`] define the arithmetic. The CPU
//! implements it in `cpu::gemv` and `cpu::gemv_weights`, GPUs in `gpu`.

use crate::element::Element;
use crate::error::{Error, OperandFault, Result};
use crate::shape::{QuantizedShape, Shape};
use microscale_formats::ScaleLayout;

/// How two tensors' rows are divided into matrices and vectors.
///
/// With L batches, the matrix tensor `[L·M, K]` is L matrices of M rows. The vector of batch l is
/// row l · `vector_stride` of the vector tensor. Rows in between, such as padding to 128, are not
/// read. The result is `[L, M]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of matrices and of vectors (L), at least 1.
    pub count: usize,
    /// Distance in rows between the vectors of two batches.
    pub vector_stride: usize,
}

impl Default for Batch {
    /// One matrix, one vector.
    fn default() -> Self {
        Self::of(1)
    }
}

impl Batch {
    /// Returns a batch of `count` matrices, with their vectors one after the other.
    pub const fn of(count: usize) -> Self {
        Self { count, vector_stride: 1 }
    }

    /// Sets the distance between vectors in rows.
    pub const fn with_vector_stride(self, vector_stride: usize) -> Self {
        Self { vector_stride, ..self }
    }

    /// Checks that matrix, vectors and output match. Returns the rows of one matrix (M).
    ///
    /// `output` is the output's number of elements.
    pub(crate) fn check(
        &self,
        matrix: QuantizedShape,
        vectors: QuantizedShape,
        output: usize,
    ) -> Result<usize> {
        let formats = (matrix.format, vectors.format);
        if formats.0 != formats.1 || !formats.0.is_multiplied() {
            return Err(Error::Operands(OperandFault::Formats { matrix: formats.0, vector: formats.1 }));
        }
        if matrix.cols != vectors.cols {
            return Err(Error::Operands(OperandFault::Columns { matrix: matrix.cols, vector: vectors.cols }));
        }
        for (what, shape) in [("matrix", matrix), ("vector", vectors)] {
            if shape.scale_layout != ScaleLayout::Linear {
                return Err(Error::Operands(OperandFault::Layout { what }));
            }
        }
        let Self { count, vector_stride } = *self;
        if count == 0 || !matrix.rows.is_multiple_of(count) {
            return Err(Error::Operands(OperandFault::Batches { rows: matrix.rows, batches: count }));
        }
        let needed = (count - 1).checked_mul(vector_stride).and_then(|last| last.checked_add(1));
        if needed.is_none_or(|needed| needed > vectors.rows) {
            return Err(Error::Operands(OperandFault::Vectors {
                rows: vectors.rows,
                batches: count,
                vector_stride,
            }));
        }
        let rows = matrix.rows / count;
        Shape::new(count, rows).check("the output", output)?;
        Ok(rows)
    }
}

/// A dtype of activations: [`f32`], [`half::f16`] or [`half::bf16`].
pub trait Activation: Element + sealed::Sealed {}

impl Activation for f32 {}
impl Activation for half::f16 {}
impl Activation for half::bf16 {}

/// A dtype of GPU results for activations of `T`: `T` itself, or f32.
#[cfg(feature = "cuda")]
pub trait ProductOf<T: Activation>: Activation {}

#[cfg(feature = "cuda")]
impl<T: Activation> ProductOf<T> for T {}
#[cfg(feature = "cuda")]
impl ProductOf<half::f16> for f32 {}
#[cfg(feature = "cuda")]
impl ProductOf<half::bf16> for f32 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Checks that weights, activations and output match. Returns the rows of the weights (M).
///
/// `activations` and `output` are numbers of elements.
pub(crate) fn check_weights(
    weights: QuantizedShape,
    activations: usize,
    tokens: usize,
    output: usize,
) -> Result<usize> {
    check_multiplied(weights, activations, tokens)?;
    Shape::new(tokens, weights.rows).check("the output", output)?;
    Ok(weights.rows)
}

/// Checks that weights can be multiplied, and that the number of activations matches.
pub(crate) fn check_multiplied(weights: QuantizedShape, activations: usize, tokens: usize) -> Result<()> {
    check_weights_shape(weights)?;
    Shape::new(tokens, weights.cols).check("the activations", activations)
}

/// Checks that weights of a shape can be multiplied with activations.
///
/// # Errors
/// [`OperandFault::Weights`] for formats other than NVFP4 and MXFP4, and [`OperandFault::Layout`]
/// for swizzled scales.
pub(crate) fn check_weights_shape(weights: QuantizedShape) -> Result<()> {
    if !weights.format.is_multiplied() {
        return Err(Error::Operands(OperandFault::Weights { found: weights.format }));
    }
    if weights.scale_layout != ScaleLayout::Linear {
        return Err(Error::Operands(OperandFault::Layout { what: "weights" }));
    }
    Ok(())
}
