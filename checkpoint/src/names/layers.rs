//! Layer numbers in tensor names, and which layers are first and last.

use std::collections::{BTreeSet, HashMap};

/// The index of the layer number in a name that is split at its dots: the first number.
pub fn layer_part(parts: &[&str]) -> Option<usize> {
    parts.iter().position(|part| part.parse::<u64>().is_ok())
}

/// The layer numbers of a model, counted separately for each stack (`model.layers`,
/// `visual.blocks`).
#[derive(Debug, Default)]
pub(crate) struct Layers {
    /// The sorted numbers of each stack, by the stack's name.
    stacks: HashMap<String, Vec<u64>>,
}

impl Layers {
    /// Collects the layer numbers from tensor names.
    pub(crate) fn of<'n>(names: impl Iterator<Item = &'n str>) -> Self {
        let mut stacks: HashMap<_, BTreeSet<_>> = HashMap::new();
        for (stack, layer) in names.filter_map(numbered) {
            stacks.entry(stack).or_default().insert(layer);
        }
        let sorted = |(stack, numbers): (_, BTreeSet<_>)| (stack, numbers.into_iter().collect());
        Self { stacks: stacks.into_iter().map(sorted).collect() }
    }

    /// Returns whether no name has a layer number.
    pub(crate) fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// Returns whether a tensor belongs to the first `layers` layers of its stack.
    pub(crate) fn is_first(&self, name: &str, layers: usize) -> bool {
        self.is_among(name, |before, _| before < layers)
    }

    /// Returns whether a tensor belongs to the last `layers` layers of its stack.
    pub(crate) fn is_last(&self, name: &str, layers: usize) -> bool {
        self.is_among(name, |_, rest| rest <= layers && layers > 0)
    }

    /// Calls `among` with the number of layers before the tensor's layer, and from that layer on.
    fn is_among(&self, name: &str, among: impl Fn(usize, usize) -> bool) -> bool {
        let Some((stack, layer)) = numbered(name) else { return false };
        self.stacks.get(&stack).is_some_and(|numbers| {
            let before = numbers.partition_point(|number| *number < layer);
            among(before, numbers.len() - before)
        })
    }
}

/// The name of the stack, and the layer's number.
fn numbered(name: &str) -> Option<(String, u64)> {
    let parts: Vec<&str> = name.split('.').collect();
    let at = layer_part(&parts)?;
    Some((parts[..at].join("."), parts[at].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_stack_by_stack() {
        let names = (0..12).map(|layer| format!("model.layers.{layer}.mlp.experts.9.up_proj.weight"));
        let others = ["visual.blocks.0.fc.weight", "visual.blocks.1.fc.weight", "lm_head.weight"];
        let names: Vec<String> = names.chain(others.map(String::from)).collect();
        let layers = Layers::of(names.iter().map(String::as_str));
        let of = |among: fn(&Layers, &str, usize) -> bool, n| {
            names.iter().filter(|name| among(&layers, name, n)).map(String::as_str).collect::<Vec<_>>()
        };
        assert!(of(Layers::is_first, 0).is_empty() && of(Layers::is_last, 0).is_empty());
        assert_eq!(of(Layers::is_first, 1), [&*names[0], others[0]]);
        // 11 comes after 9, although not alphabetically.
        assert_eq!(of(Layers::is_last, 1), [&*names[11], others[1]]);
        assert_eq!(of(Layers::is_last, 2), [&*names[10], &*names[11], others[0], others[1]]);
        assert_eq!(of(Layers::is_first, 99).len(), 14);
        assert!(Layers::of(["a", "b.c"].into_iter()).is_empty());
        let huge = ["a.18446744073709551615.x", "0.x"];
        let layers = Layers::of(huge.into_iter());
        assert!(layers.is_last(huge[0], 1) && layers.is_last(huge[1], 1) && !layers.is_last(huge[0], 0));
    }
}
