//! Errors of checkpoint files, by subject. Every variant names the file, the tensor where there
//! is one, and what to change.

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

/// The result of the library's checkpoint operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a checkpoint could not be read, rewritten or compared.
///
/// `Display` says one thing; the cause, where there is one, is the [`source`](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// The operation that was tried.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },

    /// A file that is not what it should be, or cannot hold what it should.
    #[error(transparent)]
    File(#[from] FileError),

    /// Files of a directory that do not go together.
    #[error(transparent)]
    Directory(#[from] DirectoryError),

    /// A tensor that is stored in no known way, or cannot be stored by a checkpoint format.
    #[error(transparent)]
    Format(#[from] FormatError),

    /// An input or a request that cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),

    /// Global scales and importance that are given in files.
    #[error(transparent)]
    Given(#[from] GivenError),

    /// Recipes, settings and patterns that are wrong.
    #[error(transparent)]
    Recipe(#[from] RecipeError),

    /// An output that cannot be.
    #[error(transparent)]
    Output(#[from] OutputError),

    /// Parts that cannot be merged.
    #[error(transparent)]
    Parts(#[from] PartsError),

    /// A tensor that could not be quantized or dequantized.
    #[error("{}: tensor {tensor}", .file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        source: Box<microscale::Error>,
    },

    /// A tensor that takes more memory than there is.
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
        /// The bytes that were asked for.
        bytes: usize,
    },

    /// Two checkpoints whose tensors of one name have different shapes.
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
        /// Its shape there.
        first_shape: Vec<usize>,
        /// The other file.
        second: PathBuf,
        /// Its shape there.
        second_shape: Vec<usize>,
    },

    /// Two checkpoints that have no tensor of the same name.
    #[error(
        "no tensor of {} is in {}, where the first one is called {second_name:?} and not {first_name:?}; compare \
         checkpoints of the same model, with the same names",
        .first.display(), .second.display()
    )]
    NothingInCommon {
        /// One checkpoint.
        first: PathBuf,
        /// A name of a tensor there.
        first_name: String,
        /// The other checkpoint.
        second: PathBuf,
        /// A name of a tensor there.
        second_name: String,
    },

    /// A GPU that works no more.
    #[error("the device cannot be made ready; choose another with --device")]
    Device(#[source] microscale::Error),

    /// No thread can be started.
    #[error(
        "no thread can be started; raise the limit on processes (ulimit -u, or the container's limit on pids)"
    )]
    Threads(#[source] io::Error),

    /// The caller asked to stop.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl Error {
    /// A tensor that the library's tensor operations refused.
    pub(crate) fn tensor(file: &Path, tensor: &str, source: microscale::Error) -> Self {
        Self::Tensor { file: file.into(), tensor: tensor.into(), source: source.into() }
    }

    /// Makes the argument of `map_err` from the operation that was tried and its path.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_path_buf(), source }
    }
}
