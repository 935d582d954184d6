//! The measured operations: their names on the command line, sizes and dtypes.

use microscale::ActivationRounding;
use microscale::formats::words;
use microscale::{Dtype, Error, Result, Words};

use super::size::Size;

/// A measured operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Quantizes, with a given global scale in NVFP4.
    Quantize,
    /// Quantizes after a pass that computes NVFP4's global scale. Reads the input twice.
    AmaxQuantize,
    /// Computes the largest magnitude. Reads the input once.
    Amax,
    /// Dequantizes.
    Dequantize,
    /// Quantized matrices times quantized vectors. The dtype is the result's.
    Gemv,
    /// Quantized weights times unquantized activations. Activations and results have the dtype.
    GemvWeights,
    /// [`Self::GemvWeights`] for any number of tokens, with tensor cores on a GPU.
    GemmWeights,
    /// [`Self::GemmWeights`] with activations quantized to FP8, which the time includes (GPU only).
    GemmFp8,
    /// Quantized weights times activations in the same format, NVFP4 or MXFP4.
    GemmFp4,
    /// [`Self::GemmFp4`] with activations that are quantized, which the time includes; by a given
    /// global scale in NVFP4.
    QuantizeGemmFp4,
    /// [`Self::GemmFp4`] of two matrices, whose results a gate combines: half of the rows each.
    GemmFp4Gated,
    /// [`Self::GemmFp4`] with experts' weights.
    GemmExpertsFp4,
    /// Experts' quantized weights times the activations of their tokens (GPU only).
    GemmExperts,
    /// [`Self::GemmExperts`] with activations quantized to FP8, which the time includes (GPU only).
    GemmExpertsFp8,
    /// Quantizing activations after each row operation, in each format, and KV caches. Measured by
    /// itself.
    Activations,
    /// [`Self::Gemv`] with one row per warp (GPU only).
    #[cfg(feature = "internals")]
    GemvRows1,
    /// [`Self::Gemv`] with two rows per warp (GPU only).
    #[cfg(feature = "internals")]
    GemvRows2,
    /// [`Self::Gemv`] with four rows per warp (GPU only).
    #[cfg(feature = "internals")]
    GemvRows4,
    /// The CPU time of planning and launching [`Self::GemmWeights`] again (GPU only).
    #[cfg(feature = "internals")]
    Launch,
    /// The launch of an empty kernel (GPU only).
    #[cfg(feature = "internals")]
    Empty,
    /// The first use of each kernel (GPU only).
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
        ("gemm-fp8", Self::GemmFp8),
        ("gemm-fp4", Self::GemmFp4),
        ("quantize-gemm-fp4", Self::QuantizeGemmFp4),
        ("gemm-fp4-gated", Self::GemmFp4Gated),
        ("gemm-experts-fp4", Self::GemmExpertsFp4),
        ("gemm-experts", Self::GemmExperts),
        ("gemm-experts-fp8", Self::GemmExpertsFp8),
        ("activations", Self::Activations),
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

    /// Returns whether weights and activations are both in NVFP4 or both in MXFP4.
    pub(super) fn is_fp4(self) -> bool {
        matches!(self, Self::GemmFp4 | Self::QuantizeGemmFp4 | Self::GemmFp4Gated | Self::GemmExpertsFp4)
    }

    /// Returns whether experts' weights are multiplied.
    pub(crate) fn is_of_experts(self) -> bool {
        matches!(self, Self::GemmExperts | Self::GemmExpertsFp8 | Self::GemmExpertsFp4)
    }

    /// Returns the rows per warp of the measured kernel; `None` lets the library choose.
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

    /// Returns whether the operation needs a GPU.
    pub(crate) fn needs_gpu(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Launch | Self::Empty | Self::Load => true,
            Self::GemmExperts | Self::GemmExpertsFp8 | Self::GemmFp8 => true,
            _ => self.rows_per_warp().is_some(),
        }
    }

    /// Returns whether the operation measures only launches.
    pub(super) fn is_empty(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Empty => true,
            _ => false,
        }
    }

    /// Returns whether the operation has tokens.
    pub(crate) fn has_tokens(self) -> bool {
        match self {
            #[cfg(feature = "internals")]
            Self::Launch => true,
            Self::GemvWeights | Self::GemmWeights | Self::GemmFp8 => true,
            _ => self.is_fp4() || self.is_of_experts(),
        }
    }

    /// Returns whether the operation accepts a dtype. Tensor cores have no f32 activations.
    pub(crate) fn takes(self, dtype: Dtype, on_cpu: bool) -> bool {
        !self.has_tokens() || dtype != Dtype::F32 || on_cpu
    }

    /// Checks that the case exists.
    ///
    /// # Errors
    /// [`Error::NotMeasured`].
    pub(crate) fn check(self, dtype: Dtype, size: Size, on_cpu: bool) -> Result<()> {
        if !self.takes(dtype, on_cpu) {
            return Err(self.not_measured(NO_F32));
        }
        if self.has_tokens() && !self.is_of_experts() && size.batches > 1 {
            return Err(self.not_measured("with several matrices; write the shape as ROWSxCOLS"));
        }
        if !self.has_tokens() && size.tokens.is_some() {
            return Err(self.not_measured(
                "by tokens; leave them out, or measure gemv-weights, gemm-weights, gemm-fp8, gemm-fp4 or gemm-experts by itself",
            ));
        }
        if self == Self::GemmFp4Gated && !size.rows.is_multiple_of(2) {
            return Err(self.not_measured("with an odd number of rows; half of them are the gate's"));
        }
        Ok(())
    }

    /// Checks that a rounding of activations is measured.
    ///
    /// # Errors
    /// [`Error::NotMeasured`].
    pub(crate) fn check_activations(self, rounding: ActivationRounding, on_cpu: bool) -> Result<()> {
        if rounding == ActivationRounding::Exact || self == Self::GemmWeights && on_cpu {
            return Ok(());
        }
        Err(self.not_measured(
            "with rounded activations; leave --activations out, or choose --op gemm-weights --device cpu",
        ))
    }

    pub(super) fn not_measured(self, how: &'static str) -> Error {
        Error::NotMeasured { op: self.word(), how }
    }
}

/// Reason why f32 is not measured.
pub(super) const NO_F32: &str =
    "with activations in f32 on a GPU; choose the dtype f16 or bf16, or --device cpu";
