//! The operations that can be measured, their names on the command line, and the sizes and dtypes that each
//! takes.

use microscale::formats::words;
#[cfg(feature = "cuda")]
use microscale::gpu::GemvKernel;
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
    /// [`Self::Gemv`] by the kernel whose warps take one row (GPU only).
    GemvRows1,
    /// [`Self::Gemv`] by the kernel whose warps take two rows (GPU only).
    GemvRows2,
    /// [`Self::Gemv`] by the kernel whose warps take four rows (GPU only).
    GemvRows4,
    /// The ladder's first step (GPU only): a thread handles a block.
    QuantizeThreadABlock,
    /// The ladder's second step (GPU only): a warp handles a block.
    QuantizeWarpABlock,
    /// A kernel that does nothing (GPU only): the cost of a launch.
    Empty,
    /// Making each kernel ready (GPU only): the cost of a first use.
    Load,
}

words!(Op, "operation" {
    Self::Quantize = "quantize",
    Self::AmaxQuantize = "amax-quantize",
    Self::Amax = "amax",
    Self::Dequantize = "dequantize",
    Self::Gemv = "gemv",
    Self::GemvWeights = "gemv-weights",
    Self::GemmWeights = "gemm-weights",
    Self::GemmExperts = "gemm-experts",
    Self::GemvRows1 = "gemv-rows1",
    Self::GemvRows2 = "gemv-rows2",
    Self::GemvRows4 = "gemv-rows4",
    Self::QuantizeThreadABlock = "quantize-thread-a-block",
    Self::QuantizeWarpABlock = "quantize-warp-a-block",
    Self::Empty = "empty",
    Self::Load = "load",
});

impl Op {
    /// The ladder, from the first version that one would write to the shipped kernel.
    pub(crate) const LADDER: [Self; 3] =
        [Self::QuantizeThreadABlock, Self::QuantizeWarpABlock, Self::Quantize];

    /// The kernels that products are chosen from.
    pub(crate) const GEMV_KERNELS: [Self; 3] = [Self::GemvRows1, Self::GemvRows2, Self::GemvRows4];

    /// Returns whether it is a product of quantized operands.
    pub(super) fn is_gemv(self) -> bool {
        self == Self::Gemv || Self::GEMV_KERNELS.contains(&self)
    }

    /// The kernel that is measured; none where the table of choices says which.
    #[cfg(feature = "cuda")]
    pub(super) fn gemv_kernel(self) -> Option<GemvKernel> {
        match self {
            Self::GemvRows1 => Some(GemvKernel::Rows1),
            Self::GemvRows2 => Some(GemvKernel::Rows2),
            Self::GemvRows4 => Some(GemvKernel::Rows4),
            _ => None,
        }
    }

    /// Returns whether only GPUs have it.
    pub(crate) fn needs_gpu(self) -> bool {
        match self {
            Self::QuantizeThreadABlock
            | Self::QuantizeWarpABlock
            | Self::Empty
            | Self::Load
            | Self::GemmExperts => true,
            _ => Self::GEMV_KERNELS.contains(&self),
        }
    }

    /// Returns whether it multiplies tokens.
    pub(crate) fn has_tokens(self) -> bool {
        matches!(self, Self::GemvWeights | Self::GemmWeights | Self::GemmExperts)
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
