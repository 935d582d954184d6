//! Checks the layers that a config lists as quantized, and their formats.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::contents::Contents;
use super::groups::{Groups, TargetKind};
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::compressed_tensors::{MIXED, format_word};
use crate::checkpoint_formats::ignored::{is_linear, tied_heads};
use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::patterns::Ignored;
use crate::checkpoint_formats::transforms::transforms;
use crate::names::naming::Naming;
use crate::names::role::Role;
use crate::names::weight::module;
use crate::read::tensor::Tensor;

/// Checks the entries of config_groups, and the other words for formats, against the tensors.
pub(super) fn check_formats(
    contents: &Contents<'_>,
    quantization: &Map<String, Value>,
    found: &mut impl FnMut(Option<&str>, String),
) {
    if let Some(groups) = quantization.get("config_groups").and_then(Value::as_object) {
        match Groups::of(groups) {
            Ok(groups) => check_groups(contents, &groups, found),
            Err(why) => return found(None, why),
        }
    }
    let ours = |packed: &&Packed<'_>| packed.checkpoint_format() == CheckpointFormat::CompressedTensors;
    let Some(first) = contents.packed.iter().find(ours) else { return };
    if !quantization.contains_key("config_groups") {
        found(None, "there are no config_groups".into());
    }
    let word = |key: &str| quantization.get(key).and_then(Value::as_str);
    // transformers 5.24 takes weights for unquantized ones in any other state, and without one.
    let status = word("quantization_status").unwrap_or_default();
    if status != "compressed" {
        found(None, format!("quantization_status is {status:?}, and must be \"compressed\""));
    }
    let only_ours = !contents.plain.iter().any(|tensor| tensor.scaling.is_some());
    let is_word = |word: &str| {
        word == MIXED || contents.packed.iter().filter(ours).any(|packed| word == format_word(packed.format))
    };
    if let Some(format) = word("format").filter(|format| only_ours && !is_word(format)) {
        found(
            Some(first.name),
            format!("format is {format:?}, and must be {:?} for {}", format_word(first.format), first.format),
        );
    }
}

/// Checks the layers that a config excludes from quantization against the tensors.
pub(super) fn check_ignored(
    contents: &Contents<'_>,
    quantization: &Map<String, Value>,
    found: &mut impl FnMut(Option<&str>, String),
) {
    let Contents { checkpoint, packed, plain, .. } = contents;
    let naming = checkpoint.naming;
    // gpt-oss loaders quantize the experts and nothing else, whatever the config lists.
    let listed = ["ignore", "exclude_modules"].iter().find_map(|key| quantization.get(*key)?.as_array());
    let lists = [CheckpointFormat::CompressedTensors, CheckpointFormat::Modelopt];
    let by_layer = quantization.contains_key("quantized_layers");
    let listed = match listed {
        Some(listed) => listed.as_slice(),
        // Loaders take a missing list for an empty one.
        None if !by_layer && packed.iter().any(|packed| lists.contains(&packed.checkpoint_format())) => &[],
        None => return,
    };
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
    let by_modules =
        packed.iter().any(|packed| packed.checkpoint_format() == CheckpointFormat::CompressedTensors);
    let transforms = transforms(checkpoint);
    let is_transform =
        |tensor: &&Tensor<'_>| transforms.as_ref().is_some_and(|found| found.has_parameter(tensor.name));
    let plain = plain.iter().filter(|tensor| tensor.scaling.is_none() && !is_transform(tensor));
    for tensor in plain.filter(|tensor| is_linear(naming, tensor) == Some(true)) {
        let (layer, dtype) = (module(tensor.name), tensor.dtype);
        let modules = naming.modules(layer);
        if modules.iter().all(|module| is_ignored(module)) || !by_modules && is_ignored(layer) {
            continue;
        }
        let module = modules.join(", ");
        let but = match is_ignored(layer) {
            false => String::new(),
            true => format!(", which transformers goes by, and not {layer} as the file has it"),
        };
        found(
            Some(tensor.name),
            format!("the layer is {dtype}, but the config does not list {module} as ignored{but}"),
        );
    }
    for head in tied_heads(checkpoint).into_iter().filter(|head| by_modules && !is_ignored(head)) {
        let what = format!(
            "the output head is tied to the embedding, but the config does not list {head} as ignored"
        );
        found(Some(head), what);
    }
}

/// Checks each layer against the group that targets it, or else against all groups.
fn check_groups(contents: &Contents<'_>, groups: &Groups<'_>, found: &mut impl FnMut(Option<&str>, String)) {
    let naming = contents.checkpoint.naming;
    let mut used = vec![false; groups.all.len()];
    for name in contents.quantized() {
        if let Some((_, number, _)) = groups.group_of(&naming.spellings(module(name))) {
            used[number] = true;
        }
    }
    for (group, _) in groups
        .all
        .iter()
        .zip(&used)
        .filter(|(group, used)| !**used && group.is_for_weights() && group.is_understood())
    {
        found(None, format!("{} targets {}, which no quantized layer matches", group.name, group.targets()));
    }
    let any_used = used.contains(&true);
    // The same difference of many layers, with their number.
    let mut differences: BTreeMap<String, (&str, usize)> = BTreeMap::new();
    for packed in &contents.packed {
        let group = groups.group_of(&naming.spellings(module(packed.name)));
        let by_class = !groups.has_embeddings && group.is_none_or(|(how, ..)| how == TargetKind::Class);
        if let Some(kind) = kind_of_non_layer(packed, naming).filter(|_| by_class) {
            found(
                Some(packed.name),
                format!("it is {kind}, and loaders look only for quantized linear layers"),
            );
        }
        let format = packed.format;
        let difference = match group {
            Some((.., group)) => {
                group.difference(packed).or_else(|| group.input_difference(packed)).map(|what| {
                    format!(
                        "it is {format}, but {}, which applies to it, describes something else: {what}",
                        group.name
                    )
                })
            }
            None if !groups.any_describes(packed) => {
                Some(format!("it is {format}, which no entry of config_groups describes"))
            }
            None if any_used && naming.is_known() && groups.is_understood() => {
                Some(format!("it is {format}, and no target of config_groups matches it"))
            }
            None => None,
        };
        if let Some(difference) = difference {
            differences.entry(difference).or_insert((packed.name, 0)).1 += 1;
        }
    }
    for tensor in contents.plain.iter().filter(|tensor| tensor.scaling.is_some()) {
        let group = groups.group_of(&naming.spellings(module(tensor.name)));
        if let Some(difference) = group.and_then(|(.., group)| group.w8_difference(tensor)) {
            differences.entry(difference).or_insert((tensor.name, 0)).1 += 1;
        }
    }
    for (difference, (first, count)) in differences {
        let others = if count > 1 { format!(" ({count} tensors, this one first)") } else { String::new() };
        found(Some(first), difference + &others);
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
