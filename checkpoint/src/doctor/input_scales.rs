//! Checks the scales of layers' inputs: missing, inverted or unequal ones.

use std::collections::HashMap;

use microscale::Words;
use microscale::formats::{E4m3, nvfp4};
use serde_json::Value;

use super::contents::Contents;
use super::finding::{Defect, Finding};
use super::groups::Groups;
use super::values::wrong_scale;
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::packed::Packed;
use crate::names::fused::{Fused, fused};
use crate::names::weight::{is_expert, module};
use crate::read::description::quantization;

/// The largest number of FP16, which inputs of layers rarely exceed.
const LARGEST_INPUT: f64 = 65504.0;

/// Checks the scales of the inputs of all layers.
pub(super) fn check_input_scales(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    check_presence(contents, findings);
    check_direction(&contents.packed, findings);
    for tensor in contents.plain.iter().filter(|tensor| tensor.scaling.is_some()) {
        for end in ["input_scale", "activation_scale"] {
            let scale = contents.checkpoint.tensor(&format!("{}.{end}", module(tensor.name)));
            if let Some(scale) = scale
                && let Some(value) = wrong_scale(&scale)
            {
                findings.push(Finding::of(Defect::InputScale, &scale, format!("it is {value}")));
            }
        }
    }
}

/// Checks that layers with NVFP4 inputs have an input scale.
///
/// Without a config, an expert needs one if any other expert has one.
fn check_presence(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let (checkpoint, packed) = (contents.checkpoint, &contents.packed);
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
    let weights_only = |packed: &Packed<'_>| match packed.checkpoint_format() {
        CheckpointFormat::CompressedTensors => {
            let layers = checkpoint.naming.spellings(module(packed.name));
            let group = groups.as_ref().and_then(|groups| groups.group_of(&layers));
            group.is_some_and(|(.., group)| !group.has_inputs())
        }
        CheckpointFormat::Modelopt => {
            groups.as_ref().is_some_and(|groups| groups.all.iter().all(|group| !group.has_inputs()))
        }
        _ => false,
    };
    let mut unused = packed.iter().filter(|packed| packed.input_scale.is_some() && weights_only(packed));
    if let Some(first) = unused.next() {
        let count = 1 + unused.count();
        let what = format!(
            "{count} tensors have a scale of their inputs, this one first, but input_activations in the config says that inputs are not quantized"
        );
        findings.push(Finding::in_packed(Defect::InputScale, first, what));
    }
    let without = packed.iter().filter(|packed| {
        let stored = packed.storage.input_scale.as_ref().filter(|_| packed.storage.blocks.is_none());
        stored.is_some() && packed.input_scale.is_none()
    });
    for packed in without {
        let claimed = match packed.checkpoint_format() {
            CheckpointFormat::CompressedTensors => {
                let layers = checkpoint.naming.spellings(module(packed.name));
                groups.as_ref().is_some_and(|groups| groups.have_stored_input_scale(&layers))
            }
            _ => by_algorithm,
        };
        let what = match (claimed, one) {
            (true, _) => {
                let name = packed.storage.input_scale.as_ref().map_or("", |stored| stored.name.suffix());
                let expected = match packed.checkpoint_format() {
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

/// Checks that input scales are stored in their direction, and are equal within fused layers.
///
/// A scale implies the largest input, 2688 of its multiplier. Inputs exceed 2688 in a few layers of
/// some models, and an inverted scale implies 2688² / a instead of a. So all scales are inverted if
/// the median implies more than 2688, and one is if it implies more than FP16 can hold.
fn check_direction(packed: &[Packed<'_>], findings: &mut Vec<Finding>) {
    let limit = f64::from(nvfp4::LARGEST);
    let scaled = || packed.iter().filter_map(|packed| Some((packed, packed.input_scale?)));
    let implied = |packed: &Packed<'_>| {
        let factor = packed.input_scale.map_or(0.0, |(_, scale)| scale.factor(E4m3::from_f32(1.0)));
        f64::from(factor) * limit
    };
    let mut largest: Vec<f64> = scaled().map(|(packed, _)| implied(packed)).collect();
    largest.sort_by(f64::total_cmp);
    let all = largest.get(largest.len() / 2).is_some_and(|median| *median > limit);
    let mut layers: HashMap<Fused, &Packed<'_>> = HashMap::new();
    for (packed, (stored, scale)) in scaled() {
        let (largest, value) = (implied(packed), scale.value());
        if largest > LARGEST_INPUT || all && largest > limit {
            let what = format!(
                "{}, a {} of {value}, is inverted: it means inputs up to {largest:.3e}, and the other way up, up to {:.3e}",
                stored.name,
                scale.direction().word(),
                limit * limit / largest
            );
            findings.push(Finding::in_packed(Defect::InputScale, packed, what));
            continue;
        }
        let Some(layer) = fused(packed.name, &packed.shape) else { continue };
        let first = *layers.entry(layer).or_insert(packed);
        if let Some((_, other)) = first.input_scale.filter(|(_, other)| other.value() != value) {
            let what = format!(
                "{} is {value}, and {} has {}: layers with the same inputs have the same scale",
                stored.name,
                first.name,
                other.value()
            );
            findings.push(Finding::in_packed(Defect::InputScale, packed, what));
        }
    }
}
