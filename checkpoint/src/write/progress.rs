//! Reports of an operation's progress, at each of which the caller may break it off.

use std::ops::ControlFlow;

use crate::error::{Error, Result};
use crate::read::tensor::Tensor;

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

/// A function that is told about progress and may break off: [`Error::Interrupted`]. It is called before each tensor and, where files are
/// written, again and again with the same progress while tensors are worked on, so that it can break off in the middle of one.
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// Counts bytes, and asks whether to go on.
pub(crate) struct Meter<'a, 'b> {
    pub(crate) done: u64,
    total: u64,
    /// The tensor that was told last.
    tensor: String,
    progress: &'a mut OnProgress<'b>,
}

impl<'a, 'b> Meter<'a, 'b> {
    /// Makes a meter for these tensors of the input.
    pub(crate) fn new<'t>(
        tensors: impl Iterator<Item = Tensor<'t>>,
        progress: &'a mut OnProgress<'b>,
    ) -> Self {
        let total = tensors.map(|tensor| tensor.data.len() as u64).sum();
        Self { done: 0, total, tensor: String::new(), progress }
    }

    /// Tells what comes next.
    pub(crate) fn before(&mut self, tensor: &str) -> Result<()> {
        self.tensor = tensor.into();
        self.again()
    }

    /// Tells the same again.
    pub(crate) fn again(&mut self) -> Result<()> {
        let progress = Progress { tensor: &self.tensor, done: self.done, total: self.total };
        if (self.progress)(progress).is_break() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
