//! Faults of GPTQ's operands.

use microscale_formats::Format;

/// Why GPTQ refuses its operands.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GptqFault {
    /// The format is not one of 4-bit blocks with scales to choose.
    #[error("GPTQ quantizes to mxfp4 and nvfp4, not to {format}")]
    Format {
        /// The requested format.
        format: Format,
    },
    /// The number of the Hessian's entries does not match the columns.
    #[error(
        "the Hessian has {found} entries, but {columns} columns need {columns} × {columns} = {expected}; pass XᵀX of \
         the layer's inputs X"
    )]
    HessianLength {
        /// Columns of the matrix.
        columns: usize,
        /// Entries needed.
        expected: usize,
        /// Entries found.
        found: usize,
    },
    /// An entry is NaN or infinite, or a diagonal entry is negative.
    #[error(
        "the Hessian has {value} in row {row}, column {col}; its entries must be finite, and not negative on the \
         diagonal: look for NaN, infinities and overflow in the inputs that it was made of"
    )]
    HessianEntry {
        /// Row of the entry.
        row: usize,
        /// Column of the entry.
        col: usize,
        /// The entry.
        value: f32,
    },
    /// Mirrored entries differ by more than rounding explains.
    #[error(
        "the Hessian's entry in row {row}, column {col} differs from its mirror image by more than rounding explains; \
         pass XᵀX, or the mean of the matrix and its transpose"
    )]
    NotSymmetric {
        /// Row of the entry.
        row: usize,
        /// Column of the entry.
        col: usize,
    },
    /// The damped Hessian is not positive definite.
    #[error(
        "the Hessian with a damping of {damping} is not positive definite at column {column}; raise the damping"
    )]
    NotPositiveDefinite {
        /// The column where the factorization stopped.
        column: usize,
        /// The damping.
        damping: f64,
    },
    /// The damping is not a finite number of at least 0.
    #[error("the damping is {damping}; pass a finite number of at least 0, such as 0.01")]
    Damping {
        /// The given damping.
        damping: f64,
    },
    /// The factor was made for another number of columns or another format.
    #[error(
        "the factor is for {columns} columns in {format}, and the matrix has {found} in {recipe}; make a factor for these"
    )]
    Factor {
        /// Columns of the factor.
        columns: usize,
        /// The format of the factor.
        format: Format,
        /// Columns of the matrix.
        found: usize,
        /// The format of the recipe or the quantized matrix.
        recipe: Format,
    },
    /// Scales chosen in the loop need whole blocks.
    #[error(
        "the factor orders columns one by one, and scales that are chosen in the loop need whole blocks; choose static \
         scales or another order"
    )]
    ColumnOrder,
    /// The memory of a GPU is short.
    #[error(
        "the GPU has no room for {needed} bytes of GPTQ's working memory; free memory of the GPU, use one with more, or \
         quantize on the CPU"
    )]
    GpuMemory {
        /// Bytes of the allocation that failed.
        needed: usize,
    },
    /// The quantized matrix has another number of rows than the original.
    #[error("the quantized matrix has {found} rows and the original {expected}; pass the same matrix")]
    Rows {
        /// Rows of the original.
        expected: usize,
        /// Rows of the quantized matrix.
        found: usize,
    },
}

microscale_formats::debug_is_message!(GptqFault);
