//! The interruption of an operation by its caller.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Set when the caller breaks off. No band begins any more.
#[derive(Default)]
pub(crate) struct Interrupt(AtomicBool);

impl Interrupt {
    /// Makes all threads stop at the next band.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// [`Error::Interrupted`] after [`Self::set`].
    pub(crate) fn go_on(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }
}
