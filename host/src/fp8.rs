//! Products of 4-bit weights and FP8 activations: operands, and checks that they match.

use microscale_formats::Format;
use microscale_formats::activations::GROUP;

use crate::error::{Error, OperandFault, Result};
use crate::gemv::check_weights_shape;
use crate::shape::QuantizedShape;

/// Options of products of 4-bit weights and FP8 activations.
///
/// By default there is a scale per token, and NVFP4 weights are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fp8Options {
    /// Activations have a scale per 128 columns, like DeepSeek's, instead of one per token.
    pub per_group: bool,
    /// Allows NVFP4 weights: each weight times its block scale is rounded to E4M3.
    ///
    /// Like activations, each weight loses a relative error of at most 2⁻⁴.
    pub round_weights: bool,
    /// Allows GPUs to add all of K in the tensor cores, which keep 13 fraction bits of sums,
    /// instead of 128 or 32 columns at a time. Products of many tokens are faster.
    ///
    /// cuBLASLt and `torch._scaled_mm` call this fast accumulation.
    /// [`fp8_dot`](microscale_formats::fp8_dot) has all definitions and their error bounds.
    /// Products with a scale per group or with experts' weights, and CPUs, ignore it.
    pub fast_accumulation: bool,
}

/// Activations of a product with FP8 activations, `[N, K]` without gaps.
#[derive(Clone, Copy, Debug)]
pub enum Fp8Rows<'a, T> {
    /// Values in f32, f16 or bf16.
    ///
    /// They are quantized first, as by [`quantize_activations`](crate::quantize_activations()).
    Values(&'a [T]),
    /// E4M3 codes and the scales that multiply them.
    Quantized {
        /// Codes, `[N, K]`.
        codes: &'a [u8],
        /// Scales: `[N]`, or per group `[N, K / 128]`, rounded up.
        scales: &'a [f32],
    },
}

impl Fp8Options {
    /// Checks that weights of a shape can be multiplied with FP8 activations.
    ///
    /// # Errors
    /// [`OperandFault::RoundedWeights`] for NVFP4 weights without [`Self::round_weights`],
    /// [`OperandFault::Weights`] for formats other than NVFP4 and MXFP4, and
    /// [`OperandFault::Layout`] for swizzled scales.
    pub fn check_weights(self, weights: QuantizedShape) -> Result<()> {
        check_weights_shape(weights)?;
        if weights.format == Format::Nvfp4 && !self.round_weights {
            return Err(Error::Operands(OperandFault::RoundedWeights));
        }
        Ok(())
    }

    /// The scales per token of activations with `cols` columns.
    pub(crate) fn token_scales(self, cols: usize) -> usize {
        // A token of one group has one scale, like other tokens.
        if self.per_group { cols.div_ceil(GROUP).max(1) } else { 1 }
    }
}
