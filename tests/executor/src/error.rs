//! Errors in PTX that are found before it runs.

use std::fmt;

/// Why PTX text cannot be parsed or lowered, or why a buffer cannot be returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The text is not PTX that this crate can parse.
    Syntax {
        /// The line in the text, from 1.
        line: u32,
        /// The expected and the found text.
        message: String,
    },
    /// The instruction, modifier, type or combination has no semantics in this crate.
    Unsupported {
        /// The line in the text, from 1.
        line: u32,
        /// The statement.
        statement: String,
        /// The reason.
        message: String,
    },
    /// PTX does not allow the statement: an undeclared register, a wrong width, too few operands.
    Invalid {
        /// The line in the text, from 1.
        line: u32,
        /// The statement.
        statement: String,
        /// The reason.
        message: String,
    },
    /// The module has no kernel of that name.
    NoKernel(String),
    /// The caller asked for a buffer, but some of its bytes were never written.
    NeverWritten {
        /// The buffer's name.
        buffer: String,
        /// The offset of the first such byte.
        offset: usize,
        /// The number of such bytes.
        bytes: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax { line, message } => write!(f, "line {line}: {message}"),
            Self::Unsupported { line, statement, message } => {
                write!(f, "line {line}: `{statement}` is not supported: {message}")
            }
            Self::Invalid { line, statement, message } => {
                write!(f, "line {line}: `{statement}` is not valid: {message}")
            }
            Self::NoKernel(name) => write!(f, "there is no kernel `{name}`"),
            Self::NeverWritten { buffer, offset, bytes } => {
                write!(f, "{bytes} bytes of `{buffer}` were never written, the first at offset {offset}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// A result with this crate's error.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
