//! Errors of merging: parts that are missing or do not belong together.

use std::path::PathBuf;

/// Parts that cannot be merged.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// Shards are missing or incomplete.
    #[error(
        "{} of {of} shards are not in {}, or not complete: {}; run the parts again that make them, each \
         with the same input and options",
        .shards.len(), .directory.display(), first_of(.shards)
    )]
    Missing {
        /// The directory that should contain them.
        directory: PathBuf,
        /// The missing shards.
        shards: Vec<PathBuf>,
        /// The number of shards of the checkpoint.
        of: usize,
    },

    /// Shards were made by different plans.
    #[error(
        "{}: {} and {} were made with different options, from different inputs or by different versions; \
         remove the directory and run all parts again",
        .directory.display(), .first.display(), .second.display()
    )]
    Differ {
        /// The directory that contains both.
        directory: PathBuf,
        /// The first shard.
        first: PathBuf,
        /// The second shard.
        second: PathBuf,
    },

    /// The parts were made with experts split and the checkpoint has them whole, or the other way
    /// round.
    #[error(
        "{}: its parts were made {} experts; merge them likewise",
        .directory.display(), if *.split { "of split" } else { "without splitting" }
    )]
    Split {
        /// The directory of the parts.
        directory: PathBuf,
        /// True if the parts were made with experts split.
        split: bool,
    },
}

/// The first three paths, and an ellipsis if there are more.
fn first_of(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths.iter().take(3).map(|path| path.display().to_string()).collect();
    format!("{}{}", shown.join(", "), if paths.len() > 3 { ", …" } else { "" })
}
