//! Finds tensors that are missing: scales without codes, layers that lack what their siblings have,
//! final norms, embeddings and output heads.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::contents::{Contents, Entry, Stack, weight_of};
use super::finding::{Defect, Finding};
use super::sizes::is_plain_decoder;
use super::stacks::{LayerKinds, main_stack};
use crate::checkpoint_formats::ignored::tied_heads;
use crate::dtype::FileDtype;
use crate::names::role::Role;
use crate::names::weight::{WEIGHT, module};
use crate::read::config::Config;
use crate::read::tensor::Tensor;
use crate::read::values::float_dtype;

/// Architectures whose first layer lacks a norm.
const FIRST_WITHOUT_NORM: [&str; 3] = ["modernbert", "modernbert-decoder", "modern-bert"];

/// Most kinds of layers in a stack that are compared with each other.
const MAX_KINDS: usize = 64;

/// Checks for missing tensors.
pub(super) fn check_missing(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let without_codes = check_scales(contents, findings);
    if !contents.is_whole() {
        return;
    }
    for (name, stack) in contents.stacks() {
        check_siblings(contents, name, &stack, &without_codes, findings);
    }
    check_ends(contents, findings);
    check_tied(contents, findings);
}

/// Finds scales without codes, and returns the names of the weights that are missing.
fn check_scales<'c>(contents: &'c Contents<'_>, findings: &mut Vec<Finding>) -> BTreeSet<&'c str> {
    let checkpoint = contents.checkpoint;
    let mut without: BTreeMap<&str, Vec<Entry<'_>>> = BTreeMap::new();
    for entry in contents.entries() {
        let weight = weight_of(entry.name);
        let is_block_scale =
            matches!(entry.stored.dtype, FileDtype::U8 | FileDtype::F8_E4M3 | FileDtype::F8_E8M0);
        let stored = |end: &str| checkpoint.tensor(&format!("{weight}{end}"));
        let has_codes = stored("_packed").is_some() || stored("_blocks").is_some();
        let is_float = |weight: Tensor<'_>| float_dtype(weight.dtype).is_some();
        let is_lost = match stored("") {
            _ if weight == entry.name || has_codes => false,
            Some(weight) => is_block_scale && is_float(weight),
            None => is_block_scale || weight.ends_with(WEIGHT),
        };
        if is_lost {
            without.entry(weight).or_default().push(entry);
        }
    }
    for (weight, scales) in &without {
        // Tensors that cannot be read have findings of their own.
        let is_reported =
            |entry: &Entry<'_>| contents.unreadable.iter().any(|tensor| tensor.name == entry.name);
        if scales.iter().any(is_reported) {
            continue;
        }
        let names: Vec<_> = scales.iter().map(|entry| entry.name).collect();
        let but = checkpoint
            .tensor(weight)
            .map_or(String::new(), |weight| format!("; the weight is {}", weight.dtype));
        let what = format!("there are scales without codes: {}{but}", names.join(", "));
        findings.push(Finding::of(Defect::Unreadable, scales[0].stored, what));
    }
    without.into_keys().collect()
}

/// Finds weights and biases that one layer lacks, and that all layers like it have.
///
/// Layers are alike if one has all tensors of the other. Architectures whose layers differ lack
/// several modules in some of them, so a missing tensor counts only if all missing ones are of one
/// module.
fn check_siblings(
    contents: &Contents<'_>,
    name: &str,
    stack: &Stack<'_>,
    without_codes: &BTreeSet<&str>,
    findings: &mut Vec<Finding>,
) {
    let start = name.len() + 1;
    let mut layers: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for (number, layer) in stack {
        layers.insert(*number, layer.keys().map(|rest| weight_of(rest)).collect());
    }
    for weight in without_codes.iter().filter(|weight| weight.starts_with(name)) {
        let numbered = weight.get(start..).and_then(|rest| rest.split_once('.'));
        let layer = numbered.and_then(|(number, rest)| Some((layers.get_mut(&number.parse().ok()?)?, rest)));
        if let Some((layer, rest)) = layer {
            layer.insert(rest);
        }
    }
    // In many architectures the first layer differs, and in towers for images several do.
    let least = match main_stack(contents) {
        Some((main, _)) if main != name => 3,
        _ if is_plain_decoder(architecture(contents)) => 1,
        _ => 2,
    };
    let kinds = LayerKinds::of(contents.checkpoint, layers.len());
    // Layers with the same tensors.
    let mut alike: BTreeMap<(String, &BTreeSet<&str>), Vec<u64>> = BTreeMap::new();
    for (number, tensors) in &layers {
        alike.entry((kinds.kind(*number), tensors)).or_default().push(*number);
    }
    if alike.len() > MAX_KINDS {
        return;
    }
    for ((kind, layer), numbers) in &alike {
        let [number] = &numbers[..] else { continue };
        let like: Vec<_> = alike
            .iter()
            .filter(|((other, tensors), _)| other == kind && tensors != layer && tensors.is_superset(layer))
            .collect();
        let count: usize = like.iter().map(|(_, numbers)| numbers.len()).sum();
        if count < least {
            continue;
        }
        // The tensors that all of them have.
        let lacks: Vec<BTreeSet<&str>> =
            like.iter().map(|((_, tensors), _)| tensors.difference(layer).copied().collect()).collect();
        let missing: BTreeSet<&str> = lacks[0]
            .iter()
            .copied()
            .filter(|tensor| lacks.iter().all(|lacks| lacks.contains(tensor)))
            .collect();
        // One layer may have the relative positions of all.
        let is_part = |tensor: &&str| {
            let role = contents.checkpoint.naming.unquantized_role(tensor, &[]);
            (tensor.ends_with(WEIGHT) || tensor.ends_with(".bias")) && role != Some(Role::Embedding)
        };
        let modules: BTreeSet<&str> = missing.iter().map(|tensor| module_of(tensor)).collect();
        let known = *number == 0
            && architecture(contents).is_some_and(|model_type| FIRST_WITHOUT_NORM.contains(&model_type));
        if missing.is_empty() || known || modules.len() != 1 || !missing.iter().all(is_part) {
            continue;
        }
        let Some(file) = stack[number].values().next().map(|entry| entry.stored.file) else { continue };
        for tensor in missing {
            let full = format!("{name}.{number}.{tensor}");
            let what = format!("the layer has none, and the {count} layers like it have");
            findings.push(Finding { defect: Defect::Missing, tensor: Some(full), file: file.into(), what });
        }
    }
}

