//! Reasons for copying a tensor instead of quantizing it.

use std::fmt;

use crate::dtype::FileDtype;
use crate::names::role::Role;

/// Why a tensor is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// An `exclude` pattern matches; the pattern.
    Excluded(String),
    /// Its dtype cannot be quantized.
    Dtype(FileDtype),
    /// Its role is unquantized by default.
    Role(Role),
    /// It has fewer than two dimensions; their number.
    Dimensions(usize),
    /// Its name is not `*.weight`, and no `include` pattern matches.
    NotAWeight,
    /// It has more than two dimensions; their number. Loaders take only matrices quantized.
    NotAMatrix(usize),
    /// The config of an FP8 or INT8 checkpoint exempts its layer from quantization.
    NotConverted,
    /// It is an expert of a layer whose experts cannot all be quantized; the reason of the other.
    OtherExpert(Box<Reason>),
    /// It has no elements.
    Empty,
    /// It is not an expert: gpt-oss stores only experts quantized.
    NotAnExpert,
    /// llama.cpp applies no global scale to this layer; the architecture.
    NoGlobalScale(String),
    /// A rule of the recipe keeps it; the rule's patterns.
    KeptByRule(String),
    /// It belongs to the first layers that the recipe keeps; their number.
    FirstLayers(usize),
    /// It belongs to the last layers that the recipe keeps; their number.
    LastLayers(usize),
    /// FP8 or INT8 weights that are not quantized for this reason. They are written in bf16.
    Dequantized(Box<Reason>),
    /// Stored as Q8_0, and not in four bits for this reason.
    InQ8_0(Box<Reason>),
    /// The checkpoint format cannot store this number of rows.
    Rows {
        /// Rows (N).
        rows: usize,
        /// The number of rows must be a multiple of this.
        multiple: usize,
    },
    /// The checkpoint format cannot store rows of this length.
    Columns {
        /// Elements per row (K).
        cols: usize,
        /// The length must be a multiple of this.
        block: usize,
    },
}

impl Reason {
    /// Returns the reason for the largest of some tensors, each given by its elements.
    pub(crate) fn of_largest<'r>(copied: impl Iterator<Item = (u64, &'r Self)>) -> Option<Box<Self>> {
        let largest = copied.max_by_key(|(elements, _)| *elements)?;
        Some(Box::new(largest.1.clone()))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded(pattern) => write!(f, "excluded by {pattern:?}"),
            Self::Dtype(dtype) => write!(f, "dtype {dtype}"),
            Self::Role(Role::Norm) => f.write_str("norm"),
            Self::Role(Role::Embedding) => f.write_str("embedding"),
            Self::Role(Role::OutputHead) => f.write_str("output head"),
            Self::Role(Role::Router) => f.write_str("router"),
            Self::Role(Role::SparseAttention) => f.write_str("indexer or compressor of sparse attention"),
            Self::Role(Role::NextToken) => f.write_str("input projection of multi-token prediction"),
            Self::Role(Role::Convolution) => f.write_str("convolution"),
            Self::Role(Role::Converted) => f.write_str("transformers loads it only unquantized"),
            Self::Role(Role::Transposed) => f.write_str("Conv1D, which loaders take only unquantized"),
            Self::Dimensions(0) => f.write_str("scalar"),
            Self::Dimensions(n) => write!(f, "{n}-D"),
            Self::NotAWeight => f.write_str("not called *.weight"),
            Self::NotAMatrix(n) => write!(f, "{n}-D, and loaders take only matrices quantized"),
            Self::NotConverted => f.write_str("unquantized by the input's own config"),
            Self::OtherExpert(reason) => write!(f, "experts of its layer cannot be quantized: {reason}"),
            Self::Empty => f.write_str("no elements"),
            Self::NotAnExpert => f.write_str("not gpt-oss experts"),
            Self::NoGlobalScale(architecture) => {
                write!(
                    f,
                    "llama.cpp's {architecture} takes no global scale for it; --global-scale none stores it without one"
                )
            }
            Self::KeptByRule(patterns) => write!(f, "kept by a rule for {patterns}"),
            Self::FirstLayers(1) => f.write_str("of the first layer"),
            Self::FirstLayers(n) => write!(f, "of the first {n} layers"),
            Self::LastLayers(1) => f.write_str("of the last layer"),
            Self::LastLayers(n) => write!(f, "of the last {n} layers"),
            Self::Dequantized(reason) => write!(f, "{reason}; dequantized to bf16"),
            Self::InQ8_0(reason) => write!(f, "{reason}; in q8_0"),
            Self::Rows { rows, multiple } => write!(f, "N = {rows} is not a multiple of {multiple}"),
            Self::Columns { cols, block } => write!(f, "K = {cols} is not a multiple of {block}"),
        }
    }
}
