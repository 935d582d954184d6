//! The convention of block FP8, as DeepSeek-V3 and Qwen3-FP8 are published and transformers' method `fp8` reads. Its tensors
//! have no format of [`microscale::Format`]: [`scaled`](crate::checkpoint_formats::scaled) reads them, and converting alone writes them.
//!
//! A tensor `X` of sizes [N, K] is codes F8_E4M3 [N, K] under that name, and scales F32 [⌈N/128⌉, ⌈K/128⌉], `X_scale_inv`, which
//! codes are multiplied with. More dimensions come before these.

use serde_json::json;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::read::description::Description;

/// The convention. Configs of the method are those of [`deepseek`](crate::checkpoint_formats::deepseek) too, and that reads them.
pub(crate) const SPEC: FormatSpec =
    FormatSpec { written: false, ..FormatSpec::new(CheckpointFormat::Fp8Block, &[]) };

/// Rows and columns of a block.
pub(crate) const BLOCK: [usize; 2] = [128, 128];

/// The end of the names of scales, after those of their codes.
pub(crate) const SCALES: &str = "_scale_inv";

/// Writes the config.
pub(crate) fn describe(ignore: &[String], description: &mut Description) {
    description.set(json!({
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ignore,
        "quant_method": "fp8",
        "weight_block_size": BLOCK,
    }));
}
