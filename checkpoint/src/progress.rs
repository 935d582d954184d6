//! Progress reports of an operation, which the caller may interrupt at each report.

use std::ops::ControlFlow;

use crate::error::{Error, Result};

/// The progress of an operation, in bytes of the input's tensors.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor that comes next, or is being worked on; empty at the end.
    pub tensor: &'a str,
    /// Bytes that are done.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

/// A function that is told about progress and may break off: [`Error::Interrupted`]. It is called
/// before each tensor and, where files are written, again and again with the same progress while
/// tensors are worked on, so that it can break off in the middle of one.
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// Counts bytes, and asks whether to go on.
pub(crate) struct Meter<'a, 'b> {
    pub(crate) done: u64,
    total: u64,
    /// The tensor that was reported last.
    tensor: String,
    progress: &'a mut OnProgress<'b>,
}

impl<'a, 'b> Meter<'a, 'b> {
    /// Makes a meter for `total` bytes of the input.
    pub(crate) fn new(total: u64, progress: &'a mut OnProgress<'b>) -> Self {
        Self { done: 0, total, tensor: String::new(), progress }
    }

    /// Reports the tensor that comes next.
    pub(crate) fn before(&mut self, tensor: &str) -> Result<()> {
        self.tensor = tensor.into();
        self.again()
    }

    /// Reports the same again.
    pub(crate) fn again(&mut self) -> Result<()> {
        let progress = Progress { tensor: &self.tensor, done: self.done, total: self.total };
        if (self.progress)(progress).is_break() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
