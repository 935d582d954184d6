//! Errors of recipes: wrong files, settings and patterns.

use crate::names::glob;

/// A recipe, a setting or a pattern is wrong.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A recipe file is wrong, or its settings contradict each other.
    #[error("{place}: {why}")]
    File {
        /// The file and the line.
        place: String,
        /// The mistake, and the accepted values.
        why: String,
    },

    /// Settings on a command line contradict each other.
    #[error("{why}")]
    Settings {
        /// The mistake, and how to correct it.
        why: String,
    },

    /// No preset has this name.
    #[error(
        "no recipe that comes with the program is called {name:?}; there are {presets}. A file ends with \
         .toml or is named with its directory, such as ./{name}"
    )]
    NoPreset {
        /// The name that was given.
        name: String,
        /// The names of the presets.
        presets: String,
    },

    /// A pattern is not a glob, or too long.
    #[error("{} is not a pattern of tensor names: {why}", glob::shown(.pattern))]
    Glob {
        /// The pattern.
        pattern: String,
        /// The reason.
        why: String,
    },
}
