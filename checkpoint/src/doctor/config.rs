//! Checks config.json against the weights of a checkpoint.

use microscale::Words;
use serde_json::Value;

use super::finding::{Defect, Finding};
use super::groups::Groups;
use super::layers::check_layers;
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::packed::Packed;
use crate::names::weight::{WEIGHT, is_expert, module};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::{Description, QUANTIZATION, quantization};
use crate::read::tensor::Tensor;

/// Name endings of layers whose input width is the model's hidden size, then of those whose output
/// is.
const FROM_HIDDEN: [&str; 5] = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
const TO_HIDDEN: [&str; 2] = ["o_proj", "down_proj"];

/// Checks the config of a checkpoint directory. Single files have none.
pub(super) fn check_config(
    checkpoint: &Checkpoint,
    packed: &[Packed<'_>],
    plain: &[Tensor<'_>],
    findings: &mut Vec<Finding>,
) {
    let Some(config) = &checkpoint.config else { return };
    let mut found = |tensor: Option<&str>, what: String| {
        let tensor = tensor.map(Into::into);
        findings.push(Finding { defect: Defect::Config, tensor, file: config.file.clone(), what });
    };
    match (Description::method(checkpoint), packed.first()) {
        (None, None) => {}
        (None, Some(first)) => {
            let what = format!("there is no {QUANTIZATION}, but {} tensors are quantized", packed.len());
            found(Some(first.name), what);
        }
        (Some(_), None) if plain.iter().any(|tensor| tensor.scaling.is_some()) => {}
        (Some((method, file)), None) => {
            let what = format!("{} says {method}, but no tensor is quantized in a known way", file.display());
            found(None, what);
        }
        (Some((method, _)), Some(_)) => {
            let quantization = quantization(&config.object.json).and_then(Value::as_object);
            for packed in packed.iter().filter(|packed| !packed.convention().is_method(&method)) {
                let stored = packed.convention().word();
                found(
                    Some(packed.name),
                    format!("the method is {method}, but the tensor is stored as {stored}"),
                );
            }
            if let Some(quantization) = quantization {
                check_layers(checkpoint, quantization, packed, plain, &mut found);
            }
        }
    }
    let text =
        config.object.json.get("text_config").and_then(Value::as_object).unwrap_or(&config.object.json);
    if let Some(hidden) = text.get("hidden_size").and_then(Value::as_u64) {
        for packed in packed {
            check_width(packed, hidden, &mut found);
        }
    }
}

/// Checks that layers with NVFP4 inputs have an input scale.
///
/// Without a config, an expert needs one if any other expert has one.
pub(super) fn check_input_scales(
    checkpoint: &Checkpoint,
    packed: &[Packed<'_>],
    findings: &mut Vec<Finding>,
) {
    let with = |packed: &&Packed<'_>| packed.input_scale.is_some();
    let one = packed.iter().find(with);
    let by_algorithm =
        [&checkpoint.config, &checkpoint.hf_quant_config].into_iter().flatten().any(|config| {
            let entries = [quantization(&config.object.json), config.object.json.get("quantization")];
            let is_nvfp4 = |entry: &Value| entry.get("quant_algo").and_then(Value::as_str) == Some("NVFP4");
            entries.into_iter().flatten().any(is_nvfp4)
        });
    let config = checkpoint.config.as_ref().and_then(|config| quantization(&config.object.json));
    let groups = config.and_then(|config| config.get("config_groups")?.as_object());
    // `check_config` reports configs with too many patterns.
    let groups = groups.and_then(|groups| Groups::of(groups).ok());
    let without = packed.iter().filter(|packed| {
        let stored = packed.storage.input_scale.as_ref().filter(|_| packed.storage.blocks.is_none());
        stored.is_some() && packed.input_scale.is_none()
    });
    for packed in without {
        let claimed = match packed.convention() {
            CheckpointFormat::CompressedTensors => {
                let layers = checkpoint.naming.spellings(module(packed.name));
                groups.as_ref().is_some_and(|groups| groups.have_stored_input_scale(&layers))
            }
            _ => by_algorithm,
        };
        let what = match (claimed, one) {
            (true, _) => {
                let name = packed.storage.input_scale.as_ref().map_or("", |stored| stored.name.suffix());
                let expected = match packed.convention() {
                    CheckpointFormat::Modelopt => "W4A16_NVFP4",
                    _ => "no input_activations",
                };
                format!(
                    "the config says that inputs are quantized too (NVFP4), but there is no {}; for unquantized inputs it must say {expected}",
                    name.trim_start_matches('.')
                )
            }
            (false, Some(other)) if is_expert(packed.name) && is_expert(other.name) => {
                format!("it has no scale of its inputs, and {} has one", other.name)
            }
            _ => continue,
        };
        findings.push(Finding::in_packed(Defect::InputScale, packed, what));
    }
}

/// Checks that a layer of the language model has the width `hidden`.
fn check_width(packed: &Packed<'_>, hidden: u64, found: &mut impl FnMut(Option<&str>, String)) {
    let Some(layer) = packed.name.strip_suffix(WEIGHT) else { return };
    let Some((parent, part)) = layer.rsplit_once('.') else { return };
    let others = ["vision", "visual", "audio", "encoder"];
    let [rows, cols] = packed.shape[..] else { return };
    if !parent.contains("layers.") || others.iter().any(|other| parent.contains(other)) {
        return;
    }
    let (width, side) = match part {
        _ if FROM_HIDDEN.contains(&part) => (cols, "inputs"),
        _ if TO_HIDDEN.contains(&part) => (rows, "outputs"),
        _ => return,
    };
    if width as u64 != hidden {
        let shape = &packed.shape;
        found(
            Some(packed.name),
            format!("it has {width} {side} (shape {shape:?}), but hidden_size is {hidden}"),
        );
    }
}
