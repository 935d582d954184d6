//! The error of an operation that several threads work on.

use crate::error::{Error, Result};

/// The first error in the order of the work, whichever was noticed first.
#[derive(Default)]
pub(crate) struct Failure(Option<(usize, Error)>);

/// The number of errors that the caller causes, after all work.
const CALLER: usize = usize::MAX;

impl Failure {
    /// Notes an error of the work of this number.
    pub(crate) fn at(&mut self, number: usize, error: Error) {
        if self.0.as_ref().is_none_or(|(first, _)| number < *first) {
            self.0 = Some((number, error));
        }
    }

    /// Notes that the caller broke off.
    pub(crate) fn by_caller(&mut self, error: Error) {
        self.at(CALLER, error);
    }

    /// Returns whether there is an error.
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// # Errors
    /// The first error, if there is one.
    pub(crate) fn into_result(self) -> Result<()> {
        self.0.map_or(Ok(()), |(_, error)| Err(error))
    }
}
