//! Errors of checkpoint operations, by subject. Each variant names the file, the tensor if there is
//! one, and what to change.

pub(crate) mod directory;
pub(crate) mod file;
pub(crate) mod format;
pub(crate) mod given;
pub(crate) mod output;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod plan;
pub(crate) mod recipe;

use std::io;
use std::path::{Path, PathBuf};

use directory::DirectoryError;
use file::FileError;
use format::FormatError;
use given::GivenError;
use output::OutputError;
use parts::PartsError;
use plan::PlanError;
use recipe::RecipeError;

/// The result of a checkpoint operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a checkpoint operation failed.
///
/// `Display` gives one sentence. The cause, if there is one, is the
/// [`source`](std::error::Error::source).
///
/// `Debug` prints that sentence and the causes, so that a `main` which returns the error reports it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system reported an error.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// The operation, such as "read".
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },

    /// A file is invalid, or cannot hold a tensor.
    #[error(transparent)]
    File(#[from] FileError),

    /// The files of a directory contradict each other.
    #[error(transparent)]
    Directory(#[from] DirectoryError),

    /// A tensor is stored in an unknown way, or a checkpoint format cannot store it.
    #[error(transparent)]
    Format(#[from] FormatError),

    /// An input or a request cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),

    /// Side files with global scales, input scales or importance are wrong.
    #[error(transparent)]
    Given(#[from] GivenError),

    /// A recipe, a setting or a pattern is wrong.
    #[error(transparent)]
    Recipe(#[from] RecipeError),

    /// The output cannot be written where it was requested.
    #[error(transparent)]
    Output(#[from] OutputError),

    /// Parts cannot be merged.
    #[error(transparent)]
    Parts(#[from] PartsError),

    /// A tensor could not be quantized or dequantized.
    #[error("{}: tensor {tensor}", .file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        source: Box<microscale::Error>,
    },

    /// A tensor needs more memory than the system has.
    #[error(
        "{}: tensor {tensor} needs {} MiB of memory at once, and the system does not give them; free memory, \
         raise the limit of the process (ulimit -v), or use a machine with more",
        .file.display(), .bytes.div_ceil(1 << 20)
    )]
    Memory {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The number of bytes that were requested.
        bytes: usize,
    },

    /// A tensor has different shapes in the two checkpoints.
    #[error(
        "tensor {tensor} has shape {first_shape:?} in {} and {second_shape:?} in {}; compare checkpoints of \
         the same model",
        .first.display(), .second.display()
    )]
    ShapeMismatch {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The shape in `first`.
        first_shape: Vec<usize>,
        /// The second file.
        second: PathBuf,
        /// The shape in `second`.
        second_shape: Vec<usize>,
    },

    /// The two checkpoints have no tensor name in common.
    #[error(
        "no tensor of {} is in {}, where the first one is called {second_name:?} and not {first_name:?}; compare \
         checkpoints of the same model, with the same names",
        .first.display(), .second.display()
    )]
    NothingInCommon {
        /// One checkpoint.
        first: PathBuf,
        /// The name of a tensor in `first`.
        first_name: String,
        /// The other checkpoint.
        second: PathBuf,
        /// The name of a tensor in `second`.
        second_name: String,
    },

    /// A GPU stopped working.
    #[error("the device cannot be made ready; choose another with --device")]
    Device(#[source] microscale::Error),

    /// The system cannot start a thread.
    #[error(
        "no thread can be started; raise the limit on processes (ulimit -u, or the container's limit on pids)"
    )]
    Threads(#[source] io::Error),

    /// The caller asked to stop.
    #[error("interrupted: nothing was written")]
    Interrupted,
}

microscale::formats::debug_is_message!(
    Error,
    DirectoryError,
    FileError,
    FormatError,
    GivenError,
    OutputError,
    PartsError,
    PlanError,
    RecipeError,
);

impl Error {
    /// An error of the tensor library for a tensor.
    pub(crate) fn tensor(file: &Path, tensor: &str, source: microscale::Error) -> Self {
        Self::Tensor { file: file.into(), tensor: tensor.into(), source: source.into() }
    }

    /// Makes a closure for `map_err` from the operation and its path.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_path_buf(), source }
    }
}

#[cfg(test)]
mod tests {
    /// The sources with the messages of all errors.
    const SOURCES: [&str; 10] = [
        include_str!("error.rs"),
        include_str!("error/directory.rs"),
        include_str!("error/file.rs"),
        include_str!("error/format.rs"),
        include_str!("error/given.rs"),
        include_str!("error/output.rs"),
        include_str!("error/parts.rs"),
        include_str!("error/place.rs"),
        include_str!("error/plan.rs"),
        include_str!("error/recipe.rs"),
    ];

    /// Only a string can have blanks side by side: rustfmt removes all others, except indents.
    #[test]
    fn messages_have_no_runs_of_blanks() {
        let lines =
            SOURCES.iter().flat_map(|source| source.split("#[cfg(test)]").next()).flat_map(str::lines);
        let runs: Vec<_> = lines.filter(|line| line.trim().contains("  ")).collect();
        assert!(runs.is_empty(), "{runs:#?}");
    }
}
