//! The launch of the kernels that quantize activations to FP8 and pack them.

use microscale_formats::ActivationLayout;

use super::PACK_COLUMNS;
use super::params::PackParams;
use crate::activations::{ActivationLaunch, ActivationParams, Output, RowOperation, RowScale};
use crate::launch::WARP;

/// The launch of a kernel that quantizes and packs.
#[derive(Clone, Copy, Debug)]
pub struct Quantizing {
    /// The packs. The first `thread_blocks` of the launch quantize.
    pub pack: PackParams,
    /// The rows.
    pub params: ActivationParams,
    /// All thread blocks. The last ones find the largest scales of rows of weights, a row per warp.
    pub launch: ActivationLaunch,
}

impl Quantizing {
    /// The launch for rows of values without gaps, with a scale per pack or per token. Rows start
    /// on 16 bytes if they are `aligned`.
    pub fn new(pack: PackParams, aligned: bool, per_pack: bool) -> Self {
        let cols = pack.packs.divisor as u32 * PACK_COLUMNS;
        let of_packs =
            ActivationParams::new(Output::Fp8, pack.padded_tokens(), cols, ActivationLayout::Linear);
        let (rows, cols, input_stride) = (pack.tokens, pack.cols as u32, pack.cols);
        let mut params = ActivationParams { rows, cols, input_stride, ..of_packs };
        params.aligned = u32::from(aligned);
        params.row_scale = if per_pack { RowScale::PerGroup } else { RowScale::PerToken } as u32;
        params.spread_rows(RowOperation::Plain);
        let mut launch = params.launch();
        let pack = PackParams { thread_blocks: launch.thread_blocks, ..pack };
        launch.thread_blocks += pack.rows.div_ceil(launch.threads / WARP);
        Self { pack, params, launch }
    }
}
