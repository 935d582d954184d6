//! The checkpoint format of compressed-tensors (0.20.0), which vLLM and transformers load.
//!
//! A tensor `X` (such as `fc.weight`) of shape [N, K] becomes, if K is a multiple of the block:
//!
//! | format | codes | block scales `X_scale` | global scale |
//! |---|---|---|---|
//! | mxfp4 | `X_packed` U8 [N, K/2] | U8 [N, K/32] | |
//! | nvfp4 | `X_packed` U8 [N, K/2] | F8_E4M3 [N, K/16] | `X_global_scale` F32 \[1\], a divisor |
//! | mxfp8-e4m3 | `X` F8_E4M3 [N, K] | U8 [N, K/32] | |
//!
//! Leading dimensions are kept. There is no mxfp8-e5m2. A layer whose inputs are quantized to NVFP4
//! too has their global scale in `input_global_scale` instead of `weight`: F32 \[1\], a divisor.

use microscale::Format;
use microscale::formats::nvfp4::Direction;
use serde_json::{Map, Value, json};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Repeat, Storage, StoredGlobal};
use crate::checkpoint_formats::targets::targets;
use crate::dtype::FileDtype;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

const VERSION: &str = "0.20.0";
const PACKED: &str = "_packed";
const SCALE: PartName = PartName::After("_scale");

/// A tensor's global scale.
pub(crate) const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::After("_global_scale"), Direction::Divisor, Repeat::One);
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".input_global_scale"), Direction::Divisor, Repeat::One);

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    describe,
    is_method: |method| method == "compressed-tensors",
    unreadable,
    ..FormatSpec::new(CheckpointFormat::CompressedTensors, STORED)
};

const STORED: &[Storage] = &[
    stored(Format::Mxfp4, (PACKED, FileDtype::U8), FileDtype::U8),
    Storage {
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        ..stored(Format::Nvfp4, (PACKED, FileDtype::U8), FileDtype::F8_E4M3)
    },
    stored(Format::Mxfp8E4m3, ("", FileDtype::F8_E4M3), FileDtype::U8),
];

const fn stored(format: Format, codes: (&'static str, FileDtype), scales: FileDtype) -> Storage {
    Storage::plain(CheckpointFormat::CompressedTensors, format, codes, (SCALE, scales))
}

/// Recognizes 4-bit integers, eight of them in an I32.
fn unreadable(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<String> {
    let name = codes.name.strip_suffix(PACKED).filter(|_| codes.dtype == FileDtype::I32)?;
    // Without scales it is incomplete, whatever it is.
    checkpoint.tensor(&SCALE.of(name)?)?;
    Some(
        "it is integers (INT4 or INT8, pack-quantized), as Kimi-K2-Thinking and K2.5 store experts, and no MXFP4; this is not \
         understood, so take a checkpoint in bf16, FP8 or MXFP4, or have compressed-tensors decompress it"
            .into(),
    )
}

/// Returns a config's words for a format: its name, the strategy of its scales, and their dtype.
pub(crate) fn words_of(format: Format) -> (&'static str, &'static str, &'static str) {
    match format {
        Format::Nvfp4 => ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn"),
        Format::Mxfp4 => ("mxfp4-pack-quantized", "group", "torch.uint8"),
        // The only other stored format.
        _ => ("mxfp8-quantized", "group", "torch.uint8"),
    }
}

/// The format of a config with several formats.
pub(crate) const MIXED: &str = "mixed-precision";

/// Returns a config's name for a format.
pub(crate) fn format_word(format: Format) -> &'static str {
    words_of(format).0
}

/// Writes the config.
///
/// A single format has one group with all linear layers. With several formats each group has
/// [`targets`], even the largest one: vLLM looks for a layer's class before it looks for the parts
/// of a fused layer, so a target "Linear" would match layers of other groups.
fn describe(groups: &[Group], ignore: &[String], description: &mut Description) {
    let format = match groups {
        [only] => words_of(only.storage.format).0,
        _ => MIXED,
    };
    let targets = match groups {
        [_] => vec![vec!["Linear".into()]],
        _ => targets(groups),
    };
    let config_groups: Map<String, Value> = groups
        .iter()
        .zip(targets)
        .enumerate()
        .map(|(i, (group, targets))| {
            let activations = description.activations && group.storage.input_scale.is_some();
            (format!("group_{i}"), config_group(group.storage, &targets, activations))
        })
        .collect();
    let cache = json!({
        "dynamic": false,
        "num_bits": 8,
        "strategy": "tensor",
        "symmetric": true,
        "type": "float",
    });
    let quantization = json!({
        "config_groups": config_groups,
        "format": format,
        "global_compression_ratio": null,
        "ignore": ignore,
        "kv_cache_scheme": if description.fp8_cache { cache } else { Value::Null },
        "moe_sparsity_config": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": description.transforms.clone().unwrap_or_else(|| json!({})),
        "version": VERSION,
    });
    description.set(quantization);
}

/// Returns the entry of a group.
fn config_group(storage: &Storage, targets: &[String], activations: bool) -> Value {
    let (name, strategy, scale_dtype) = words_of(storage.format);
    let args = |dynamic: Value| {
        json!({
            "dynamic": dynamic,
            "group_size": storage.format.block(),
            "num_bits": storage.format.bits(),
            "scale_dtype": scale_dtype,
            "strategy": strategy,
            "symmetric": true,
            "type": "float",
        })
    };
    // Engines compute the block scales of inputs, under a global scale from the file.
    let activations = if activations { args("local".into()) } else { Value::Null };
    json!({
        "format": name,
        "input_activations": activations,
        "output_activations": null,
        "targets": targets,
        "weights": args(false.into()),
    })
}
