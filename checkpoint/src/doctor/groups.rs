//! The entries of config_groups: which layers each one targets, and how it quantizes them.

use std::collections::HashMap;

use microscale::Format;
use serde_json::{Map, Value};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::compressed_tensors::{format_word, words_of};
use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::patterns::{Expression, count_patterns};
use crate::dtype::FileDtype;
use crate::read::tensor::Tensor;

/// All groups, indexed by their targets.
pub(super) struct Groups<'a> {
    pub(super) all: Vec<ConfigGroup<'a>>,
    /// Layer names, each with the last group that targets it.
    names: HashMap<&'a str, usize>,
    /// Regular expressions with their groups, last group first.
    expressions: Vec<(Expression, usize)>,
    /// The last group that targets all linear layers (`Linear`).
    linear: Option<usize>,
    /// True if a group targets `Embedding`, which compressed-tensors supports.
    pub(super) has_embeddings: bool,
}

/// A group.
pub(super) struct ConfigGroup<'a> {
    pub(super) name: &'a str,
    targets: Vec<&'a str>,
    format: Option<&'a str>,
    weights: Option<&'a Value>,
    inputs: Option<&'a Value>,
}

/// How a target matches a layer. Loaders prefer names to patterns, and patterns to classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetKind {
    Name,
    Pattern,
    Class,
}

impl<'a> Groups<'a> {
    /// Reads the groups.
    ///
    /// # Errors
    /// A message if there are more patterns than the limit.
    pub(super) fn of(groups: &'a Map<String, Value>) -> Result<Self, String> {
        let targets = |group: &'a Value| {
            let targets = group.get("targets").and_then(Value::as_array).into_iter().flatten();
            targets.filter_map(Value::as_str)
        };
        let count = count_patterns(groups.values().flat_map(targets))?;
        let (all, expressions) = (Vec::with_capacity(groups.len()), Vec::new());
        let mut read = Self { all, names: HashMap::new(), expressions, linear: None, has_embeddings: false };
        for (number, (name, group)) in groups.iter().enumerate() {
            for target in targets(group) {
                match Expression::of(target, count) {
                    Some(expression) => read.expressions.push((expression, number)),
                    None if target == "Linear" => read.linear = Some(number),
                    None => drop(read.names.insert(target, number)),
                }
                read.has_embeddings |= target == "Embedding";
            }
            read.all.push(ConfigGroup {
                name,
                targets: targets(group).collect(),
                format: group.get("format").and_then(Value::as_str),
                weights: group.get("weights"),
                inputs: group.get("input_activations").filter(|inputs| !inputs.is_null()),
            });
        }
        read.expressions.reverse();
        Ok(read)
    }

    /// The group that applies to a layer with its number, and how its target matches.
    ///
    /// `layers` are the layer's spellings. Among targets of the same kind loaders use the last
    /// group.
    pub(super) fn group_of(&self, layers: &[String]) -> Option<(TargetKind, usize, &ConfigGroup<'a>)> {
        let name = layers.iter().filter_map(|layer| self.names.get(layer.as_str())).max();
        let matches =
            |expression: &Expression| layers.iter().any(|layer| expression.is_match(layer) == Some(true));
        let pattern = || self.expressions.iter().find(|(expression, _)| matches(expression));
        let found = match (name, self.linear) {
            (Some(number), _) => Some((TargetKind::Name, *number)),
            (None, linear) => match pattern() {
                Some((_, number)) => Some((TargetKind::Pattern, *number)),
                None => linear.map(|number| (TargetKind::Class, number)),
            },
        };
        found.and_then(|(how, number)| Some((how, number, self.all.get(number)?)))
    }

    /// Returns whether any group describes these weights.
    pub(super) fn any_describes(&self, packed: &Packed<'_>) -> bool {
        self.all.iter().any(|group| group.difference(packed).is_none())
    }

    /// Returns whether all patterns are supported.
    pub(super) fn is_understood(&self) -> bool {
        self.expressions.iter().all(|(expression, _)| expression.is_match("").is_some())
    }

    /// Returns whether a layer's inputs need a stored scale.
    ///
    /// The group that targets the layer decides. If there is none, all groups must say so.
    pub(super) fn have_stored_input_scale(&self, layers: &[String]) -> bool {
        match self.group_of(layers) {
            Some((.., group)) => group.has_stored_input_scale(),
            None => !self.all.is_empty() && self.all.iter().all(ConfigGroup::has_stored_input_scale),
        }
    }
}

