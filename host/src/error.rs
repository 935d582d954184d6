//! What can go wrong with tensors. Checkpoint files have their own errors, in [`crate::checkpoint`].

use crate::report::{Position, Report};

/// The result of the library's tensor operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a tensor could not be quantized or dequantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The slice is too short for the shape.
    #[error(
        "{what} has {found} elements, but {rows} rows of {cols} with row stride {row_stride} reach over {expected}; \
         pass a longer slice or a smaller shape"
    )]
    Length {
        /// Which slice.
        what: &'static str,
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Row stride of the shape, in elements.
        row_stride: usize,
        /// Elements that the shape reaches over.
        expected: usize,
        /// Elements in the slice.
        found: usize,
    },

    /// Rows would overlap.
    #[error(
        "the row stride {row_stride} is smaller than the {cols} columns, so rows would overlap; raise it to {cols} or more"
    )]
    RowStride {
        /// Columns of the shape.
        cols: usize,
        /// The stride asked for, in elements.
        row_stride: usize,
    },

    /// The shape counts more elements than can be addressed.
    #[error("{rows} rows of {cols} with row stride {row_stride} are more elements than can be addressed")]
    TooLarge {
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Row stride of the shape, in elements.
        row_stride: usize,
    },

    /// Codes or scales of another length than the shape needs.
    #[error("{what} has {found} bytes, but {rows} rows of {cols} in {format} need exactly {expected}")]
    QuantizedLength {
        /// Codes or scales.
        what: &'static str,
        /// The format.
        format: crate::Format,
        /// Rows of the shape.
        rows: usize,
        /// Columns of the shape.
        cols: usize,
        /// Bytes needed.
        expected: usize,
        /// Bytes found.
        found: usize,
    },

    /// The input holds NaN or infinities and the policy is to refuse them.
    #[error(
        "the input holds {} NaN and {} infinite values, the first at row {}, column {}; \
         choose the non-finite policy propagate or saturate to go on",
        .report.nan, .report.infinite, .first.row, .first.col
    )]
    NonFinite {
        /// The first one.
        first: Position,
        /// All counts of the tensor.
        report: Report,
    },

    /// An output differs from the reference's: a defect of this library, or of the machine.
    #[error("the output of {0} differs from the reference implementation's; please report this")]
    Wrong(&'static str),

    /// No GPU can be used.
    #[error("no GPU can be used: {0}")]
    NoGpu(String),

    /// The CUDA driver refused a call.
    #[error("the GPU failed while {doing}: {message}")]
    Gpu {
        /// What was asked of it.
        doing: &'static str,
        /// The driver's word.
        message: String,
    },
}
