//! The operations that can be measured, their names on the command line, and the sizes and dtypes that each
//! takes.

use microscale::formats::words;
use microscale::{Dtype, Error, Result, Words};

use super::size::Size;

/// A measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Unquantized values to codes and scales; NVFP4's global scale is given.
    Quantize,
    /// Unquantized values to codes and scales, after the pass that NVFP4's global scale is computed from: two
    /// reads.
    AmaxQuantize,
    /// The largest magnitude: one read.
    Amax,
    /// Codes and scales to unquantized values.
    Dequantize,
    /// Quantized matrices times quantized vectors; the dtype is the result's.
    Gemv,
    /// Quantized weights times activations that are not quantized; the dtype is that of activations and
    /// results.
    GemvWeights,
    /// [`Self::GemvWeights`] for any number of tokens, which tensor cores compute on a GPU.
    GemmWeights,
    /// Experts' quantized weights times the activations of the tokens that choose them (GPU only).
    GemmExperts,
    /// [`Self::Gemv`] by warps of one row (GPU only).
    #[cfg(feature = "internals")]
    GemvRows1,
    /// [`Self::Gemv`] by warps of two rows (GPU only).
    #[cfg(feature = "internals")]
    GemvRows2,
    /// [`Self::Gemv`] by warps of four rows (GPU only).
    #[cfg(feature = "internals")]
    GemvRows4,
    /// The CPU's time for planning and launching [`Self::GemmWeights`] again (GPU only).
    #[cfg(feature = "internals")]
    Launch,
    /// A kernel that does nothing (GPU only): the cost of a launch.
    #[cfg(feature = "internals")]
    Empty,
    /// Making each kernel ready (GPU only): the cost of a first use.
    #[cfg(feature = "internals")]
    Load,
}

impl Words for Op {
    const WHAT: &'static str = "operation";

    const WORDS: &'static [(&'static str, Self)] = &[
        ("quantize", Self::Quantize),
        ("amax-quantize", Self::AmaxQuantize),
        ("amax", Self::Amax),
        ("dequantize", Self::Dequantize),
        ("gemv", Self::Gemv),
        ("gemv-weights", Self::GemvWeights),
        ("gemm-weights", Self::GemmWeights),
        ("gemm-experts", Self::GemmExperts),
        #[cfg(feature = "internals")]
        ("gemv-rows1", Self::GemvRows1),
        #[cfg(feature = "internals")]
        ("gemv-rows2", Self::GemvRows2),
        #[cfg(feature = "internals")]
        ("gemv-rows4", Self::GemvRows4),
        #[cfg(feature = "internals")]
        ("launch", Self::Launch),
        #[cfg(feature = "internals")]
        ("empty", Self::Empty),
        #[cfg(feature = "internals")]
        ("load", Self::Load),
    ];
}

words!(Op);

impl Op {
    /// Returns whether it is a product of quantized operands.
    pub(super) fn is_gemv(self) -> bool {
        self == Self::Gemv || self.rows_per_warp().is_some()
    }

    /// The rows per warp of the measured kernel; `None` where the library chooses.
    pub(super) fn rows_per_warp(self) -> Option<u32> {
        match self {
            #[cfg(feature = "internals")]
            Self::GemvRows1 => Some(1),
            #[cfg(feature = "internals")]
            Self::GemvRows2 => Some(2),
            #[cfg(feature = "internals")]
            Self::GemvRows4 => Some(4),
            _ => None,
        }
    }

    /// Returns whether only GPUs have it.
    pub(crate) fn needs_gpu(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Launch | Self::Empty | Self::Load => true,
            Self::GemmExperts => true,
            _ => self.rows_per_warp().is_some(),
        }
    }

    /// Returns whether nothing but launching is measured.
    pub(super) fn is_empty(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Empty => true,
            _ => false,
        }
    }

    /// Returns whether it multiplies tokens.
    pub(crate) fn has_tokens(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Launch => true,
            _ => matches!(self, Self::GemvWeights | Self::GemmWeights | Self::GemmExperts),
        }
    }

    /// Returns whether it takes values of a dtype: tensor cores take no activations in f32.
    pub(crate) fn takes(self, dtype: Dtype, on_cpu: bool) -> bool {
        !self.has_tokens() || dtype != Dtype::F32 || on_cpu
    }

    /// Checks that there is such a thing to measure.
    ///
    /// # Errors
    /// [`Error::NotMeasured`].
    pub(crate) fn check(self, dtype: Dtype, size: Size, on_cpu: bool) -> Result<()> {
        if !self.takes(dtype, on_cpu) {
            return Err(self.not_measured(NO_F32));
        }
        if self.has_tokens() && self != Self::GemmExperts && size.batches > 1 {
            return Err(self.not_measured("with several matrices; write the shape as ROWSxCOLS"));
        }
        if !self.has_tokens() && size.tokens.is_some() {
            return Err(self.not_measured(
                "by tokens; leave them out, or measure gemv-weights, gemm-weights or gemm-experts by itself",
            ));
        }
        Ok(())
    }

    pub(super) fn not_measured(self, how: &'static str) -> Error {
        Error::NotMeasured { op: self.word(), how }
    }
}

/// Why f32 is not measured.
pub(super) const NO_F32: &str =
    "with activations in f32 on a GPU; choose the dtype f16 or bf16, or --device cpu";
