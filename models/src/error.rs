//! Errors.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A config.json that does not describe a model that this crate runs.
    #[error("{}: {problem}", file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A tokenizer.json that cannot be read, or a text that it cannot encode.
    #[error("{}: {problem}", file.display())]
    Tokenizer {
        /// The tokenizer's file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A text that is too short to measure with.
    #[error("the text has {tokens} tokens; measuring needs at least 2, and at least 1 window")]
    ShortText {
        /// Tokens of the text.
        tokens: usize,
    },
    /// Models that cannot be compared token by token.
    #[error("{other} has {found} {what}, and {reference} has {expected}; models to compare have the same")]
    Different {
        /// The model that is measured against.
        reference: String,
        /// The other model.
        other: String,
        /// The quantity.
        what: &'static str,
        /// The reference's number.
        expected: usize,
        /// The other model's number.
        found: usize,
    },
    /// Activations that are not finite, so that they have no statistics.
    #[error("{name} has NaN or infinite values for this text; look for such weights with microscale inspect")]
    NotFinite {
        /// The input, keys or values.
        name: String,
    },
    /// Statistics that belong to another model, text or options.
    #[error("{}: {problem}", path.display())]
    Statistics {
        /// The file or directory.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// An error of reading or writing a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// The callback of progress broke off.
    #[error("interrupted")]
    Interrupted,
    /// A tensor that is missing or has another shape, or an error of its arithmetic.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// An error of the checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] microscale_checkpoint::Error),
    /// An error of quantizing.
    #[error(transparent)]
    Quantize(#[from] microscale::Error),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
