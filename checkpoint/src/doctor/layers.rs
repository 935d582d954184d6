//! Checks the layers that a config lists as quantized, and their formats.

use std::collections::HashMap;

use microscale::Format;
use serde_json::{Map, Value};

use super::groups::{Groups, TargetKind};
use super::patterns::Ignored;
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::ignored::{is_linear, tied_head};
use crate::checkpoint_formats::packed::Packed;
use crate::names::naming::Naming;
use crate::names::role::Role;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// Checks the layers that a config lists against the tensors.
pub(super) fn check_layers(
    checkpoint: &Checkpoint,
    quantization: &Map<String, Value>,
    packed: &[Packed<'_>],
    plain: &[Tensor<'_>],
    found: &mut impl FnMut(Option<&str>, String),
) {
    let naming = checkpoint.naming;
    if let Some(groups) = quantization.get("config_groups").and_then(Value::as_object) {
        match Groups::of(groups) {
            Ok(groups) => check_groups(packed, naming, &groups, found),
            Err(why) => found(None, why),
        }
    }
    // gpt-oss loaders quantize the experts and nothing else, whatever the config lists.
    let listed = ["ignore", "exclude_modules"].iter().find_map(|key| quantization.get(*key)?.as_array());
    let Some(listed) = listed else { return };
    let ignored = match Ignored::of(&listed.iter().filter_map(Value::as_str).collect::<Vec<_>>()) {
        Ok(ignored) => ignored,
        Err(why) => return found(None, why),
    };
    let is_ignored = |layer: &str| ignored.leaves_out(layer);
    for packed in packed {
        if naming.spellings(module(packed.name)).iter().any(|layer| is_ignored(layer)) {
            found(Some(packed.name), "it is quantized, but the config says that it is not".into());
        }
    }
    // transformers uses its modules' names. Loaders of the other formats also accept the file's
    // names.
    let by_modules = packed.iter().any(|packed| packed.convention() == CheckpointFormat::CompressedTensors);
    let plain = plain.iter().filter(|tensor| tensor.scaling.is_none());
    for tensor in plain.filter(|tensor| is_linear(naming, tensor) == Some(true)) {
        let (layer, dtype) = (module(tensor.name), tensor.dtype);
        let module = naming.module(layer);
        if is_ignored(&module) || !by_modules && is_ignored(layer) {
            continue;
        }
        let but = match is_ignored(layer) {
            false => String::new(),
            true => format!(", which transformers goes by, and not {layer} as the file has it"),
        };
        found(
            Some(tensor.name),
            format!("the layer is {dtype}, but the config does not list {module} as ignored{but}"),
        );
    }
    if let Some(head) = tied_head(checkpoint).filter(|head| by_modules && !is_ignored(head)) {
        let what = format!(
            "the output head is tied to the embedding, but the config does not list {head} as ignored"
        );
        found(Some(&head), what);
    }
}

/// Checks each layer against the group that targets it, or else against all groups.
fn check_groups(
    packed: &[Packed<'_>],
    naming: Naming,
    groups: &Groups<'_>,
    found: &mut impl FnMut(Option<&str>, String),
) {
    // Whether any group describes a kind of weights, cached by format and checkpoint format.
    let mut described: HashMap<(Format, bool), bool> = HashMap::new();
    for packed in packed {
        let group = groups.group_of(&naming.spellings(module(packed.name)));
        let by_class = !groups.has_embeddings && group.is_none_or(|(how, _)| how == TargetKind::Class);
        if let Some(kind) = kind_of_non_layer(packed, naming).filter(|_| by_class) {
            found(
                Some(packed.name),
                format!("it is {kind}, and loaders look only for quantized linear layers"),
            );
        }
        let (format, ours) = (packed.format, packed.convention() == CheckpointFormat::CompressedTensors);
        match group {
            Some((_, group)) if !group.describes(packed) => {
                let what = format!(
                    "it is {format}, but {}, which applies to it, describes something else",
                    group.name
                );
                found(Some(packed.name), what);
            }
            None if !*described.entry((format, ours)).or_insert_with(|| groups.any_describes(packed)) => {
                found(
                    Some(packed.name),
                    format!("it is {format}, which no entry of config_groups describes"),
                );
            }
            _ => {}
        }
    }
}

/// The kind of a quantized tensor that is neither a linear layer nor an expert.
fn kind_of_non_layer(packed: &Packed<'_>, naming: Naming) -> Option<&'static str> {
    match naming.unquantized_role(packed.name, &packed.shape)? {
        Role::Embedding if naming.is_linear(packed.name, &packed.shape) == Some(false) => {
            Some("an embedding")
        }
        Role::Convolution => Some("a convolution"),
        Role::Transposed => Some("a Conv1D's, transposed"),
        _ => None,
    }
}
