//! The launch of the kernel that decodes MXFP4 activations to FP8 and packs them.

use super::fp8::DECODING_WARPS;
use super::params::PackParams;
use crate::grid::{Divider32, ScaleGrid};

/// Packs of eight tokens that a thread block decodes, at most. Each thread block first reads all
/// scales of its tokens.
pub const RUN: u32 = 16;

/// The launch of a kernel that decodes and packs.
#[derive(Clone, Copy, Debug)]
pub struct Decoding {
    /// The packs. The first `thread_blocks` of the launch decode.
    pub pack: PackParams,
    /// The activations.
    pub params: DecodingParams,
    /// All thread blocks. The last ones find the largest scales of rows of weights, a row per warp.
    pub thread_blocks: u32,
}

/// MXFP4 activations that are decoded to FP8.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DecodingParams {
    /// Positions of the scales.
    pub scales: ScaleGrid,
    /// Runs of packs per token tile: divides the number of a run of all token tiles.
    pub runs: Divider32,
    /// Factor of the results.
    pub alpha: f32,
    /// Always 0. Without it, there would be four bytes of padding.
    pub reserved: u32,
}

impl Decoding {
    /// The launch for rows of whole blocks, without gaps.
    pub fn new(pack: PackParams, scales: ScaleGrid, alpha: f32) -> Self {
        let runs = (pack.packs.divisor as u32).div_ceil(RUN);
        let eights_of_tokens = pack.padded_tokens() / 8;
        let pack = PackParams { thread_blocks: eights_of_tokens * runs, ..pack };
        let params = DecodingParams { scales, runs: Divider32::new(runs), alpha, reserved: 0 };
        Self { pack, params, thread_blocks: pack.thread_blocks + pack.rows.div_ceil(DECODING_WARPS) }
    }
}
