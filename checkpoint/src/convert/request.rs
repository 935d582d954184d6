//! A request to convert a checkpoint.

use microscale::Format;

use crate::checkpoint_format::CheckpointFormat;

/// Writing a quantized checkpoint in another checkpoint format: the same codes and block scales,
/// under its names and in its order, with its config.
///
/// A global scale may have to be inverted, which rounds it. So every tensor is dequantized before
/// and after, and [`Converted::rounded`](crate::Converted::rounded) lists the tensors whose values
/// are not the same to the bit.
#[derive(Clone, Copy, Debug)]
pub struct Convert {
    /// The checkpoint format to write.
    ///
    /// [`CheckpointFormat::Fp8Block`] needs no [`format`](Self::format): all tensors are cast to
    /// FP8 under a scale for each 128×128.
    pub to: CheckpointFormat,
    /// The format that tensors of other formats are cast to, if their values stay the same to the
    /// bit: from MXFP4 to NVFP4, layers that serving engines fuse under one global scale, and from
    /// both to MXFP8 with E4M3.
    pub format: Option<Format>,
    /// Rounds tensors without an exact cast, which are refused otherwise.
    ///
    /// Such a tensor becomes what [`Quantize`](crate::Quantize) makes of its f32 values by default,
    /// parts of a fused layer together. Blocks of 128×128 are rounded by transformers' rule, and
    /// 8-bit codes under scales, which otherwise become bf16 if that is exact, are rounded to it.
    pub requantize: bool,
}

impl Convert {
    /// Converts exactly, without a change of format.
    pub fn new(to: CheckpointFormat) -> Self {
        Self { to, format: None, requantize: false }
    }
}
