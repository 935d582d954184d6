//! Matrix–vector products of quantized operands: the operands, and checks that they fit each other.
//!
//! The arithmetic is defined in [`microscale_formats::dot`] and [`microscale_formats::weights`]; the CPU does
//! it in `cpu::gemv` and `cpu::weights`, GPUs in `gpu`.

use crate::element::Element;
use crate::error::{Error, OperandFault, Result};
use crate::shape::{QuantizedShape, Shape};
use microscale_formats::ScaleLayout;

/// The division of two tensors' rows into matrices and vectors.
///
/// With L batches, the matrix tensor `[L·M, K]` is L matrices of M rows, and the vector of batch l is row l ·
/// `vector_stride` of the vector tensor: rows between, such as padding to 128, are not looked at. The result
/// is `[L, M]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Matrices (L), at least 1; as many vectors.
    pub count: usize,
    /// Rows of the vector tensor from one batch's vector to the next.
    pub vector_stride: usize,
}

impl Default for Batch {
    /// One matrix, one vector.
    fn default() -> Self {
        Self::of(1)
    }
}

impl Batch {
    /// So many matrices, and their vectors one after the other.
    pub const fn of(count: usize) -> Self {
        Self { count, vector_stride: 1 }
    }

    /// The same, with vectors so many rows apart.
    pub const fn with_vector_stride(self, vector_stride: usize) -> Self {
        Self { vector_stride, ..self }
    }

    /// Checks that a matrix, vectors and an output of so many elements fit; returns the rows of one matrix
    /// (M).
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

/// A dtype of results of products on GPUs with activations of `T`: `T` itself, or f32.
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

/// Checks that weights, activations and an output of so many elements fit; returns the rows of the weights
/// (M).
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

/// Checks that weights are multiplied, and that so many activations fit them.
pub(crate) fn check_multiplied(weights: QuantizedShape, activations: usize, tokens: usize) -> Result<()> {
    check_weights_shape(weights)?;
    Shape::new(tokens, weights.cols).check("the activations", activations)
}

/// Checks that weights of a shape are multiplied with activations.
///
/// # Errors
/// [`OperandFault::Weights`] for other formats than NVFP4 and MXFP4, and [`OperandFault::Layout`] for swizzled scales.
pub(crate) fn check_weights_shape(weights: QuantizedShape) -> Result<()> {
    if !weights.format.is_multiplied() {
        return Err(Error::Operands(OperandFault::Weights { found: weights.format }));
    }
    if weights.scale_layout != ScaleLayout::Linear {
        return Err(Error::Operands(OperandFault::Layout { what: "weights" }));
    }
    Ok(())
}
