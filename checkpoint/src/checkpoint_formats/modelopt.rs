//! The checkpoint format of NVIDIA ModelOpt (0.47.0), which TensorRT-LLM, vLLM and SGLang load.
//!
//! | tensor `X` of shape [N, K] | codes | block scales | global scale |
//! |---|---|---|---|
//! | nvfp4 | `X` U8 [N, K/2] | `X_scale` F8_E4M3 [N, K/16] | `X_scale_2` F32 [], a multiplier |
//!
//! A layer whose inputs are quantized too has their global scale in `input_scale` instead of
//! `weight`: F32 [], a multiplier. The config is in config.json, and in other words in ModelOpt's
//! own file.
//!
//! These exports are read-only:
//!
//! | `quant_algo` | codes | scales |
//! |---|---|---|
//! | MXFP8 | `X` F8_E4M3 [N, K] | `X_scale` U8 [N, K/32] |
//! | mxfp4, W4A8_MXFP4_FP8 | `X` U8 [N, K/2] | `X_scale` U8 [N, K/32] |
//! | W4A8_NVFP4_FP8 | as nvfp4 | as nvfp4, but `X_scale` F8_E4M3 [N, K/32] |
//!
//! In W4A8_NVFP4_FP8, NVFP4 has one stored scale for every two blocks. Its `input_scale`
//! is for FP8 inputs. [`w8_sources`](crate::checkpoint_formats::w8_sources) reads FP8, INT8 and
//! FP8_PB_WO.

use microscale::Format;
use microscale::formats::nvfp4::Direction;
use serde_json::{Map, Value, json};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Repeat, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// A tensor's global scale.
pub(crate) const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::After("_scale_2"), Direction::Multiplier, Repeat::Scalar);
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".input_scale"), Direction::Multiplier, Repeat::Scalar);

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    describe,
    is_method: |method| method.starts_with("modelopt"),
    rescaled,
    unreadable,
    also_read: ALSO_READ,
    ..FormatSpec::new(CheckpointFormat::Modelopt, STORED)
};

const STORED: &[Storage] = &[Storage {
    global_scale: Some(GLOBAL_SCALE),
    input_scale: Some(INPUT_SCALE),
    ..stored(Format::Nvfp4, FileDtype::U8, FileDtype::F8_E4M3)
}];

const ALSO_READ: &[Storage] = &[
    stored(Format::Mxfp8E4m3, FileDtype::F8_E4M3, FileDtype::U8),
    stored(Format::Mxfp4, FileDtype::U8, FileDtype::U8),
    Storage {
        global_scale: Some(GLOBAL_SCALE),
        blocks_per_scale: 2,
        ..stored(Format::Nvfp4, FileDtype::U8, FileDtype::F8_E4M3)
    },
];

const fn stored(format: Format, codes: FileDtype, scales: FileDtype) -> Storage {
    Storage::plain(CheckpointFormat::Modelopt, format, ("", codes), (PartName::After("_scale"), scales))
}

/// Tensors whose presence means that a layer's weight is more than codes and scales, and the
/// reasons.
const RESCALED: [(PartName, &str); 2] = [
    (PartName::InPlace(".pre_quant_scale"), "its inputs are scaled (AWQ)"),
    (PartName::InPlace(".svdquant_lora_a"), "a product of two small matrices is added to it (SVDQuant)"),
];

/// Returns why a tensor's codes and scales are not the whole weight.
fn rescaled(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    let found = |part: &PartName| checkpoint.tensor(&part.of(name)?);
    let (stored, what) = RESCALED.iter().find_map(|(part, what)| Some((found(part)?, what)))?;
    Some(format!("{what}, as {} says; this is not understood, so quantize the original again", stored.name))
}

/// Recognizes all experts of a layer in one tensor, packed along the axis before the last.
fn unreadable(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<String> {
    if codes.dtype != FileDtype::U8 {
        return None;
    }
    let scales = checkpoint.tensor(&format!("{}_weight_scale", codes.name))?;
    (scales.dtype == FileDtype::F8_E4M3).then(|| {
        format!("with {}, experts packed along another axis than the last, are not understood", scales.name)
    })
}

/// Writes both configs. There is only one format.
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
