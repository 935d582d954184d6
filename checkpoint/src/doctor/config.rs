//! The check of config.json against the weights of a checkpoint.

use globset::GlobMatcher;
use microscale::Words;
use regex::bytes::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::finding::{Defect, Finding};
use crate::conventions::compressed_tensors::format_word;
use crate::conventions::ignored::ignored_module;
use crate::conventions::packed::Packed;
use crate::file_convention::FileConvention;
use crate::names::glob;
use crate::names::weight::{WEIGHT, module};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::{Description, QUANTIZATION};
use crate::read::tensor::Tensor;

/// Layers whose inputs are as wide as the model, by the ends of their names, and those whose outputs are.
const FROM_HIDDEN: [&str; 5] = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
const TO_HIDDEN: [&str; 2] = ["o_proj", "down_proj"];

/// Looks at the config of a directory; a file has none.
pub(super) fn look(
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
        (Some((method, file)), None) => {
            let what = format!("{} says {method}, but no tensor is quantized in a known way", file.display());
            found(None, what);
        }
        (Some((method, _)), Some(_)) => {
            let quantization = config.object.json.get(QUANTIZATION).and_then(Value::as_object);
            for packed in packed.iter().filter(|packed| !packed.convention().is_method(&method)) {
                let stored = packed.convention().word();
                found(
                    Some(packed.name),
                    format!("the method is {method}, but the tensor is stored as {stored}"),
                );
            }
            if let Some(quantization) = quantization {
                layers(quantization, packed, plain, &mut found);
            }
        }
    }
    inputs(checkpoint, packed, &mut found);
    let text =
        config.object.json.get("text_config").and_then(Value::as_object).unwrap_or(&config.object.json);
    if let Some(hidden) = text.get("hidden_size").and_then(Value::as_u64) {
        for packed in packed {
            widths(packed, hidden, &mut found);
        }
    }
}

/// Layers whose inputs are quantized need a global scale for that.
fn inputs(checkpoint: &Checkpoint, packed: &[Packed<'_>], found: &mut impl FnMut(Option<&str>, String)) {
    let jsons = [&checkpoint.config, &checkpoint.hf_quant_config].into_iter().flatten();
    let entries =
        jsons.flat_map(|config| [QUANTIZATION, "quantization"].map(|key| config.object.json.get(key)));
    let quantized =
        entries.flatten().any(|entry| entry.get("quant_algo").and_then(Value::as_str) == Some("NVFP4"));
    for packed in packed.iter().filter(|packed| packed.convention() == FileConvention::Modelopt) {
        if quantized && packed.input_scale.is_none() {
            let what = "the config says that inputs are quantized too (NVFP4), but there is no input_scale, and vLLM takes what memory \
                        holds; for weights alone it must say W4A16_NVFP4";
            found(Some(packed.name), what.into());
        }
    }
}

/// Checks which layers are quantized, and in which format.
fn layers(
    quantization: &Map<String, Value>,
    packed: &[Packed<'_>],
    plain: &[Tensor<'_>],
    found: &mut impl FnMut(Option<&str>, String),
) {
    if let Some(groups) = quantization.get("config_groups").and_then(Value::as_object) {
        let groups: Vec<_> = groups.iter().map(|(name, group)| Group::of(name, group)).collect();
        packed.iter().for_each(|packed| group_of(packed, &groups, found));
    }
    // gpt-oss' loaders take experts and leave the rest, whatever is listed.
    let listed = ["ignore", "exclude_modules"].iter().find_map(|key| quantization.get(*key)?.as_array());
    let Some(listed) = listed else { return };
    let ignored: Vec<_> = listed.iter().filter_map(Value::as_str).map(Pattern::of).collect();
    let is_ignored = |layer: &str| ignored.iter().any(|pattern| pattern.leaves_out(layer));
    for packed in packed {
        if is_ignored(module(packed.name)) {
            found(Some(packed.name), "it is quantized, but the config says that it is not".into());
        }
    }
    for tensor in plain {
        if let Some(module) = ignored_module(tensor).filter(|module| !is_ignored(module)) {
            let what =
                format!("the layer is {}, but the config does not list {module} as ignored", tensor.dtype);
            found(Some(tensor.name), what);
        }
    }
}

/// Checks a layer against the group whose target names it, or if none does, against all groups.
fn group_of(packed: &Packed<'_>, groups: &[Group<'_>], found: &mut impl FnMut(Option<&str>, String)) {
    let (layer, format) = (module(packed.name), packed.format);
    // Among groups that name a layer in the same way, loaders keep the last.
    let known = groups.iter().rev().filter_map(|group| Some((group.names(layer)?, group)));
    match known.min_by_key(|(how, _)| *how) {
        Some((_, group)) if !group.describes(packed) => {
            let what = format!("it is {format}, but {}, which is about it, says something else", group.name);
            found(Some(packed.name), what);
        }
        None if !groups.iter().any(|group| group.describes(packed)) => {
            found(Some(packed.name), format!("it is {format}, which no entry of config_groups describes"));
        }
        _ => {}
    }
}

/// An entry of config_groups.
struct Group<'a> {
    name: &'a str,
    format: Option<&'a str>,
    weights: Option<&'a Value>,
    targets: Vec<Pattern<'a>>,
}

/// The way in which a target names a layer: loaders take the first of these that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Named {
    Name,
    Pattern,
    Class,
}

