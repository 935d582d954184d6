//! Transforms: rotations, such as Hadamard matrices, of weights and of a layer's inputs and outputs.
//!
//! compressed-tensors (0.20.0) declares them in `transform_config`: groups of modules, each with a
//! location.
//!
//! | location | applied to |
//! |---|---|
//! | `weight_input`, `weight_output` | the stored weight, before it was quantized |
//! | `input`, `output` | activations, by the engine while it runs |
//! | `q_attn`, `k_cache` | queries and keys, by the engine; they cancel each other |
//!
//! A transform of activations has a tensor `MODULE.GROUP_LOCATION.weight`, which modules may share.
//! Quark (0.13) stores the rotation of a layer's inputs as `MODULE.input_rotation`, or once for all
//! layers of a size as `shared_input_rotation_SIZE`, and has no config that loaders follow.
//!
//! Block Hadamard transforms of inputs are undone when values are read, see
//! [`hadamard`](super::hadamard). Only compressed-tensors' config can keep another transform. Whether
//! such transforms of a model cancel each other is not examined, so values without the config count
//! as wrong.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::hadamard::Hadamards;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::quantizations;

/// The key of transforms in a config.
const CONFIG: &str = "transform_config";

/// The keys of groups in a transform_config: the current key, and the key before version 0.11.
const GROUPS: [&str; 2] = ["config_groups", "transform_groups"];

/// Name endings of the tensors with Quark's transforms.
const STEPS: [&str; 2] = [".input_rotation", ".input_prescale"];

/// Beginning of the last part of a name, for a transform that layers share.
const SHARED: &str = "shared_input_rotation_";

/// The transforms that a checkpoint declares.
pub(crate) struct Transforms<'a> {
    /// The file that declares them.
    pub(crate) file: PathBuf,
    /// compressed-tensors' entry.
    config: Option<&'a Value>,
    /// The name of one of Quark's tensors.
    tensor: Option<&'a str>,
}

/// The transforms of a checkpoint, if it declares any.
pub(crate) fn transforms(checkpoint: &Checkpoint) -> Option<Transforms<'_>> {
    let config = checkpoint.config.as_ref().and_then(|config| {
        let entries = quantizations(&config.object.json).filter_map(entry);
        Some((config.file.clone(), entries.into_iter().find(|entry| !is_empty(entry))?))
    });
    if let Some((file, config)) = config {
        return Some(Transforms { file, config: Some(config), tensor: None });
    }
    let is_step = |name: &str| {
        let last = name.rsplit('.').next().unwrap_or(name);
        STEPS.iter().any(|end| name.ends_with(end)) || last.starts_with(SHARED)
    };
    let step = checkpoint.tensors().find(|tensor| is_step(tensor.name))?;
    Some(Transforms { file: step.file.into(), config: None, tensor: Some(step.name) })
}

/// The entry in a description of how weights are quantized, or one level below it, where older
/// versions nest the parts of the description.
fn entry(quantization: &Value) -> Option<&Value> {
    let nested = || quantization.get("quantization_config")?.get(CONFIG);
    quantization.get(CONFIG).or_else(nested)
}

/// Returns whether a transform_config transforms nothing.
fn is_empty(config: &Value) -> bool {
    let applies =
        |group: &Value| group.get("apply").and_then(Value::as_array).is_none_or(|apply| !apply.is_empty());
    let is_empty_entry = |(key, groups): (&String, &Value)| {
        let is_empty = |groups: &Map<String, Value>| !groups.values().any(applies);
        GROUPS.contains(&key.as_str()) && (groups.is_null() || groups.as_object().is_some_and(is_empty))
    };
    config.is_null() || config.as_object().is_some_and(|config| config.iter().all(is_empty_entry))
}

impl<'a> Transforms<'a> {
    /// compressed-tensors' entry, for the config of an output.
    pub(crate) fn config(&self) -> Option<&'a Value> {
        self.config
    }

    /// The groups with their names.
    fn groups(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let groups = GROUPS.iter().filter_map(|key| self.config?.get(*key)?.as_object());
        groups.flatten().map(|(name, group)| (name.as_str(), group))
    }

    /// The block Hadamard transforms of inputs, if there are no others.
    pub(crate) fn hadamards(&self) -> Option<Hadamards<'a>> {
        let is_group = |(key, groups): (&String, &Value)| {
            GROUPS.contains(&key.as_str()) && (groups.is_null() || groups.is_object())
        };
        let is_understood = self.config?.as_object()?.iter().all(is_group);
        is_understood.then(|| Hadamards::of(self.groups().map(|(_, group)| group)))?
    }

    /// Each group with its locations.
    pub(crate) fn locations(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.groups().flat_map(|(name, group)| {
            let apply = group.get("apply").and_then(Value::as_array).into_iter().flatten();
            apply.filter_map(move |args| Some((name, args.get("location")?.as_str()?)))
        })
    }

    /// Returns whether a tensor is a parameter of a transform.
    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        let Some((_, last)) = module(name).rsplit_once('.') else { return false };
        self.locations().any(|(group, location)| {
            last.strip_prefix(group).and_then(|rest| rest.strip_prefix('_')) == Some(location)
        })
    }

    /// Returns the declaration, to compare it with another checkpoint's.
    pub(crate) fn declared(&self) -> (Option<&'a Value>, bool) {
        (self.config, self.tensor.is_some())
    }

    /// The transforms in words.
    pub(crate) fn described(&self) -> String {
        if let Some(tensor) = self.tensor {
            return format!("the tensor {tensor}");
        }
        let mut locations: Vec<_> = self.locations().map(|(_, location)| location).collect();
        locations.sort_unstable();
        locations.dedup();
        match locations.is_empty() {
            true => CONFIG.into(),
            false => format!("{CONFIG} ({})", locations.join(", ")),
        }
    }

    /// The error of an operation that would lose the transforms.
    pub(crate) fn lost(&self, doing: String) -> Error {
        let mut instead = "start from the checkpoint before the transform".to_string();
        if self.hadamards().is_some() {
            instead += ", or dequantize it first, which undoes the transform";
        }
        if self.config.is_some() {
            instead += ", or keep the transform with convert --to compressed-tensors, for vLLM";
        }
        let mut locations = self.locations().peekable();
        if locations.peek().is_some() && locations.all(|(_, location)| location.starts_with("weight_")) {
            instead +=
                "; if the transforms of all weights cancel each other, remove transform_config from the file";
        }
        let (file, what) = (self.file.clone(), self.described());
        FormatError::Transformed { file, what, doing, instead }.into()
    }
}

/// Checks that a checkpoint declares no transforms, which the output of an operation would lose.
///
/// # Errors
/// [`FormatError::Transformed`](crate::FormatError::Transformed).
pub(crate) fn check_untransformed(checkpoint: &Checkpoint, doing: &str) -> Result<()> {
    transforms(checkpoint).map_or(Ok(()), |transforms| Err(transforms.lost(doing.into())))
}

/// Checks that a checkpoint format keeps the transforms that a checkpoint declares.
///
/// # Errors
/// [`FormatError::Transformed`](crate::FormatError::Transformed).
pub(crate) fn check_kept(checkpoint: &Checkpoint, to: CheckpointFormat) -> Result<()> {
    match transforms(checkpoint) {
        Some(transforms) if to != CheckpointFormat::CompressedTensors || transforms.config.is_none() => {
            Err(transforms.lost(format!("converting to {to}")))
        }
        _ => Ok(()),
    }
}
