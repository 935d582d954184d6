//! The convention of NVIDIA ModelOpt's exports (0.47.0), which TensorRT-LLM, vLLM and SGLang load.
//!
//! | tensor X of sizes [N, K] | codes | block scales | global scale |
//! |---|---|---|---|
//! | nvfp4 | `X` U8 [N, K/2] | `X_scale` F8_E4M3 [N, K/16] | `X_scale_2` F32 [], a multiplier |
//!
//! A layer whose inputs are quantized too has their global scale beside its weight, `input_scale` F32 [], a
//! multiplier. The config stands twice: in config.json, and in a file of ModelOpt's own with other words.

use microscale::Format;
use microscale::formats::nvfp4::Direction;
use serde_json::{Map, Value, json};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Numbers, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::names::weight::WEIGHT;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// A tensor's global scale.
pub(crate) const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::after("_scale_2", Direction::Multiplier, Numbers::Scalar);
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::beside(".input_scale", Direction::Multiplier, Numbers::Scalar);

/// The convention.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    describe,
    is_method: |method| method.starts_with("modelopt"),
    rescaled,
    unreadable,
    ..FormatSpec::new(CheckpointFormat::Modelopt, STORED)
};

/// The formats that the convention has.
const STORED: &[Storage] = &[Storage {
    convention: CheckpointFormat::Modelopt,
    format: Format::Nvfp4,
    codes_suffix: "",
    codes: FileDtype::U8,
    scales_suffix: "_scale",
    scales_beside: false,
    scales: FileDtype::F8_E4M3,
    global_scale: Some(GLOBAL_SCALE),
    input_scale: Some(INPUT_SCALE),
    blocks: None,
    blocks_apart: false,
    transposed: false,
    experts: None,
    comfy: None,
}];

/// Ends of the names of tensors whose presence beside a layer's codes means that its weights are more than
/// codes and scales, and the reasons.
const RESCALED: [(&str, &str); 2] = [
    (".pre_quant_scale", "its inputs are scaled (AWQ)"),
    (".svdquant_lora_a", "a product of two small matrices is added to it (SVDQuant)"),
];

/// The reason why a tensor's codes and scales alone would be the wrong weights.
fn rescaled(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    let layer = name.strip_suffix(WEIGHT)?;
    let beside = |end: &str| checkpoint.tensor(&format!("{layer}{end}"));
    let (stored, what) = RESCALED.iter().find_map(|(end, what)| Some((beside(end)?, what)))?;
    Some(format!("{what}, as {} says; this is not understood, so quantize the original again", stored.name))
}

/// Why codes that no table has cannot be read: all experts of a layer in one tensor, packed along the axis
/// before the last.
fn unreadable(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<String> {
    let scales = checkpoint.tensor(&format!("{}_weight_scale", codes.name))?;
    (codes.dtype == FileDtype::U8 && scales.dtype == FileDtype::F8_E4M3).then(|| {
        format!("with {}, experts packed along another axis than the last, are not understood", scales.name)
    })
}

/// Writes both configs. The convention has one format only.
fn describe(groups: &[Group], ignore: &[String], description: &mut Description) {
    let Some(Group { storage, .. }) = groups.first() else { return };
    let block = storage.format.block();
    let algorithm = if description.activations { "NVFP4" } else { "W4A16_NVFP4" };
    let producer = json!({ "name": "modelopt", "version": "0.47.0" });
    let args =
        json!({ "dynamic": false, "num_bits": storage.format.bits(), "type": "float", "group_size": block });
    let mut group = Map::new();
    if description.activations {
        group.insert("input_activations".into(), args.clone());
    }
    group.insert("weights".into(), args);
    group.insert("targets".into(), json!(["Linear"]));
    let cache = description.fp8_cache;
    let mut quantization = json!({
        "config_groups": { "group_0": group },
        "ignore": ignore,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    });
    if cache {
        quantization["kv_cache_scheme"] = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
    }
    description.set(quantization);
    let own = json!({
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": if cache { "FP8".into() } else { Value::Null },
            "group_size": block,
            "exclude_modules": ignore,
        },
    });
    description.hf_quant_config = own.as_object().cloned();
}
