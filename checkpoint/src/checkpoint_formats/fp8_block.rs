//! Block FP8, as DeepSeek-V3 and Qwen3-FP8 are published and the method `fp8` of transformers
//! reads.
//!
//! Its tensors have no [`microscale::Format`]: only `convert` writes them, and
//! [`w8_sources`](crate::checkpoint_formats::w8_sources) reads them.
//!
//! | tensor `X` of shape [N, K] | codes | scales |
//! |---|---|---|
//! | FP8 | `X` F8_E4M3 [N, K] | `X_scale_inv` F32 [⌈N/128⌉, ⌈K/128⌉], a multiplier |
//!
//! Leading dimensions are kept.

use serde_json::json;

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::spec::FormatSpec;
use crate::read::description::Description;

/// The row of the table. [`deepseek`](crate::checkpoint_formats::deepseek) has the same method in
/// configs, and recognizes it.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: Written::ByConvert,
    describe: |_, ignore, description| describe(ignore, description),
    ..FormatSpec::new(CheckpointFormat::Fp8Block, &[])
};

/// Rows and columns of a block.
pub(crate) const BLOCK: [usize; 2] = [128, 128];

/// Suffix of the scales' name, after the codes' name.
pub(crate) const SCALES: &str = "_scale_inv";

/// Writes the config.
fn describe(ignore: &[String], description: &mut Description) {
    description.set(json!({
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ignore,
        "quant_method": "fp8",
        "weight_block_size": BLOCK,
    }));
}
