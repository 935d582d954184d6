//! Groups of layers that are stored in one way. Configs with several formats have an entry for each group.

use crate::checkpoint_formats::storage::Storage;
use crate::names::naming::Naming;
use crate::names::weight::module;

/// The layers of a checkpoint that are stored in one way.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) storage: &'static Storage,
    /// Their names, as configs have them: every one that a loader has for them.
    pub(crate) layers: Vec<String>,
}

impl Group {
    /// The groups of weights, given by names, storages and elements: the group with the most elements first.
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
