//! The names and patterns that list layers in a config.
//!
//! Names are looked up in a set, so their number is not limited. Patterns are limited because each
//! one is tried on every layer.

use std::collections::HashSet;

use globset::GlobMatcher;
use regex::bytes::{Regex, RegexBuilder};

use crate::limits::{CONFIG_PATTERN_BYTES, CONFIG_PATTERNS};
use crate::names::glob;

/// The prefix of a regular expression.
const EXPRESSION: &str = "re:";

/// Size limits of one compiled expression, and of all together. Repetitions expand a short pattern.
const MAX_COMPILED_BYTES: usize = 1 << 18;
const MAX_ALL_COMPILED_BYTES: usize = 1 << 28;

/// A regular expression that must match at the start of a name; `None` if it is too long or
/// Python-only.
pub(crate) struct Expression(Option<Regex>);

impl Expression {
    /// Compiles a regular expression, one of `count`. Returns `None` for texts without the prefix.
    pub(crate) fn of(text: &str, count: usize) -> Option<Self> {
        let expression = text.strip_prefix(EXPRESSION)?;
        if text.len() > glob::MAX_BYTES {
            return Some(Self(None));
        }
        let most = MAX_COMPILED_BYTES.min(MAX_ALL_COMPILED_BYTES / count.max(1));
        let regex = RegexBuilder::new(&format!("^(?:{expression})")).unicode(false).size_limit(most).build();
        Some(Self(regex.ok()))
    }

    /// Returns whether it matches a layer; `None` if the expression is not supported.
    pub(crate) fn is_match(&self, layer: &str) -> Option<bool> {
        self.0.as_ref().map(|regex| regex.is_match(layer.as_bytes()))
    }
}

/// Counts the patterns in a list of layers.
///
/// # Errors
/// A message if there are more patterns, or longer ones, than the limit.
pub(crate) fn count_patterns<'t>(texts: impl Iterator<Item = &'t str>) -> Result<usize, String> {
    let (mut count, mut bytes) = (0, 0);
    for text in texts.filter(|text| text.starts_with(EXPRESSION) || is_glob(text)) {
        (count, bytes) = (count + 1, bytes + text.len());
    }
    match count <= CONFIG_PATTERNS && bytes <= CONFIG_PATTERN_BYTES {
        true => Ok(count),
        false => Err(format!(
            "it lists layers by {count} patterns of {bytes} bytes, more than the {CONFIG_PATTERNS} of {CONFIG_PATTERN_BYTES} bytes \
             that are looked at"
        )),
    }
}

fn is_glob(text: &str) -> bool {
    text.contains(['*', '?', '[', ']', '{', '}', '\\'])
}

/// The layers that a config excludes from quantization.
#[derive(Default)]
pub(crate) struct Ignored<'a> {
    names: HashSet<&'a str>,
    globs: Vec<(&'a str, GlobMatcher)>,
    expressions: Vec<Expression>,
    /// True if a pattern is not supported: it is assumed to match every layer.
    all: bool,
}

impl<'a> Ignored<'a> {
    /// Compiles the entries of a config's list.
    ///
    /// # Errors
    /// A message if there are more patterns than the limit.
    pub(crate) fn of(texts: &[&'a str]) -> Result<Self, String> {
        let count = count_patterns(texts.iter().copied())?;
        let mut ignored = Self::default();
        for text in texts {
            if let Some(expression) = Expression::of(text, count) {
                ignored.expressions.push(expression);
            } else if !is_glob(text) {
                ignored.names.insert(text);
            } else if let Ok(matcher) = glob::matcher(text) {
                ignored.globs.push((text, matcher));
            } else {
                ignored.all = true;
            }
        }
        Ok(ignored)
    }

    /// Returns whether a layer is excluded, by its name, its parent's, a glob or a regular
    /// expression.
    pub(crate) fn leaves_out(&self, layer: &str) -> bool {
        let mut parents = layer.match_indices('.').map(|(dot, _)| &layer[..dot]);
        let inside = |parent: &str| layer.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'));
        self.all
            || self.names.contains(layer)
            || parents.any(|parent| self.names.contains(parent))
            || self.globs.iter().any(|(text, matcher)| inside(text) || matcher.is_match(layer))
            || self.expressions.iter().any(|expression| expression.is_match(layer) != Some(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves_out(texts: &[&str], layer: &str) -> bool {
        Ignored::of(texts).unwrap().leaves_out(layer)
    }

    #[test]
    fn layers_are_left_out_by_names_parents_globs_and_expressions() {
        for (text, layer, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "lm_head2", false),
            ("model.layers.1", "model.layers.1.mlp.up_proj", true),
            ("model.layers.1", "model.layers.11.mlp.up_proj", false),
            ("layers.1", "model.layers.1.mlp", false),
            ("", "a", false),
            ("model.layers.*.mlp*", "model.layers.7.mlp.up_proj", true),
            ("model.layers.[0-3].mlp", "model.layers.2.mlp", true),
            ("model.layers.?", "model.layers.2.mlp", false),
            ("[a", "anything", true),
            ("re:.*down_proj$", "model.layers.0.mlp.down_proj", true),
            ("re:down_proj", "model.layers.0.mlp.down_proj", false),
            ("re:(?=python)", "anything", true),
        ] {
            assert_eq!(leaves_out(&[text], layer), expected, "{text} {layer}");
            assert_eq!(leaves_out(&["x", text, "y.*"], layer), expected, "{text} {layer}");
        }
        assert!(!leaves_out(&[&"n".repeat(2000)], "n"), "a name of any length is only a name");
    }

    #[test]
    fn names_are_unlimited_and_patterns_are_counted() {
        let names: Vec<String> = (0..100_000).map(|number| format!("layers.{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ignored = Ignored::of(&names).unwrap();
        assert!(ignored.leaves_out("layers.99999.mlp") && !ignored.leaves_out("layers.100000"));
        let many = |pattern: &'static str, count: usize| Ignored::of(&vec![pattern; count]).map(drop);
        assert!(many("re:a", CONFIG_PATTERNS).is_ok() && many("*.a", CONFIG_PATTERNS).is_ok());
        let why = many("re:a", CONFIG_PATTERNS + 1).unwrap_err();
        assert!(why.contains("2049 patterns of 8196 bytes"), "{why}");
        let long: &str = "*a".repeat(glob::MAX_BYTES / 2).leak();
        assert!(many(long, CONFIG_PATTERN_BYTES / glob::MAX_BYTES + 1).unwrap_err().contains("129 patterns"));
    }
}
