//! Few patterns that match some tensors of a checkpoint and none of the others.

use std::collections::HashMap;

use globset::escape;

use crate::names::glob::{MAX_BYTES, matcher};
use crate::names::layers::layer_part;
use crate::names::weight::{EXPERTS, WEIGHT};

/// A name without its layer number and its last part.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Kind {
    /// The part before the layer number.
    before: String,
    /// The part after it, up to the last part.
    after: String,
    /// The part after the last one: `.weight`.
    end: &'static str,
}

/// A name, taken apart. All parts are patterns that match themselves only.
struct Parts<'a> {
    kind: Kind,
    /// The number of the layer.
    layer: &'a str,
    /// The last part of the layer's name: `up_proj`.
    last: String,
}

/// Tensors that differ in the layer number and the last part only.
#[derive(Default)]
struct Family<'a> {
    layers: Vec<&'a str>,
    last: Vec<String>,
    names: Vec<&'a str>,
}

/// Returns patterns that match every name of `wanted`, and no name of `unwanted`.
///
/// Tensors that differ in the layer number share a pattern:
/// `model.layers.{0,3}.mlp.up_proj.weight`, or `model.layers.*.mlp.up_proj.weight` if that matches
/// nothing unwanted. So do the parts of a module in the same layers:
/// `model.layers.{0,3}.mlp.{gate_proj,up_proj}.weight`. The experts of a layer share
/// `model.layers.{0,3}.mlp.experts.*`.
pub(crate) fn patterns(wanted: &[&str], unwanted: &[&str]) -> Vec<String> {
    // The layers of each kind of tensor.
    let mut kinds: Vec<((Kind, String), Family<'_>)> = Vec::new();
    let mut known = HashMap::new();
    let mut found = Vec::new();
    for name in wanted.iter().copied() {
        let Some(Parts { kind, layer, last }) = Parts::of(name) else {
            found.push(exact(name));
            continue;
        };
        let at = *known.entry((kind.clone(), last.clone())).or_insert(kinds.len());
        if at == kinds.len() {
            kinds.push(((kind, last.clone()), Family { last: vec![last], ..Family::default() }));
        }
        let family = &mut kinds[at].1;
        family.names.push(name);
        if !family.layers.contains(&layer) {
            family.layers.push(layer);
        }
    }
    // Parts of a module that have the same layers are one family.
    let mut families: Vec<(Kind, Family<'_>)> = Vec::new();
    for ((kind, _), family) in kinds {
        let same = |(known, other): &&mut (Kind, Family<'_>)| {
            *known == kind && other.layers == family.layers && other.is_plain() && family.is_plain()
        };
        match families.iter_mut().find(same) {
            Some((_, other)) => {
                other.last.extend(family.last);
                other.names.extend(family.names);
            }
            None => families.push((kind, family)),
        }
    }
    for (kind, family) in families {
        let short = family.patterns(&kind, unwanted);
        found.extend(short.unwrap_or_else(|| family.names.iter().map(|name| exact(name)).collect()));
    }
    found
}

/// A pattern that matches one name only.
fn exact(name: &str) -> String {
    // Globs take a backslash for the escape of the next character.
    escape(name).replace('\\', "\\\\")
}

impl<'a> Parts<'a> {
    /// Takes a name apart. `None` if it has no layer number.
    fn of(name: &'a str) -> Option<Self> {
        let (stem, end) = name.strip_suffix(WEIGHT).map_or((name, ""), |stem| (stem, WEIGHT));
        let parts: Vec<&str> = stem.split('.').collect();
        let at = layer_part(&parts)?;
        let mut before = exact(&parts[..at].join("."));
        if at > 0 {
            before.push('.');
        }
        let after = format!(".{}", parts[at + 1..].join("."));
        if let Some((parent, _)) = after.split_once(EXPERTS) {
            let kind = Kind { before, after: format!("{}{EXPERTS}", exact(parent)), end: "" };
            return Some(Self { kind, layer: parts[at], last: "*".into() });
        }
        if at + 1 == parts.len() {
            return Some(Self {
                kind: Kind { before, after: String::new(), end },
                layer: parts[at],
                last: String::new(),
            });
        }
        let (after, last) = after.rsplit_once('.').unwrap_or_default();
        let kind = Kind { before, after: format!("{}.", exact(after)), end };
        Some(Self { kind, layer: parts[at], last: exact(last) })
    }
}

impl Family<'_> {
    /// Returns whether the last parts can be alternatives in braces.
    fn is_plain(&self) -> bool {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        self.last.iter().all(|last| !last.is_empty() && last.chars().all(is_plain))
    }

    /// Returns few patterns. `None` if they match something unwanted, or are too long.
    fn patterns(&self, Kind { before, after, end }: &Kind, unwanted: &[&str]) -> Option<Vec<String>> {
        let is_right = |pattern: &String| {
            matcher(pattern).is_ok_and(|matcher| !unwanted.iter().any(|name| matcher.is_match(name)))
        };
        let all = |patterns: Vec<String>| patterns.iter().all(is_right).then_some(patterns);
        let after = format!("{after}{}{end}", alternatives(&self.last));
        // Patterns of limited length have a limited number of layers.
        let room = MAX_BYTES.saturating_sub(before.len() + after.len() + 2);
        let longest = self.layers.iter().map(|layer| layer.len() + 1).max().unwrap_or(1);
        let listed = self.layers.chunks((room / longest).max(1));
        let listed = listed.map(|layers| format!("{before}{}{after}", alternatives(layers))).collect();
        let every = if self.layers.len() > 1 { all(vec![format!("{before}*{after}")]) } else { None };
        every.or_else(|| all(listed))
    }
}

/// A pattern for one of several words.
fn alternatives(words: &[impl AsRef<str>]) -> String {
    match words {
        [word] => word.as_ref().into(),
        _ => format!("{{{}}}", words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(",")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(wanted: &[&str], unwanted: &[&str]) -> Vec<String> {
        let found = patterns(wanted, unwanted);
        let matchers: Vec<_> = found.iter().map(|pattern| matcher(pattern).unwrap()).collect();
        let matches = |name: &&str| matchers.iter().any(|matcher| matcher.is_match(name));
        assert!(wanted.iter().all(&matches), "{wanted:?}: {found:?}");
        assert!(!unwanted.iter().any(matches), "{unwanted:?}: {found:?}");
        found
    }

    #[test]
    fn layers_share_a_pattern() {
        let name = |layer: u32, part: &str| format!("model.layers.{layer}.mlp.{part}_proj.weight");
        let up: Vec<String> = (0..4).map(|layer| name(layer, "up")).collect();
        let up: Vec<&str> = up.iter().map(String::as_str).collect();
        let down = name(1, "down");
        assert_eq!(check(&up, &[&down]), ["model.layers.*.mlp.up_proj.weight"]);
        assert_eq!(check(&[up[0], up[3]], &up[1..3]), ["model.layers.{0,3}.mlp.up_proj.weight"]);
        assert_eq!(check(&[up[2], &down], &[up[0]]), [up[2], &down]);
        let gate = name(2, "gate");
        assert_eq!(
            check(&[up[2], &gate], &[up[0], &down]),
            ["model.layers.2.mlp.{up_proj,gate_proj}.weight"]
        );
        assert_eq!(check(&["lm_head.weight"], &up), ["lm_head.weight"]);
    }

    #[test]
    fn experts_of_a_layer_share_a_pattern() {
        let name =
            |layer: u32, expert: u32| format!("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight");
        let names = [name(0, 0), name(0, 1), name(2, 0), name(1, 0)];
        let names = names.each_ref().map(String::as_str);
        assert_eq!(check(&names[..3], &names[3..]), ["model.layers.{0,2}.mlp.experts.*"]);
        assert_eq!(check(&names, &["model.layers.0.mlp.gate.weight"]), ["model.layers.*.mlp.experts.*"]);
    }

    #[test]
    fn stars_do_not_reach_over_other_names() {
        // A star matches dots, so it would also match the layer of another stack.
        let (wanted, unwanted) = (["a.0.w", "a.1.w"], ["a.x.2.w"]);
        assert_eq!(check(&wanted, &unwanted), ["a.{0,1}.w"]);
        let odd = ["a.[0].{b}*?.weight", "a\\b.weight", "0.w", "1.w"];
        check(&odd[..2], &odd[2..]);
        check(&odd[2..], &odd[..2]);
        let long: Vec<String> = (0..2000).map(|layer| format!("layers.{layer}.a.weight")).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        assert!(check(&long[..1999], &long[1999..]).len() < 20);
    }

    /// Names of a few letters and characters that globs give a meaning.
    const NAME: &str = "[ab*{,}\\[\\]?\\\\]{0,2}\\.[0-2](\\.experts)?\\.[ab0-1]";

    proptest! {
        #[test]
        fn patterns_match_what_is_wanted(names in prop::collection::btree_set(NAME, 1..12), picks in any::<u16>()) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            // Experts of a layer are either all wanted or all unwanted.
            let key = |name: &str| match name.split_once(EXPERTS) {
                Some((parent, _)) => parent.to_string(),
                None => name.to_string(),
            };
            let sum = |name: &str| key(name).bytes().map(usize::from).sum::<usize>();
            let pick = |name: &&str| picks >> (sum(name) % 16) & 1 == 1;
            let (wanted, unwanted): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| pick(name));
            check(&wanted, &unwanted);
        }
    }
}
