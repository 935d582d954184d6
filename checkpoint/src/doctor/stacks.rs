//! Checks the stack of the language model's layers: their number, and shapes that differ from all
//! other layers'.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::contents::{Contents, Entry, Stack};
use super::finding::{Defect, Finding};
use crate::read::checkpoint::Checkpoint;

/// Keys for other numbers of layers. Stacks may agree with one instead of `num_hidden_layers`.
const OTHER_LAYERS: [&str; 7] = [
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
    "num_hidden_groups",
];

/// The config of the language model.
pub(super) fn text_config(checkpoint: &Checkpoint) -> Option<&Map<String, Value>> {
    let config = &checkpoint.config.as_ref()?.object.json;
    Some(config.get("text_config").and_then(Value::as_object).unwrap_or(config))
}

/// The kinds of layers, by the lists of a config that have an entry for each layer.
pub(super) struct LayerKinds<'a>(Vec<&'a Vec<Value>>);

impl<'a> LayerKinds<'a> {
    /// Finds the lists for `layers` layers.
    pub(super) fn of(checkpoint: &'a Checkpoint, layers: usize) -> Self {
        let config = text_config(checkpoint).into_iter().flat_map(Map::values);
        Self(config.filter_map(Value::as_array).filter(|list| list.len() == layers).collect())
    }

    /// The kind of a layer: equal for layers that no list tells apart.
    pub(super) fn kind(&self, layer: u64) -> String {
        let entries = self.0.iter().filter_map(|list| list.get(layer as usize));
        entries.map(Value::to_string).collect::<Vec<_>>().join(" ")
    }
}

/// Names of the stack of a language model's layers.
const MAIN_STACKS: [&str; 13] = [
    "model.language_model.layers",
    "language_model.model.layers",
    "model.text_model.layers",
    "model.decoder.layers",
    "model.layers",
    "transformer.layers",
    "transformer.blocks",
    "transformer.h",
    "gpt_neox.layers",
    "backbone.layers",
    "layers",
    "h",
    "blk",
];

/// Returns the stack of the language model's layers, the first of [`MAIN_STACKS`].
pub(super) fn main_stack<'c>(contents: &'c Contents<'_>) -> Option<(&'c str, Stack<'c>)> {
    let mut stacks = contents.stacks();
    MAIN_STACKS.iter().find_map(|name| stacks.remove_entry(name))
}

/// Checks the stack of the language model's layers, and returns the tensors of odd shapes.
pub(super) fn check_stack(contents: &Contents<'_>, findings: &mut Vec<Finding>) -> HashSet<String> {
    let checkpoint = contents.checkpoint;
    let Some((name, stack)) = main_stack(contents) else { return HashSet::new() };
    if let (Some(file), Some(text)) = (&checkpoint.config, text_config(checkpoint)) {
        let mut found = |what: String| {
            findings.push(Finding { defect: Defect::Config, tensor: None, file: file.file.clone(), what });
        };
        check_lists(text, &mut found);
        let layers = text.get("num_hidden_layers").and_then(Value::as_u64);
        if let Some(layers) = layers.filter(|_| contents.is_whole()) {
            check_layers(name, &stack, layers, text, &mut found);
        }
    }
    check_siblings(checkpoint, name, &stack, findings)
}

/// Checks the number of layers.
fn check_layers(
    name: &str,
    stack: &Stack<'_>,
    layers: u64,
    text: &Map<String, Value>,
    found: &mut impl FnMut(String),
) {
    // Layers for predicting several tokens at once follow the others.
    let is_extra = |layer: &BTreeMap<&str, Entry<'_>>| {
        layer.keys().any(|rest| ["eh_proj", "enorm", "shared_head"].iter().any(|part| rest.contains(part)))
    };
    let numbers: Vec<u64> =
        stack.iter().filter(|(_, layer)| !is_extra(layer)).map(|(number, _)| *number).collect();
    let has = numbers.last().map_or(0, |last| last + 1);
    let number = |key: &&str| text.get(*key).and_then(Value::as_u64);
    if has != layers && !OTHER_LAYERS.iter().filter_map(number).any(|other| other == has) {
        found(format!("num_hidden_layers is {layers}, but {name} has {has} layers"));
    } else if let Some(missing) =
        (0..has).find(|number| !numbers.contains(number) && !stack.contains_key(number))
    {
        found(format!("num_hidden_layers is {layers}, but {name}.{missing} is missing"));
    }
}

/// Tensors by shape.
type ByShape<'c> = BTreeMap<&'c [usize], Vec<Entry<'c>>>;

/// Finds tensors whose shape is another one than in all other layers of the kind, and returns their
/// names.
///
/// Where layers differ on purpose, several do, or the config lists their kinds or sizes.
fn check_siblings(
    checkpoint: &Checkpoint,
    name: &str,
    stack: &Stack<'_>,
    findings: &mut Vec<Finding>,
) -> HashSet<String> {
    let differ = ["block_configs", "use_double_wide_mlp"];
    if text_config(checkpoint).is_some_and(|text| differ.iter().any(|key| text.contains_key(*key))) {
        return HashSet::new();
    }
    let kinds = LayerKinds::of(checkpoint, stack.len());
    // The tensors of each name and kind, by shape.
    let mut shapes: BTreeMap<(&str, String), ByShape<'_>> = BTreeMap::new();
    for (number, layer) in stack {
        let kind = kinds.kind(*number);
        for (rest, entry) in layer {
            if !entry.shape.is_empty() && (rest.ends_with(".weight") || rest.ends_with(".bias")) {
                let of_name = shapes.entry((rest, kind.clone())).or_default();
                of_name.entry(entry.shape).or_default().push(*entry);
            }
        }
    }
    let mut odd = HashSet::new();
    for of_name in shapes.into_values().filter(|shapes| shapes.len() == 2) {
        let mut by_count: Vec<_> = of_name.into_iter().collect();
        by_count.sort_by_key(|(_, entries)| entries.len());
        let [(shape, one), (usual, others)] = &by_count[..] else { continue };
        if let ([entry], 2..) = (&one[..], others.len()) {
            odd.insert(entry.name.to_string());
            let what = format!("it has shape {shape:?}, and {usual:?} in all other layers of {name}");
            let (tensor, file) = (Some(entry.name.into()), entry.stored.file.into());
            findings.push(Finding { defect: Defect::Unreadable, tensor, file, what });
        }
    }
    odd
}

/// Checks lists with an entry per layer.
fn check_lists(text: &Map<String, Value>, found: &mut impl FnMut(String)) {
    let list = text.get("layer_types").and_then(Value::as_array);
    let (Some(list), Some(layers)) = (list, text.get("num_hidden_layers").and_then(Value::as_u64)) else {
        return;
    };
    if list.len() as u64 != layers {
        found(format!("layer_types has {} entries, but num_hidden_layers is {layers}", list.len()));
    }
}
