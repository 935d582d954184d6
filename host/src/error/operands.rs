//! Faults of the operands of a product.

use microscale_formats::Format;

use crate::rounding::ActivationRounding;

/// Why operands do not match.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandFault {
    /// Tensors of these formats are not multiplied with each other.
    #[error("the matrix is in {matrix} and the vector in {vector}; quantize both to nvfp4, or both to mxfp4")]
    Formats {
        /// The matrix's format.
        matrix: Format,
        /// The vector's format.
        vector: Format,
    },
    /// Weights of this format are not multiplied with activations.
    #[error("the weights are in {found}; quantize them to nvfp4 or mxfp4")]
    Weights {
        /// The weights' format.
        found: Format,
    },
    /// K differs.
    #[error("the matrix has {matrix} columns and the vector {vector}; both must have the same number")]
    Columns {
        /// The matrix's columns.
        matrix: usize,
        /// The vector's columns.
        vector: usize,
    },
    /// No kernel multiplies FP8 activations on the GPU.
    #[error(
        "this GPU has no product of 4-bit weights and FP8 activations, which needs compute capability 9.0; \
         multiply activations in f16 or bf16 (linear)"
    )]
    NoFp8,
    /// NVFP4 weights do not become FP8 numbers exactly.
    #[error(
        "NVFP4 weights times FP8 activations round each weight times its scale to FP8; allow it with \
         round_weights, use MXFP4 weights, which are exact, or activations in f16 or bf16 (linear)"
    )]
    RoundedWeights,
    /// The scales of an expert do not start on 4 bytes, which kernels for FP8 activations need.
    #[error(
        "FP8 activations need experts of whole words of scales, and these have {rows} rows of {cols} \
         columns; pad the rows to a multiple of 4 and, for NVFP4, the columns to a multiple of 64, or \
         multiply activations in f16 or bf16 (linear_experts)"
    )]
    Fp8Experts {
        /// Rows of an expert's weights.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// K differs between activations and weights.
    #[error(
        "the activations have {activations} columns and the weights {weights}; pass activations of shape [tokens, {weights}]"
    )]
    Activations {
        /// The weights' columns.
        weights: usize,
        /// The activations' columns.
        activations: usize,
    },
    /// GPUs do not round activations.
    #[error("GPUs do not round activations to {rounding}; use exact activations, or multiply on the CPU")]
    Rounding {
        /// The requested rounding of activations.
        rounding: ActivationRounding,
    },
    /// The scales are swizzled.
    #[error(
        "the scales of the {what} are swizzled; convert them to the linear layout first (`convert_layout`)"
    )]
    Layout {
        /// Matrix, vector or weights.
        what: &'static str,
    },
    /// The rows cannot be divided into whole matrices.
    #[error(
        "{rows} rows cannot be divided into {batches} equal matrices; pass a number of batches that divides the rows"
    )]
    Batches {
        /// Rows of the matrix tensor.
        rows: usize,
        /// The requested number of matrices.
        batches: usize,
    },
    /// The pairs of a token and an expert cannot be divided into whole tokens.
    #[error(
        "{pairs} experts cannot be divided into {top_k} per token; pass a top_k that divides their number"
    )]
    TopK {
        /// Pairs of a token and an expert.
        pairs: usize,
        /// Pairs per token.
        top_k: usize,
    },
    /// The product exceeds a limit of GPUs.
    #[error("{found} {what} are more than a GPU multiplies; pass fewer than {limit}, or multiply on the CPU")]
    Limit {
        /// Rows of activations, or columns.
        what: &'static str,
        /// The number found.
        found: usize,
        /// The smallest number that is too large.
        limit: u64,
    },
    /// The workspace is for fewer tokens or other weights.
    #[error(
        "the workspace has {found} bytes, and this product needs {needed}; make one for these weights and this number of tokens"
    )]
    Workspace {
        /// Required bytes.
        needed: u64,
        /// Bytes found.
        found: u64,
    },
    /// The weights of a gate are not pairs of rows.
    #[error(
        "a gate needs pairs of rows, and the weights have {rows}; interleave the rows of gate and up (`interleave_rows`)"
    )]
    Gate {
        /// Rows of the weights.
        rows: usize,
    },
    /// Two matrices of a gate differ in rows.
    #[error("the gate has {gate} rows and up has {up}; both must have the same number")]
    GateRows {
        /// Rows of the gate's weights.
        gate: usize,
        /// Rows of the other weights.
        up: usize,
    },
    /// The rows of two matrices cannot be interleaved.
    #[error("gate and up differ in shape, format or global scale; quantize them with one global scale")]
    Interleaved,
    /// The experts do not match each other.
    #[error("the experts are not {what}; pass experts that are")]
    Experts {
        /// The required property.
        what: &'static str,
    },
    /// The routing is for other experts, or for fewer pairs.
    #[error(
        "the routing has room for {pairs} pairs and {experts} experts; make one with room for this product"
    )]
    Routing {
        /// Experts.
        experts: usize,
        /// Pairs.
        pairs: usize,
    },
    /// Activations have no global scale per token, or have unplanned ones.
    #[error("{what}")]
    TokenScales {
        /// The difference, and the way out.
        what: &'static str,
    },
    /// Results are not quantized like this, or are in other memory.
    #[error("{what}")]
    Results {
        /// The requirement, and the way out.
        what: &'static str,
    },
    /// There are too few vectors.
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

microscale_formats::debug_is_message!(OperandFault);
