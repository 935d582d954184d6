//! Progress reports, at which the caller may interrupt.

use std::ops::ControlFlow;

use crate::error::{Error, Result};

/// The progress of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The decoder layer that is being computed.
    pub layer: usize,
    /// Batches that are done, over all layers and models.
    pub done: u64,
    /// All batches.
    pub total: u64,
}

/// A function that is told about progress and may break off: [`Error::Interrupted`].
pub type OnProgress<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// Counts batches.
pub(crate) struct Meter<'a, 'b> {
    done: u64,
    total: u64,
    on_progress: &'a mut OnProgress<'b>,
}

impl<'a, 'b> Meter<'a, 'b> {
    pub(crate) fn new(total: usize, on_progress: &'a mut OnProgress<'b>) -> Self {
        Self { done: 0, total: total as u64, on_progress }
    }

    /// Reports the layer of the next batch.
    pub(crate) fn report(&mut self, layer: usize) -> Result<()> {
        let progress = Progress { layer, done: self.done, total: self.total };
        if (self.on_progress)(progress).is_break() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Counts a batch.
    pub(crate) fn batch(&mut self, layer: usize) -> Result<()> {
        self.done += 1;
        self.report(layer)
    }
}
