//! Shards that follow an index: of their tensors, the ones that it lists are read.
//!
//! An index is an allow-list. Loaders use it to choose files, and then read them whole:
//! transformers 5.24 and vLLM 0.33 in the order of their names, SGLang 0.5.23 in any order. Where
//! that gives other tensors than the index, `index_warnings` names them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::directory::DirectoryError;
use crate::error::{Error, Result};
use crate::read::index::Index;
use crate::read::shard::{Shard, StoredTensor};

/// A tensor of a shard that is not read.
pub(crate) struct Unread {
    /// The number of its shard.
    pub(crate) shard: usize,
    pub(crate) stored: StoredTensor,
}

/// An index whose shards are missing, in a directory with all weights in one file.
pub(crate) struct StaleIndex {
    pub(crate) index: PathBuf,
    /// A shard that is missing.
    pub(crate) shard: PathBuf,
    /// The file with all weights, which is read.
    pub(crate) whole: PathBuf,
}

/// Returns the index of a directory that is read, or the one that is not.
///
/// transformers 5.24 prefers a whole model in one file to an index. If the index's shards are there
/// too, either may be the model.
///
/// # Errors
/// The errors of [`Index::find`], [`DirectoryError::Ambiguous`] for shards next to a whole model,
/// [`DirectoryError::MissingShard`].
pub(crate) fn usable_index(
    directory: &Path,
    files: &[PathBuf],
) -> Result<(Option<Index>, Option<StaleIndex>)> {
    let Some(index) = Index::find(files)? else { return Ok((None, None)) };
    let shards = index.shards();
    let whole = directory.join(index.whole_file());
    let is_beside = files.contains(&whole) && !shards.iter().any(|(shard, _)| *shard == index.whole_file());
    let missing = shards.iter().find(|(shard, _)| !directory.join(shard).exists());
    match (missing, is_beside) {
        (None, false) => Ok((Some(index), None)),
        (None, true) => Err(Error::Directory(DirectoryError::Ambiguous { first: index.file, second: whole })),
        (Some((shard, _)), true) => {
            let shard = directory.join(shard);
            Ok((None, Some(StaleIndex { index: index.file, shard, whole })))
        }
        (Some((shard, tensor)), false) => {
            let (tensor, shard) = (tensor.to_string(), directory.join(shard));
            Err(Error::Directory(DirectoryError::MissingShard { index: index.file, tensor, shard }))
        }
    }
}

/// Removes tensors that the index does not list, or lists in another shard, from the shards, and
/// returns them.
///
/// # Errors
/// [`DirectoryError::NotInShard`] for a tensor that is not in its shard.
pub(crate) fn follow(index: &Index, shards: &mut [Shard]) -> Result<Vec<Unread>> {
    let mut listed: HashMap<&str, &str> = index.entries().collect();
    let (mut unread, mut found) = (Vec::new(), Vec::new());
    for (number, shard) in shards.iter_mut().enumerate() {
        let is_listed = |stored: &mut StoredTensor| {
            listed.get(stored.name.as_str()).is_none_or(|listed| Path::new(*listed) != shard.name)
        };
        let others = shard.stored.extract_if(.., is_listed);
        unread.extend(others.map(|stored| Unread { shard: number, stored }));
        found.extend(shard.stored.iter().map(|stored| stored.name.clone()));
    }
    found.iter().for_each(|name| _ = listed.remove(name.as_str()));
    let Some((tensor, shard)) = listed.into_iter().min() else { return Ok(unread) };
    let path =
        |name: &str| shards.iter().find(|shard| shard.name == Path::new(name)).map(|shard| &shard.path);
    let other = unread.iter().find(|unread| unread.stored.name == tensor);
    Err(Error::Directory(DirectoryError::NotInShard {
        index: index.file.clone(),
        tensor: tensor.into(),
        shard: path(shard).cloned().unwrap_or_default(),
        found: other.map(|unread| shards[unread.shard].path.clone()),
    }))
}
