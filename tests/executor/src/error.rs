//! Errors in PTX, found before it runs.

use std::fmt;

/// The reason why PTX text cannot be read or lowered, or a buffer not be handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The text is not PTX as this crate knows it.
    Syntax {
        /// The line in the text, from 1.
        line: u32,
        /// The text that was expected and the one that was found.
        message: String,
    },
    /// An instruction, modifier, type or combination that has no semantics here.
    Unsupported {
        /// The line in the text, from 1.
        line: u32,
        /// The statement.
        statement: String,
        /// The reason.
        message: String,
    },
    /// A statement that PTX does not allow: an undeclared register, a wrong width, too few operands.
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
    /// A buffer was asked for, and some of its bytes were never written.
    NeverWritten {
        /// The buffer's name.
        buffer: String,
        /// The first such byte.
        offset: usize,
        /// The number of bytes there are.
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
