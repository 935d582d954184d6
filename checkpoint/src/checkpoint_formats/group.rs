//! Groups of layers with the same storage. Configs with several formats have an entry per group.

use crate::checkpoint_formats::storage::Storage;
use crate::names::naming::Naming;
use crate::names::weight::module;

/// Layers of a checkpoint with the same storage.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) storage: &'static Storage,
    /// Their names in configs: every name that a loader has for them.
    pub(crate) layers: Vec<String>,
}

impl Group {
    /// Groups weights, given by name, storage and elements. The group with the most elements is
    /// first.
    pub(crate) fn of<'n>(
        weights: impl Iterator<Item = (&'n str, &'static Storage, u64)>,
        naming: Naming,
    ) -> Vec<Self> {
        let mut groups: Vec<(Self, u64)> = Vec::new();
        for (name, storage, elements) in weights {
            let known = groups.iter().position(|(group, _)| group.storage.format == storage.format);
            let at = known.unwrap_or(groups.len());
            if known.is_none() {
                groups.push((Self { storage, layers: Vec::new() }, 0));
            }
            groups[at].0.layers.extend(naming.spellings(module(name)));
            groups[at].1 += elements;
        }
        groups.sort_by_key(|(_, elements)| std::cmp::Reverse(*elements));
        groups.iter_mut().for_each(|(group, _)| group.layers.sort());
        groups.into_iter().map(|(group, _)| group).collect()
    }
}
