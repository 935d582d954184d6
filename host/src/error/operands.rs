//! Faults of the operands of a product.

use microscale_formats::Format;

/// The reason why operands do not go together.
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
    /// Weights of a format that is not multiplied with activations.
    #[error("the weights are in {found}; quantize them to nvfp4 or mxfp4")]
    Weights {
        /// Their format.
        found: Format,
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
        /// Matrix, vector or weights.
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
    /// Pairs of a token and an expert that are not those of whole tokens.
    #[error("{pairs} experts are not {top_k} of each token; pass a top_k that divides their number")]
    TopK {
        /// Pairs of a token and an expert.
        pairs: usize,
        /// Pairs of a token.
        top_k: usize,
    },
    /// More than a GPU multiplies.
    #[error("{found} {what} are more than a GPU multiplies; pass fewer than {limit}, or multiply on the CPU")]
    Limit {
        /// Rows of activations, or columns.
        what: &'static str,
        /// The number that there are.
        found: usize,
        /// The first number that is too many.
        limit: u64,
    },
    /// A workspace for fewer tokens or other weights.
    #[error(
        "the workspace has {found} bytes, and this product works in {needed}; make one for these weights and as many tokens"
    )]
    Workspace {
        /// Bytes that the product works in.
        needed: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Weights of a gate that are not pairs of rows.
    #[error(
        "a gate needs pairs of rows, and the weights have {rows}; interleave the rows of gate and up (`interleave_rows`)"
    )]
    Gate {
        /// Rows of the weights.
        rows: usize,
    },
    /// Matrices whose rows cannot come in turn.
    #[error("gate and up differ in shape, format or global scale; quantize them with one global scale")]
    Interleaved,
    /// Experts that do not go together.
    #[error("the experts are not {what}; pass experts that are")]
    Experts {
        /// The property that they must have.
        what: &'static str,
    },
    /// A routing of other experts, or for fewer pairs.
    #[error(
        "the routing has room for {pairs} pairs of a token and one of {experts} experts; make one with room for these"
    )]
    Routing {
        /// Experts.
        experts: usize,
        /// Pairs.
        pairs: usize,
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
