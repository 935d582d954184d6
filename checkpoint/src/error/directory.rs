//! Errors of directories: files that contradict each other.

use std::path::PathBuf;

/// How to convert weights in PyTorch's old file format.
pub(crate) const SAVE_AS_SAFETENSORS: &str = "save it as safetensors first: from_pretrained and save_pretrained of \
     transformers do; or look for a revision of the repository that has such files";

/// The files of a checkpoint directory contradict each other.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The directory has no weights.
    #[error(
        "{} holds no *.safetensors, *.gguf, *.bin, *.pt or *.pth file with weights; name a checkpoint directory or a file",
        .path.display()
    )]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },

    /// The directory has two sets of weights.
    #[error(
        "{} and {} both claim to be the weights; remove one of them",
        .first.display(), .second.display()
    )]
    Ambiguous {
        /// The first set.
        first: PathBuf,
        /// The second set.
        second: PathBuf,
    },

    /// The index names a shard outside its directory.
    #[error(
        "{}: tensor {tensor} is assigned to {shard:?}, which is not a path inside the checkpoint; correct \
         the index",
        .index.display()
    )]
    ShardPath {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The path that the index names.
        shard: String,
    },

    /// A shard that the index names is missing.
    #[error(
        "the shard {} is missing, and {} expects tensor {tensor} in it; complete the download, or remove the index if \
         other files have the weights",
        .shard.display(), .index.display()
    )]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The first tensor that the index puts in the shard.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },

    /// A tensor that the index names is not in its shard.
    #[error(
        "{} lacks tensor {tensor}, which {} expects there{}",
        .shard.display(), .index.display(), found_in(.found)
    )]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
        /// Another shard that has the tensor.
        found: Option<PathBuf>,
    },

    /// Two files contain the same tensor.
    #[error(
        "tensor {tensor} is both in {} and in {}; remove one of the files",
        .first.display(), .second.display()
    )]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// The first file.
        first: PathBuf,
        /// The second file.
        second: PathBuf,
    },
}

/// The remedy for a tensor that is not in its shard, in words.
fn found_in(found: &Option<PathBuf>) -> String {
    match found {
        Some(shard) => format!("; it is in {}, so correct the index", shard.display()),
        None => "; download both again, from one revision, or remove the entry".into(),
    }
}
