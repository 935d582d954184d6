//! Findings of the checks.

use std::fmt;

/// A defect and its location.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// A file name with a line, or a kernel with a GPU.
    pub(super) place: String,
    pub(super) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}
