//! Matrix–vector products of quantized operands: what goes in, and whether it fits.
//!
//! The arithmetic is defined in [`microscale_formats::dot`]; the CPU does it in `cpu::gemv`, GPUs in `gpu`, with the same bits.

use crate::cpu;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::recipe::Format;
use crate::tensor::{QuantizedShape, QuantizedTensor, Shape};
use microscale_formats::ScaleLayout;

/// How the rows of two tensors are matrices and vectors.
///
/// With L batches, the matrix tensor `[L·M, K]` is L matrices of M rows, and the vector of batch l is row l · `vector_stride` of the vector
/// tensor: rows between, such as padding to 128, are not looked at. The result is `[L, M]`.
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

    /// Checks that a matrix, vectors and an output of so many elements fit; returns the rows of one matrix (M).
    pub(crate) fn check(
        &self,
        matrix: QuantizedShape,
        vectors: QuantizedShape,
        output: usize,
    ) -> Result<usize> {
        let formats = (matrix.format, vectors.format);
        if !matches!(formats, (Format::Nvfp4, Format::Nvfp4) | (Format::Mxfp4, Format::Mxfp4)) {
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

/// Why operands do not go together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandFault {
    /// Formats that are not multiplied with each other.
    #[error("the matrix is in {matrix} and the vector in {vector}; quantize both to nvfp4, or both to mxfp4")]
    Formats {
        /// The matrix' format.
        matrix: Format,
        /// The vector's.
        vector: Format,
    },
    /// K differs.
    #[error("the matrix has {matrix} columns and the vector {vector}; they must have as many")]
    Columns {
        /// The matrix' columns.
        matrix: usize,
        /// The vector's.
        vector: usize,
    },
    /// Swizzled scales.
    #[error("the {what} has swizzled scales; convert them to the linear layout first (`convert_layout`)")]
    Layout {
        /// Matrix or vector.
        what: &'static str,
    },
    /// Rows that are no whole matrices.
    #[error(
        "{rows} rows are not {batches} matrices of as many rows; pass a number of batches that divides the rows"
    )]
    Batches {
        /// Rows of the matrix tensor.
        rows: usize,
        /// Matrices asked for.
        batches: usize,
    },
    /// Too few vectors.
    #[error(
        "the vector tensor has {rows} rows, too few for the vectors of {batches} batches, {vector_stride} rows apart; \
         pass more rows or a smaller stride"
    )]
    Vectors {
        /// Rows of the vector tensor.
        rows: usize,
        /// Batches.
        batches: usize,
        /// Rows from one vector to the next.
        vector_stride: usize,
    },
}

/// Multiplies matrices with vectors, both in NVFP4 or both in MXFP4, on the CPU: `out[l, m] = Σₖ matrix[l, m, k] · vector[l, k]`, with
/// block and global scales. See [`Batch`] for the shapes.
///
/// The sum is that of [`microscale_formats::dot`]: exact in all but extreme cases, in a given order in any case, and rounded once to `T`. A
/// GPU gives the same bits. NaN scales and infinite sums come out as canonical NaN and infinities.
///
/// # Errors
/// [`Error::Operands`] if they do not fit each other, and [`Error::Length`] if `out` has fewer elements than `[L, M]`.
pub fn gemv<T: Element>(
    matrix: &QuantizedTensor,
    vectors: &QuantizedTensor,
    batch: Batch,
    out: &mut [T],
) -> Result<()> {
    cpu::gemv(matrix, vectors, batch, out)
}
