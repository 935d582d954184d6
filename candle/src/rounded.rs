//! How layers round their inputs.

use microscale::{Fp8Options, Recipe};

/// The numbers that a layer rounds its inputs to.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RoundedInputs {
    /// INT8, 32 at a time with one f32 scale, as candle's quantized types round them. On CPUs only,
    /// where it is about twice as fast as f32.
    ///
    /// [`microscale::formats::int8`] defines the arithmetic and bounds its error.
    Int8,
    /// FP8 (E4M3), with a scale per token or per 128 columns.
    ///
    /// On a GPU this needs compute capability 9.0, and inputs in f16 or bf16. On a CPU it is slow,
    /// with the bits of Hopper's tensor cores for sums of 128 columns.
    Fp8(Fp8Options),
    /// MXFP4 or NVFP4, the format of the weights, by a recipe with linear or swizzled scales.
    ///
    /// NVFP4's global scale is given ([`microscale::Global::Given`]), or computed from all tokens.
    /// CPUs and GPUs with block scales multiply codes as they are stored. Other GPUs decode the
    /// inputs, exactly, to f16 or bf16.
    Fp4(Recipe),
    /// [`Self::Fp4`] with fast accumulation of MXFP4 on Hopper, as
    /// [`Linear::fast_accumulation`](microscale::gpu::Linear::fast_accumulation) allows. NVFP4,
    /// CPUs and products with experts ignore the difference.
    Fp4Fast(Recipe),
}