impl<'a> Group<'a> {
    fn of(name: &'a str, group: &'a Value) -> Self {
        let targets = group.get("targets").and_then(Value::as_array).into_iter().flatten();
        let targets = targets.filter_map(Value::as_str).map(Pattern::of).collect();
        Self {
            name,
            format: group.get("format").and_then(Value::as_str),
            weights: group.get("weights"),
            targets,
        }
    }

    /// The way in which the group's targets name a layer, if they do.
    fn names(&self, layer: &str) -> Option<Named> {
        let how = |target: &Pattern<'_>| match target {
            Pattern::Text("Linear", _) => Some(Named::Class),
            Pattern::Text(name, _) => (*name == layer).then_some(Named::Name),
            Pattern::Expression(expression) => {
                expression.is_match(layer.as_bytes()).then_some(Named::Pattern)
            }
            Pattern::NotUnderstood => None,
        };
        self.targets.iter().filter_map(how).min()
    }

    /// Returns whether the group describes such weights.
    fn describes(&self, packed: &Packed<'_>) -> bool {
        let Some(weights) = self.weights else { return false };
        let number = |key| weights.get(key).and_then(Value::as_u64);
        let (bits, block) = (packed.format.bits() as u64, packed.format.block() as u64);
        let ours = packed.convention() == FileConvention::CompressedTensors;
        number("num_bits") == Some(bits)
            && number("group_size").is_none_or(|size| size == block)
            && self.format.is_none_or(|word| !ours || word == format_word(packed.format))
    }
}

/// A pattern by which a config names layers.
enum Pattern<'a> {
    /// A name, or a class, or a glob, if it is one.
    Text(&'a str, Option<GlobMatcher>),
    /// After `re:`, a regular expression for the beginning of a name.
    Expression(Regex),
    /// One with parts that only Python knows, or longer than any that is meant well.
    NotUnderstood,
}

impl<'a> Pattern<'a> {
    /// The most bytes that a compiled expression may have, for repetitions can make few characters many.
    const MOST_COMPILED: usize = 1 << 18;

    fn of(text: &'a str) -> Self {
        // Expressions take no less memory than globs.
        if text.len() > glob::MOST {
            return Self::NotUnderstood;
        }
        let Some(expression) = text.strip_prefix("re:") else {
            return Self::Text(text, glob::matcher(text).ok());
        };
        let expression = format!("^(?:{expression})");
        let regex = RegexBuilder::new(&expression).unicode(false).size_limit(Self::MOST_COMPILED).build();
        regex.map_or(Self::NotUnderstood, Self::Expression)
    }

    /// Returns whether a layer that is named is left out: by its name or that of its parent, a glob, or a
    /// regular expression. A pattern that is not understood is taken to match.
    fn leaves_out(&self, layer: &str) -> bool {
        match self {
            Self::NotUnderstood => true,
            Self::Expression(expression) => expression.is_match(layer.as_bytes()),
            Self::Text(text, matcher) => {
                let inside = layer.strip_prefix(text).is_some_and(|rest| rest.starts_with('.'));
                inside || matcher.as_ref().is_none_or(|matcher| matcher.is_match(layer))
            }
        }
    }
}

/// Checks that a layer of the language model is as wide as the model.
fn widths(packed: &Packed<'_>, hidden: u64, found: &mut impl FnMut(Option<&str>, String)) {
    let Some(layer) = packed.name.strip_suffix(WEIGHT) else { return };
    let Some((parent, part)) = layer.rsplit_once('.') else { return };
    let others = ["vision", "visual", "audio", "encoder"];
    let [rows, cols] = packed.shape[..] else { return };
    if !parent.contains("layers.") || others.iter().any(|other| parent.contains(other)) {
        return;
    }
    let (width, what) = match part {
        _ if FROM_HIDDEN.contains(&part) => (cols, "inputs"),
        _ if TO_HIDDEN.contains(&part) => (rows, "outputs"),
        _ => return,
    };
    if width as u64 != hidden {
        let shape = &packed.shape;
        found(
            Some(packed.name),
            format!("it has {width} {what} (shape {shape:?}), but hidden_size is {hidden}"),
        );
    }
}
