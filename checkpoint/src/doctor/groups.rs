//! The entries of config_groups: which layers each one targets, and how it quantizes them.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::patterns::{Expression, count_patterns};
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::compressed_tensors::format_word;
use crate::checkpoint_formats::packed::Packed;

/// All groups, indexed by their targets.
pub(super) struct Groups<'a> {
    all: Vec<ConfigGroup<'a>>,
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
                format: group.get("format").and_then(Value::as_str),
                weights: group.get("weights"),
                inputs: group.get("input_activations").filter(|inputs| !inputs.is_null()),
            });
        }
        read.expressions.reverse();
        Ok(read)
    }

    /// The group that applies to a layer, and how its target matches.
    ///
    /// `layers` are the layer's spellings. Among targets of the same kind loaders use the last
    /// group.
    pub(super) fn group_of(&self, layers: &[String]) -> Option<(TargetKind, &ConfigGroup<'a>)> {
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
        found.and_then(|(how, number)| Some((how, self.all.get(number)?)))
    }

    /// Returns whether any group describes these weights.
    pub(super) fn any_describes(&self, packed: &Packed<'_>) -> bool {
        self.all.iter().any(|group| group.describes(packed))
    }

    /// Returns whether a layer's inputs need a stored scale.
    ///
    /// The group that targets the layer decides. If there is none, all groups must say so.
    pub(super) fn have_stored_input_scale(&self, layers: &[String]) -> bool {
        match self.group_of(layers) {
            Some((_, group)) => group.has_stored_input_scale(),
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

    /// Returns whether the group describes these weights.
    pub(super) fn describes(&self, packed: &Packed<'_>) -> bool {
        let Some(weights) = self.weights else { return false };
        let number = |key| weights.get(key).and_then(Value::as_u64);
        let (bits, block) = (packed.format.bits() as u64, packed.format.block() as u64);
        let ours = packed.convention() == CheckpointFormat::CompressedTensors;
        number("num_bits") == Some(bits)
            && number("group_size").is_none_or(|size| size == block)
            && self.format.is_none_or(|word| !ours || word == format_word(packed.format))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group_of(groups: &Value, layer: &str) -> Option<(TargetKind, String)> {
        let groups = Groups::of(groups.as_object().unwrap()).unwrap();
        groups.group_of(&[layer.to_string(), "other".into()]).map(|(how, group)| (how, group.name.into()))
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
