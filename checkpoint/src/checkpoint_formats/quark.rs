//! The checkpoint format of AMD Quark (0.13), used for MXFP4 of Kimi-K2 and DeepSeek-R1. Read-only.
//!
//! | tensor `X` of shape [N, K] | codes | block scales | global scale |
//! |---|---|---|---|
//! | mxfp4 | `X` U8 [N, K/2], low nibble first | `X_scale` U8 [N, K/32] | |
//! | nvfp4 | `X` U8 [N, K/2], low nibble first | `X_scale` F8_E4M3 [N, K/16] | `X_scale_2` F32 [], a multiplier |
//!
//! NVFP4 has ModelOpt's names, except for the global scale of a layer's inputs: `input_scale_2`
//! instead of `weight`, F32 [], a multiplier.

use microscale::Format;
use microscale::formats::nvfp4::Direction;
use serde_json::{Map, Value};

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::modelopt::GLOBAL_SCALE;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Repeat, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::quantization;

const INPUT_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".input_scale_2"), Direction::Multiplier, Repeat::Scalar);

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    written: Written::No,
    is_method: |method| method == "quark",
    ..FormatSpec::new(CheckpointFormat::Quark, STORED)
};

const STORED: &[Storage] = &[
    stored(Format::Mxfp4, FileDtype::U8),
    Storage {
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        ..stored(Format::Nvfp4, FileDtype::F8_E4M3)
    },
];

const fn stored(format: Format, scales: FileDtype) -> Storage {
    let scales = (PartName::After("_scale"), scales);
    Storage::plain(CheckpointFormat::Quark, format, ("", FileDtype::U8), scales)
}

/// Returns why U8 scales are not E8M0, by the config: AMD FP4 has scales in E5M3, under the names,
/// dtypes and shapes of MXFP4.
pub(crate) fn other_scales(checkpoint: &Checkpoint) -> Option<String> {
    let config = checkpoint.config.as_ref()?;
    let quantization = quantization(&config.object.json)?;
    let layers = ["layer_quant_config", "layer_type_quant_config"];
    let layers = layers.iter().filter_map(|key| quantization.get(*key)?.as_object()).flat_map(Map::values);
    let weights = quantization.get("global_quant_config").into_iter().chain(layers);
    let weights = weights.filter_map(|layer| layer.get("weight"));
    let stages = weights.flat_map(|weight| match weight {
        Value::Array(stages) => stages.as_slice(),
        stage => std::slice::from_ref(stage),
    });
    let has_e5m3 = |stage: &Value| {
        let is_e5m3 = |key| stage.get(key).and_then(Value::as_str).is_some_and(|word| word.ends_with("e5m3"));
        is_e5m3("scale_format") || is_e5m3("dtype")
    };
    stages.into_iter().any(has_e5m3).then(|| {
        format!(
            "{} says that scales are E5M3 (AMD FP4); this is not understood, so quantize the original again",
            config.file.display()
        )
    })
}
