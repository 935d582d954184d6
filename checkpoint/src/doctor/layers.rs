//! The check of which layers a config says are quantized, and how.

use globset::GlobMatcher;
use regex::bytes::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use crate::conventions::compressed_tensors::format_word;
use crate::conventions::ignored::{is_linear, tied_head};
use crate::conventions::packed::Packed;
use crate::file_convention::FileConvention;
use crate::names::glob;
use crate::names::kept::Kept;
use crate::names::naming::Naming;
use crate::names::weight::module;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// Checks which layers are quantized, and in which format.
pub(super) fn layers(
    checkpoint: &Checkpoint,
    quantization: &Map<String, Value>,
    packed: &[Packed<'_>],
    plain: &[Tensor<'_>],
    found: &mut impl FnMut(Option<&str>, String),
) {
    let naming = checkpoint.naming;
    if let Some(groups) = quantization.get("config_groups").and_then(Value::as_object) {
        let groups: Vec<_> = groups.iter().map(|(name, group)| Group::of(name, group)).collect();
        for packed in packed {
            group_of(packed, naming, &groups, found);
        }
    }
    // gpt-oss' loaders take experts and leave the rest, whatever is listed.
    let listed = ["ignore", "exclude_modules"].iter().find_map(|key| quantization.get(*key)?.as_array());
    let Some(listed) = listed else { return };
    let ignored: Vec<_> = listed.iter().filter_map(Value::as_str).map(Pattern::of).collect();
    let is_ignored = |layer: &str| ignored.iter().any(|pattern| pattern.leaves_out(layer));
    for packed in packed {
        if naming.spellings(module(packed.name)).iter().any(|layer| is_ignored(layer)) {
            found(Some(packed.name), "it is quantized, but the config says that it is not".into());
        }
    }
    // transformers goes by its modules' names; the loaders of other conventions by those of the file too.
    let by_modules = packed.iter().any(|packed| packed.convention() == FileConvention::CompressedTensors);
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

/// Returns whether a config says that a layer's inputs are quantized under a scale that must be stored: the group that names it,
/// or where none does every group.
pub(super) fn quantizes_inputs(quantization: &Value, packed: &Packed<'_>, naming: Naming) -> bool {
    let groups = quantization.get("config_groups").and_then(Value::as_object).into_iter().flatten();
    let groups: Vec<_> = groups.map(|(name, group)| Group::of(name, group)).collect();
    let layers = naming.spellings(module(packed.name));
    let names = |group: &Group<'_>| layers.iter().filter_map(|layer| group.names(layer)).min();
    let known = groups.iter().rev().filter_map(|group| Some((names(group)?, group)));
    match known.min_by_key(|(how, _)| *how) {
        Some((_, group)) => group.has_stored_inputs(),
        None => !groups.is_empty() && groups.iter().all(Group::has_stored_inputs),
    }
}

/// Checks a layer against the group whose target names it, or if none does, against all groups.
fn group_of(
    packed: &Packed<'_>,
    naming: Naming,
    groups: &[Group<'_>],
    found: &mut impl FnMut(Option<&str>, String),
) {
    let (layers, format) = (naming.spellings(module(packed.name)), packed.format);
    let names = |group: &Group<'_>| layers.iter().filter_map(|layer| group.names(layer)).min();
    // Among groups that name a layer in the same way, loaders keep the last.
    let known = groups.iter().rev().filter_map(|group| Some((names(group)?, group)));
    let asked_for = groups.iter().any(Group::has_embeddings);
    let by_class = !asked_for && known.clone().all(|(how, _)| how == Named::Class);
    if let Some(what) = no_layer(packed, naming).filter(|_| by_class) {
        found(Some(packed.name), format!("it is {what}, and loaders look for quantized linear layers alone"));
    }
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

/// What a quantized tensor is, if it is no linear layer's and no experts'.
fn no_layer(packed: &Packed<'_>, naming: Naming) -> Option<&'static str> {
    match naming.kept(packed.name, &packed.shape)? {
        Kept::Embedding if naming.is_linear(packed.name, &packed.shape) == Some(false) => {
            Some("an embedding")
        }
        Kept::Convolution => Some("a convolution"),
        Kept::Transposed => Some("a Conv1D's, transposed"),
        _ => None,
    }
}

/// An entry of config_groups.
struct Group<'a> {
    name: &'a str,
    format: Option<&'a str>,
    weights: Option<&'a Value>,
    inputs: Option<&'a Value>,
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
            inputs: group.get("input_activations").filter(|inputs| !inputs.is_null()),
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

    /// Returns whether inputs are quantized under a global scale that is known before: block scales alone are found as they come
    /// (`local`).
    fn has_stored_inputs(&self) -> bool {
        self.inputs.is_some_and(|inputs| inputs.get("dynamic") != Some(&Value::Bool(true)))
    }

    /// Returns whether embeddings are among the group's targets, which compressed-tensors can have.
    fn has_embeddings(&self) -> bool {
        self.targets.iter().any(|target| matches!(target, Pattern::Text("Embedding", _)))
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
