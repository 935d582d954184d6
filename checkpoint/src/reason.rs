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

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded(pattern) => write!(f, "excluded by {pattern:?}"),
            Self::Dtype(dtype) => write!(f, "dtype {dtype}"),
            Self::Role(Role::Norm) => f.write_str("norm"),
            Self::Role(Role::Embedding) => f.write_str("embedding"),
            Self::Role(Role::OutputHead) => f.write_str("output head"),
            Self::Role(Role::Router) => f.write_str("router"),
            Self::Role(Role::Convolution) => f.write_str("convolution"),
            Self::Role(Role::Transposed) => f.write_str("Conv1D, which loaders take only unquantized"),
            Self::Dimensions(0) => f.write_str("scalar"),
            Self::Dimensions(n) => write!(f, "{n}-D"),
            Self::NotAWeight => f.write_str("not called *.weight"),
            Self::Empty => f.write_str("no elements"),
            Self::NotAnExpert => f.write_str("not gpt-oss experts"),
            Self::NoGlobalScale(architecture) => {
                write!(
                    f,
                    "llama.cpp's {architecture} takes no global scale for it, and --global-scale none has none"
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
