//! Parts of tensor names: the layer, and the kind of tensor.

use std::borrow::Cow;
use std::collections::HashMap;

use microscale_checkpoint::layer_part;

/// A tensor's place in a model. `model.layers.3.mlp.experts.7.up_proj.weight` is in layer 3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The first number in the name, if any.
    pub(crate) layer: Option<u64>,
    /// The name up to that number: `model.layers.3`. Empty without a number.
    pub(crate) stack: String,
    /// The rest of the name: `mlp.experts.7.up_proj`.
    pub(crate) rest: String,
    /// The name without numbers: `model.layers.mlp.experts.up_proj`.
    pub(crate) kind: String,
}

impl Place {
    pub(crate) fn of(name: &str) -> Self {
        let name = name.strip_suffix(".weight").unwrap_or(name);
        let parts: Vec<&str> = name.split('.').collect();
        let is_number = |part: &str| part.parse::<u64>().is_ok();
        let kind = parts.iter().filter(|part| !is_number(part)).copied().collect::<Vec<_>>().join(".");
        match layer_part(&parts) {
            None => Self { layer: None, stack: String::new(), rest: name.into(), kind },
            Some(at) => {
                let (stack, rest) = parts.split_at(at + 1);
                Self { layer: parts[at].parse().ok(), stack: stack.join("."), rest: rest.join("."), kind }
            }
        }
    }
}

/// Returns the shortest unambiguous ends of the kinds' names: `q_proj` for
/// `model.layers.self_attn.q_proj` if no other kind ends with it.
pub(crate) fn short_kinds<'a>(kinds: &[&'a str]) -> Vec<&'a str> {
    let mut uses: HashMap<&str, usize> = HashMap::new();
    for kind in kinds {
        ends(kind).for_each(|end| *uses.entry(end).or_default() += 1);
    }
    kinds.iter().map(|kind| ends(kind).find(|end| uses[end] == 1).unwrap_or(kind)).collect()
}

/// Yields the last part of a name, the last two parts, and so on.
fn ends(kind: &str) -> impl Iterator<Item = &str> {
    let dots = kind.rmatch_indices('.').map(|(at, _)| &kind[at + 1..]);
    dots.chain([kind])
}

/// Maximum length of a name that is shown completely.
const LONGEST: usize = 256;

/// Returns a tensor's name for display: on one line, shortened, and without control characters.
pub(crate) fn shown(name: &str) -> String {
    shortened(&harmless(name, |_| false), LONGEST)
}

/// Replaces control characters, and characters that change the text direction, by their numbers.
///
/// Characters for which `let_through` returns true are unchanged.
pub(crate) fn harmless(text: &str, let_through: impl Fn(char) -> bool) -> Cow<'_, str> {
    let harms = |c: char| (c.is_control() || is_bidirectional(c)) && !let_through(c);
    if !text.contains(harms) {
        return text.into();
    }
    let escaped = text.chars().map(|c| if harms(c) { c.escape_unicode().to_string() } else { c.into() });
    escaped.collect()
}

/// Returns whether a character changes the direction of the following text.
fn is_bidirectional(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Shortens a name to at most `most` characters by omitting its middle.
pub(crate) fn shortened(name: &str, most: usize) -> String {
    let length = name.chars().count();
    if length <= most {
        return name.into();
    }
    let (first, last) = ((most - 1) / 2, most / 2);
    let start = name.chars().take(first).chain(['…']);
    start.chain(name.chars().skip(length - last)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let place = Place::of("model.layers.3.mlp.experts.7.up_proj.weight");
        assert_eq!(place.layer, Some(3));
        assert_eq!((place.stack.as_str(), place.rest.as_str()), ("model.layers.3", "mlp.experts.7.up_proj"));
        assert_eq!(place.kind, "model.layers.mlp.experts.up_proj");
        let head = Place::of("lm_head.weight");
        assert_eq!((head.layer, head.stack.as_str(), head.rest.as_str()), (None, "", "lm_head"));
        for odd in ["", ".", "weight", ".weight", "7", "99999999999999999999.x"] {
            Place::of(odd);
        }
    }

    #[test]
    fn kinds_are_as_short_as_they_can_be() {
        let kinds =
            ["layer.output.dense", "layer.attention.output.dense", "layer.attention.self.query", "head"];
        assert_eq!(short_kinds(&kinds), ["layer.output.dense", "attention.output.dense", "query", "head"]);
        assert_eq!(short_kinds(&["a", "a"]), ["a", "a"]);
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        assert_eq!(shown("a.\u{1b}]0;owned\u{7}\nb\u{9b}2J"), "a.\\u{1b}]0;owned\\u{7}\\u{a}b\\u{9b}2J");
        assert_eq!(shown("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(shown("modèle.層"), "modèle.層");
        assert_eq!(shown(&"a".repeat(5000)).chars().count(), LONGEST);
        assert_eq!(harmless("a\nb\r", |c| c == '\n'), "a\nb\\u{d}");
    }

    #[test]
    fn names_are_shortened_in_the_middle() {
        assert_eq!(shortened("abcdefgh", 8), "abcdefgh");
        assert_eq!(shortened("abcdéfghi", 6), "ab…ghi");
    }
}
