//! The checkpoint format of OpenAI's gpt-oss models, whose experts are MXFP4.
//!
//! A tensor `X` of shape [E, K, N] is named `….experts.gate_up_proj` or `….experts.down_proj`:
//!
//! | part | name | dtype and shape |
//! |---|---|---|
//! | codes | `X_blocks` | U8 [E, N, K/32, 16] |
//! | block scales | `X_scales` | U8 [E, N, K/32] |
//!
//! Blocks run along the inputs of a layer. In the model's parameter these come before the outputs,
//! so files hold its transpose. All other weights stay unquantized, because loaders convert only
//! experts.

use microscale::Format;
use serde_json::json;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::Storage;
use crate::dtype::FileDtype;
use crate::read::description::Description;

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    describe,
    is_method: |method| method == "mxfp4",
    ..FormatSpec::new(CheckpointFormat::GptOss, STORED)
};

const STORED: &[Storage] = &[Storage {
    blocks_apart: true,
    transposed: true,
    experts: Some(EXPERTS),
    ..Storage::plain(
        CheckpointFormat::GptOss,
        Format::Mxfp4,
        ("_blocks", FileDtype::U8),
        (PartName::After("_scales"), FileDtype::U8),
    )
}];

/// Suffixes of the parameters with all experts of a layer.
const EXPERTS: &[&str] = &[".experts.gate_up_proj", ".experts.down_proj"];

/// Writes the config. Loaders convert only experts. The list of unquantized layers is for readers.
fn describe(_: &[Group], ignore: &[String], description: &mut Description) {
    let quantization = json!({ "quant_method": "mxfp4", "modules_to_not_convert": ignore });
    description.set(quantization);
}
