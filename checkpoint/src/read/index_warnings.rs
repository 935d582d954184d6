//! Differences between an index and its shards that loaders treat in different ways.

use crate::read::checkpoint::Checkpoint;
use crate::read::indexed::{StaleIndex, Unread};
use crate::read::tensor::Tensor;

/// A tensor that loaders take from another shard than the index names, or that it does not list.
pub(crate) struct Disagreement<'a> {
    /// The tensor that is not read.
    pub(crate) unread: Tensor<'a>,
    /// The tensor that is read instead, if the index lists it.
    pub(crate) read: Option<Tensor<'a>>,
}

impl Checkpoint {
    /// Returns tensors of the shards that are not read, and that loaders of whole shards load.
    ///
    /// These are the tensors that the index does not list, and copies with other bytes in shards
    /// after the one that the index names.
    pub(crate) fn disagreements(&self) -> impl Iterator<Item = Disagreement<'_>> {
        self.unread.iter().filter_map(|unread| {
            let shard = self.shards.get(unread.shard)?;
            let read = self.tensor(&unread.stored.name);
            let unread = shard.mapped(&unread.stored)?;
            let differs = read.is_none_or(|read| {
                let same = (read.dtype, read.shape, read.data) == (unread.dtype, unread.shape, unread.data);
                !same && unread.file > read.file
            });
            differs.then_some(Disagreement { unread, read })
        })
    }

    /// Warnings about the index: tensors that loaders may take from elsewhere.
    pub(crate) fn index_warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(StaleIndex { index, shard, whole }) = &self.stale_index {
            warnings.push(format!(
                "{} names {}, which is missing: {} is read, as transformers 5.24 does; remove the index, because vLLM 0.33 and \
                 SGLang 0.5.23 refuse a checkpoint without its shards",
                index.display(),
                shard.display(),
                whole.display()
            ));
        }
        let Some(index) = &self.index else { return warnings };
        let file = index.file.display();
        if let Some(path) = &index.respelled {
            warnings.push(format!(
                "{file} names a shard {path:?}: vLLM 0.33 and SGLang 0.5.23 compare names of files, and find only the name without \
                 such parts"
            ));
        }
        let (listed, unlisted): (Vec<_>, Vec<_>) =
            self.unread.iter().partition(|unread| self.places.contains_key(&unread.stored.name));
        let path = |unread: &Unread| self.shards[unread.shard].path.display();
        if let Some(first) = unlisted.first() {
            warnings.push(format!(
                "{file} lists fewer tensors than its shards hold: {} are left out, the first {} in {}; add those that the model needs \
                 to the index",
                unlisted.len(),
                first.stored.name,
                path(first)
            ));
        }
        if let Some(first) = listed.first() {
            let read = self.tensor(&first.stored.name).map(|read| read.file.display().to_string());
            warnings.push(format!(
                "{} tensors are in several shards, the first {} in {} and {}: each is read where {file} has it",
                listed.len(),
                first.stored.name,
                read.unwrap_or_default(),
                path(first)
            ));
        }
        if let Some(Disagreement { unread, .. }) = self.disagreements().find(|other| other.read.is_some()) {
            warnings.push(format!(
                "transformers 5.24 and vLLM 0.33 read shards whole, in the order of their names, and take {} from {}; remove it there",
                unread.name,
                unread.file.display()
            ));
        }
        warnings
    }
}
