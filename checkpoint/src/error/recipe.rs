//! Errors of recipes: files, settings and patterns that are wrong.

use crate::names::glob;

/// Recipes, settings and patterns that are wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A recipe file that is wrong, or whose settings do not go together.
    #[error("{place}: {why}")]
    File {
        /// The file and the line.
        place: String,
        /// The mistake, and the values that could stand there.
        why: String,
    },

    /// Settings of a command line that do not go together.
    #[error("{why}")]
    Settings {
        /// The mistake, and a way out.
        why: String,
    },

    /// A preset that there is not.
    #[error(
        "no recipe that comes with the program is called {name:?}; there are {presets}. A file ends with \
         .toml or is named with its directory, such as ./{name}"
    )]
    NoPreset {
        /// The name that was given.
        name: String,
        /// The presets that there are.
        presets: String,
    },

    /// A pattern that is not a glob, or too long.
    #[error("{} is not a pattern of tensor names: {why}", glob::shown(.pattern))]
    Glob {
        /// The pattern.
        pattern: String,
        /// The reason.
        why: String,
    },
}
