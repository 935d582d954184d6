//! Errors of merging: parts that are missing, or do not belong together.

use std::path::PathBuf;

/// Parts that cannot be merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// Shards that no part has made, or not to the end.
    #[error(
        "{} of {of} shards are not in {}, or not complete: {}; run the parts again that make them, each \
         with the same input and options",
        .shards.len(), .directory.display(), first_of(.shards)
    )]
    Missing {
        /// The directory in which they should be.
        directory: PathBuf,
        /// The shards.
        shards: Vec<PathBuf>,
        /// The number of shards that should be there.
        of: usize,
    },

    /// Shards of different plans.
    #[error(
        "{}: {} and {} were made with different options, from different inputs or by different versions; \
         remove the directory and run all parts again",
        .directory.display(), .first.display(), .second.display()
    )]
    Differ {
        /// The directory of both.
        directory: PathBuf,
        /// One shard.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },

    /// Parts that were made of split experts, of which the checkpoint has none, or the other way round.
    #[error(
        "{}: its parts were made {} experts; merge them likewise",
        .directory.display(), if *.split { "of split" } else { "without splitting" }
    )]
    Split {
        /// The directory of the parts.
        directory: PathBuf,
        /// True if their experts were split.
        split: bool,
    },
}

/// The first few of many paths.
fn first_of(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths.iter().take(3).map(|path| path.display().to_string()).collect();
    format!("{}{}", shown.join(", "), if paths.len() > 3 { ", …" } else { "" })
}
