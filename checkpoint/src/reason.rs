//! Reasons for copying a tensor instead of quantizing it.

use std::fmt;

use crate::dtype::FileDtype;
use crate::names::role::Role;

/// The reason why a tensor is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// A pattern to exclude matches; the pattern.
    Excluded(String),
    /// Its dtype cannot be quantized.
    Dtype(FileDtype),
    /// Left alone by default.
    Role(Role),
    /// Fewer than two dimensions; how many.
    Dimensions(usize),
    /// Its name is not `*.weight`, and no pattern to include matches.
    NotAWeight,
    /// No elements.
    Empty,
    /// Its layer is not among the experts, which alone gpt-oss stores quantized.
    NotAnExpert,
    /// llama.cpp multiplies with no global scale of this layer; the architecture.
    NoGlobalScale(String),
    /// A rule of a recipe keeps it; the rule's patterns.
    KeptByRule(String),
    /// The tensor belongs to one of the first layers, as many as a recipe keeps.
    FirstLayers(usize),
    /// The tensor belongs to one of the last layers, as many as a recipe keeps.
    LastLayers(usize),
    /// Codes under scales that are not quantized, for this reason: their values are written, in bf16.
    Dequantized(Box<Reason>),
    /// Stored in ggml's Q8_0, and for this reason not in four bits.
    InQ8_0(Box<Reason>),
    /// The output convention cannot hold so many rows.
    Rows {
        /// Rows (N).
        rows: usize,
        /// The number that it should be a multiple of.
        multiple: usize,
    },
    /// The output convention cannot hold rows of this length.
    Columns {
        /// Elements in a row (K).
        cols: usize,
        /// The number that it should be a multiple of.
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
            Self::Role(Role::Transposed) => f.write_str("Conv1D, which loaders take unquantized alone"),
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
