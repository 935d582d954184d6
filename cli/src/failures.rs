//! Failures of the program itself, which decide its exit code.

use std::fmt::Display;

/// A command line whose options do not go together.
#[derive(Debug, thiserror::Error)]
#[error("{0}; see --help")]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn new(why: impl Display) -> Self {
        Self(why.to_string())
    }
}

/// Defects that were found in a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("{} found", if *.0 == 1 { "1 defect was".into() } else { format!("{} defects were", .0) })]
pub(crate) struct Found(pub(crate) usize);
