//! The convention of OpenAI's gpt-oss models, whose experts are MXFP4.
//!
//! A tensor `X` of sizes [E, K, N] is `….experts.gate_up_proj` or `….experts.down_proj`, and becomes:
//!
//! | part | name | dtype and sizes |
//! |---|---|---|
//! | codes | `X_blocks` | U8 [E, N, K/32, 16] |
//! | block scales | `X_scales` | U8 [E, N, K/32] |
//!
//! Blocks run along the inputs of a layer, and the model's parameter has those before the outputs: files hold
//! its transpose. All other weights stay as they are, for loaders look for no others.

use microscale::Format;
use serde_json::json;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;
use crate::read::description::Description;

/// The convention.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    describe,
    is_method: |method| method == "mxfp4",
    ..FormatSpec::new(CheckpointFormat::GptOss, STORED)
};

const STORED: &[Storage] = &[Storage {
    convention: CheckpointFormat::GptOss,
    format: Format::Mxfp4,
    codes_suffix: "_blocks",
    codes: FileDtype::U8,
    scales_suffix: "_scales",
    scales_beside: false,
    scales: FileDtype::U8,
    global_scale: None,
    input_scale: None,
    blocks: None,
    blocks_apart: true,
    transposed: true,
    experts: Some(EXPERTS),
    comfy: None,
}];

/// The parameters that hold all experts of a layer, by the ends of their names.
const EXPERTS: &[&str] = &[".experts.gate_up_proj", ".experts.down_proj"];

/// Writes the config. Loaders convert experts alone; the list of what they leave out is written for those who
/// read it.
fn describe(_: &[Group], ignore: &[String], description: &mut Description) {
    let quantization = json!({ "quant_method": "mxfp4", "modules_to_not_convert": ignore });
    description.set(quantization);
}