impl ConfigGroup<'_> {
    /// Returns whether inputs have a stored global scale; with `local` only block scales are
    /// dynamic.
    fn has_stored_input_scale(&self) -> bool {
        self.inputs.is_some_and(|inputs| inputs.get("dynamic") != Some(&Value::Bool(true)))
    }

    /// Returns whether it says that inputs are quantized.
    pub(super) fn has_inputs(&self) -> bool {
        self.inputs.is_some()
    }

    /// Returns whether all its patterns are supported.
    pub(super) fn is_understood(&self) -> bool {
        let mut expressions = self.targets.iter().filter_map(|target| Expression::of(target, 1));
        expressions.all(|expression| expression.is_match("").is_some())
    }

    /// Returns whether it describes weights: others describe outputs of modules.
    pub(super) fn is_for_weights(&self) -> bool {
        self.weights.is_some_and(|weights| !weights.is_null())
    }

    /// The targets in words. Many are cut.
    pub(super) fn targets(&self) -> String {
        let first: Vec<_> = self.targets.iter().take(3).map(|target| format!("{target:?}")).collect();
        match self.targets.len() {
            0 => "nothing".into(),
            1..=3 => first.join(", "),
            more => format!("{} and {} more", first.join(", "), more - 3),
        }
    }

    /// Returns the first fact that the group states otherwise about these weights than they are
    /// stored, in words.
    ///
    /// compressed-tensors takes a missing `type` for integers, missing `num_bits` for 8 and a missing
    /// strategy for one that follows from `group_size`. ModelOpt leaves these out.
    pub(super) fn difference(&self, packed: &Packed<'_>) -> Option<String> {
        let Some(weights) = self.weights.filter(|weights| weights.is_object()) else {
            return Some("it has no weights".into());
        };
        let (bits, block) = (packed.format.bits() as u64, packed.storage.elements_per_scale() as u64);
        let ours = packed.checkpoint_format() == CheckpointFormat::CompressedTensors;
        let (word, strategy, scale_dtype) = words_of(packed.format);
        let facts: [(&str, Value, bool); 7] = [
            ("num_bits", bits.into(), true),
            ("group_size", block.into(), ours),
            ("type", "float".into(), ours),
            ("strategy", strategy.into(), ours),
            ("symmetric", true.into(), false),
            ("dynamic", false.into(), false),
            // vLLM tells MXFP8 by it.
            ("scale_dtype", scale_dtype.into(), ours && bits == 8),
        ];
        for (key, expected, required) in facts {
            let applies = ours || !matches!(key, "strategy" | "dynamic" | "scale_dtype");
            let same = |value: &Value| match (value.as_str(), expected.as_str()) {
                (Some(value), Some(expected)) => {
                    value.trim_start_matches("torch.") == expected.trim_start_matches("torch.")
                }
                _ => *value == expected,
            };
            match weights.get(key).filter(|value| !value.is_null()) {
                Some(value) if applies && !same(value) => {
                    return Some(format!("{key} is {value}, and must be {expected}"));
                }
                None if required => return Some(format!("there is no {key}, which must be {expected}")),
                _ => {}
            }
        }
        let format = self.format.filter(|format| ours && *format != format_word(packed.format))?;
        Some(format!("format is {format:?}, and must be {word:?}"))
    }

    /// Returns the first fact that the group states otherwise about FP8 or INT8 weights than they are
    /// stored, in words.
    pub(super) fn w8_difference(&self, tensor: &Tensor<'_>) -> Option<String> {
        let (dtype, name) = (tensor.dtype, self.name);
        let formats = [Format::Nvfp4, Format::Mxfp4, Format::Mxfp8E4m3];
        if let Some(word) =
            self.format.filter(|word| formats.iter().any(|format| format_word(*format) == *word))
        {
            return Some(format!("it is {dtype} and no block format, but {name} has format {word:?}"));
        }
        let expected = if dtype == FileDtype::I8 { "int" } else { "float" };
        let found = self.weights?.get("type").and_then(Value::as_str)?;
        (found != expected).then(|| format!("it is {dtype}, but {name} has type {found:?}"))
    }

    /// Returns a fact that the group states about inputs and engines do not have with such weights.
    ///
    /// vLLM 0.33 refuses NVFP4 weights with inputs in another format.
    pub(super) fn input_difference(&self, packed: &Packed<'_>) -> Option<String> {
        let inputs =
            self.inputs.filter(|_| packed.checkpoint_format() == CheckpointFormat::CompressedTensors)?;
        let (_, strategy, _) = words_of(packed.format);
        let nvfp4 = packed.format.has_global_scale();
        let facts: [(&str, Value, bool); 4] = [
            ("type", "float".into(), true),
            ("num_bits", packed.format.bits().into(), nvfp4),
            ("group_size", packed.format.block().into(), nvfp4),
            ("strategy", strategy.into(), nvfp4),
        ];
        let mut wrong = facts
            .into_iter()
            .filter(|(key, expected, applies)| *applies && inputs.get(*key) != Some(expected));
        let (key, expected, _) = wrong.next()?;
        let value = inputs.get(key).unwrap_or(&Value::Null);
        Some(format!("{key} of input_activations is {value}, and must be {expected}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group_of(groups: &Value, layer: &str) -> Option<(TargetKind, String)> {
        let groups = Groups::of(groups.as_object().unwrap()).unwrap();
        groups.group_of(&[layer.to_string(), "other".into()]).map(|(how, _, group)| (how, group.name.into()))
    }

    #[test]
    fn names_come_before_patterns_and_these_before_classes_and_the_last_of_equals_counts() {
        let groups = json!({
            "a": { "targets": ["re:.*up_proj", "Linear"] },
            "b": { "targets": ["layers.0.up_proj", "re:layers"] },
            "c": { "targets": ["layers.0.up_proj", "Linear", "re:.*x"] },
            "d": { "targets": ["re:.*up_proj"] },
            "e": { "targets": ["re:(?=python)", "Embedding"] },
        });
        for (layer, how, name) in [
            ("layers.0.up_proj", TargetKind::Name, "c"),
            ("layers.1.up_proj", TargetKind::Pattern, "d"),
            ("layers.1.down_proj", TargetKind::Pattern, "b"),
            ("layers.1.x", TargetKind::Pattern, "c"),
            ("lm_head", TargetKind::Class, "c"),
        ] {
            assert_eq!(group_of(&groups, layer), Some((how, name.into())), "{layer}");
        }
        assert_eq!(group_of(&json!({ "a": { "targets": ["re:x"] } }), "y"), None);
        let many = json!({ "a": { "targets": vec!["re:x"; 3000] } });
        assert!(Groups::of(many.as_object().unwrap()).is_err_and(|why| why.contains("3000 patterns")));
    }
}