/// The module of a weight or bias.
fn module_of(tensor: &str) -> &str {
    module(tensor.strip_suffix(".bias").unwrap_or(tensor))
}

/// The architecture of the model, by its config or its GGUF file.
fn architecture<'c>(contents: &'c Contents<'_>) -> Option<&'c str> {
    let checkpoint = contents.checkpoint;
    checkpoint.config.as_ref().and_then(Config::model_type).or_else(|| checkpoint.gguf_architecture())
}

/// Checks that a language model has an embedding, a final norm and an output head.
fn check_ends(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let checkpoint = contents.checkpoint;
    let Some(config) = checkpoint.config.as_ref().filter(|_| checkpoint.naming.is_known()) else { return };
    let mut missing = |tensor: String, what: &str| {
        let (defect, file) = (Defect::Missing, config.file.clone());
        findings.push(Finding { defect, tensor: Some(tensor), file, what: what.into() });
    };
    if let Some((name, stack)) = main_stack(contents)
        && let Some((parent, _)) = name.rsplit_once('.')
        && stack.values().all(|layer| layer.contains_key("input_layernorm.weight"))
    {
        let beside = |entry: &Entry<'_>| {
            let rest = entry.name.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.'));
            rest.is_some_and(|rest| module(rest).split('.').count() == 1)
        };
        let has = |role: Role| {
            let is = |entry: &Entry<'_>| {
                checkpoint.naming.unquantized_role(weight_of(entry.name), entry.shape) == Some(role)
            };
            contents.entries().filter(beside).any(|entry| is(&entry))
        };
        if !has(Role::Norm) && !contents.entries().filter(beside).any(|entry| entry.name.contains("ln_f")) {
            missing(format!("{parent}.norm.weight"), "the layers have norms, and there is none after them");
        }
        if !has(Role::Embedding) {
            missing(format!("{parent}.embed_tokens.weight"), "there is no embedding next to the layers");
        }
    }
    let heads = tied_heads(checkpoint);
    let has_none = heads.len() == checkpoint.naming.heads().len();
    if let Some(head) = heads.first().filter(|_| has_none && tied(contents) == Some(false)) {
        missing(format!("{head}{WEIGHT}"), "there is no output head, and tie_word_embeddings is false");
    }
}

/// Returns whether the config ties the output head to the embedding, unless it contradicts itself.
fn tied(contents: &Contents<'_>) -> Option<bool> {
    let config = &contents.checkpoint.config.as_ref()?.object.json;
    let text = config.get("text_config");
    let stated = [config.get("tie_word_embeddings"), text.and_then(|text| text.get("tie_word_embeddings"))];
    let mut stated = stated.into_iter().flatten().filter_map(Value::as_bool);
    let first = stated.next()?;
    stated.all(|other| other == first).then_some(first)
}

/// Checks that a head that the config ties to the embedding is the embedding, if it is stored.
///
/// transformers 5.24 loads both with a warning, and vLLM 0.33 the embedding only.
fn check_tied(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let checkpoint = contents.checkpoint;
    let Some(config) = checkpoint.config.as_ref().filter(|_| tied(contents) == Some(true)) else { return };
    // Some other classes tie nothing, whatever the config says.
    if !is_plain_decoder(config.model_type()) {
        return;
    }
    let Some(head) = contents.entries().find(|entry| checkpoint.naming.is_head(entry.name)) else { return };
    let role = |entry: &Entry<'_>| checkpoint.naming.unquantized_role(entry.name, entry.shape);
    let is_same = |entry: &Entry<'_>| {
        (entry.shape, entry.stored.dtype) == (head.shape, head.stored.dtype)
            && entry.stored.data == head.stored.data
    };
    let mut embeddings =
        contents.entries().filter(|entry| role(entry) == Some(Role::Embedding) && entry.shape == head.shape);
    if !embeddings.any(|entry| is_same(&entry)) {
        let what = "it is not the embedding, and tie_word_embeddings is true: some engines load it, and others \
                    the embedding";
        let (tensor, file) = (Some(head.name.into()), config.file.clone());
        findings.push(Finding { defect: Defect::Config, tensor, file, what: what.into() });
    }
}
