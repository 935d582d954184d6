//! Warnings about a plan, and their texts.

use std::fmt;
use std::path::PathBuf;

/// A warning about a plan. [`Display`](fmt::Display) formats the text for users.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A likely mistake in a recipe or a pattern: it matches no tensor, or changes nothing.
    Recipe(String),
    /// The architecture in config.json is unknown, so tensors are selected by name.
    UnknownArchitecture(String),
    /// Loaders that silently misread the output, with the remedy.
    Loaders(String),
    /// Tensors that are quantized without the Hadamard transform of their recipe.
    Untransformed {
        /// The first of them.
        tensor: String,
        /// Their number.
        count: usize,
        /// The reason.
        why: &'static str,
    },
    /// Names in an optional input file that do not fit the checkpoint.
    File {
        /// The file or directory.
        file: PathBuf,
        /// The names, at least one.
        names: Vec<String>,
        /// The problem with the names.
        problem: FileProblem,
    },
}

/// Problem with names in a file of global scales, importance or input scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileProblem {
    /// No quantized tensor has the name.
    Unused,
    /// No weight that becomes NVFP4 has the name.
    UnusedInput,
    /// The global scale has the other direction than the numerics. Its inverse is used, rounded.
    Inverted,
    /// The global scale differs from other layers that engines fuse with this one.
    Unequal,
    /// The tensors to quantize have no importance.
    Unweighted {
        /// Number of tensors to quantize.
        of: usize,
    },
    /// The tensors have no importance, and get the mean of all others.
    Averaged {
        /// Number of tensors with a loss.
        of: usize,
    },
    /// Some experts of the tensors received no token.
    Partial,
    /// The experts received no token, and get the largest amax of their layer's other experts.
    WithoutTokens,
    /// The calibration has no Hessian for the tensors.
    WithoutHessian {
        /// Number of tensors to quantize.
        of: usize,
    },
}

/// Number of names that a warning lists.
const LISTED: usize = 5;

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recipe(text) | Self::Loaders(text) => f.write_str(text),
            Self::Untransformed { tensor, count, why } => write!(
                f,
                "{count} tensors such as {tensor} are quantized without the Hadamard transform: {why}"
            ),
            Self::UnknownArchitecture(model_type) => write!(
                f,
                "the architecture {model_type} is not among those that are known: linear layers, embeddings and heads \
                 are told by their names, and the config names them as the file does; see with --dry-run which are quantized"
            ),
            Self::File { file, names, problem } => {
                let (first, more) = names.split_at(names.len().min(LISTED));
                write!(f, "{}: {}", file.display(), first.join(", "))?;
                if !more.is_empty() {
                    write!(f, " and {} more", more.len())?;
                }
                match problem {
                    FileProblem::Unused => f.write_str(": no tensor to quantize is called so"),
                    FileProblem::UnusedInput => f.write_str(": no weight that becomes nvfp4 is called so"),
                    FileProblem::Inverted => f.write_str(
                        ": inverted, which rounds, because these numerics take the other direction",
                    ),
                    FileProblem::Unequal => f.write_str(
                        ": not the global scale of the layers that serving engines fuse this with",
                    ),
                    FileProblem::Unweighted { of } => write!(
                        f,
                        ": {} of {of} tensors to quantize have no importance and are searched unweighted",
                        names.len()
                    ),
                    FileProblem::WithoutHessian { of } => write!(
                        f,
                        ": {} of {of} tensors to quantize have no Hessian and are quantized without GPTQ",
                        names.len()
                    ),
                    FileProblem::WithoutTokens => f.write_str(
                        ": no token has come to these experts, whose inputs get the largest amax of the layer's other \
                         experts; calibrate with a longer text",
                    ),
                    FileProblem::Averaged { of } => write!(
                        f,
                        ": {} of {of} tensors have no importance and get the mean of the others",
                        names.len()
                    ),
                    FileProblem::Partial => f.write_str(
                        ": no token has come to some of the experts, which are searched unweighted",
                    ),
                }
            }
        }
    }
}
