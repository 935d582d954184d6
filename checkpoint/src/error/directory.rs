//! Errors of directories: files that do not go together.

use std::path::PathBuf;

/// The way out for weights in PyTorch's files of old.
pub(crate) const SAVE_AS_SAFETENSORS: &str = "save it as safetensors first: from_pretrained and save_pretrained of \
     transformers do; or look for a revision of the repository that has such files";

/// Files of a directory that do not go together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// A directory without weights.
    #[error(
        "{} holds no *.safetensors, *.gguf, *.bin, *.pt or *.pth file with weights; name a checkpoint directory or a file",
        .path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },

    /// Two sets of weights in one directory.
    #[error(
        "{} and {} both claim to be the weights; remove one of them",
        .first.display(), .second.display()
    )]
    Ambiguous {
        /// One.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },

    /// An index that names a shard outside its directory.
    #[error(
        "{}: tensor {tensor} is said to be in {shard:?}, which is not a path inside the checkpoint; correct \
         the index",
        .index.display()
    )]
    ShardPath {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The path that was refused.
        shard: String,
    },

    /// An index that names a shard that is not there.
    #[error(
        "the shard {} is missing, and {} expects tensor {tensor} in it; complete the download",
        .shard.display(), .index.display()
    )]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The first tensor that should be in the shard.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },

    /// An index that names a tensor that its shard lacks.
    #[error(
        "{} lacks tensor {tensor}, which {} expects there; the index and the shard are of different \
         checkpoints",
        .shard.display(), .index.display()
    )]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },

    /// A shard with a tensor that the index does not put there.
    #[error(
        "{} holds tensor {tensor}, which {} {}; the index and the shard are of different checkpoints",
        .shard.display(), .index.display(), elsewhere(.assigned)
    )]
    NotInIndex {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
        /// The shard that the index names for it.
        assigned: Option<String>,
    },

    /// The same tensor in two files.
    #[error(
        "tensor {tensor} is both in {} and in {}; remove one of the files",
        .first.display(), .second.display()
    )]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
}

fn elsewhere(assigned: &Option<String>) -> String {
    assigned.as_ref().map_or("does not list".into(), |shard| format!("expects in {shard}"))
}
