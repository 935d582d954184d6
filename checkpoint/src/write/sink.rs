//! The way of a tensor's bytes into the file of its shard.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use crate::error::{Error, Result};
use crate::write::writer::Writer;

/// Bytes at a position of a file.
pub(crate) struct Piece {
    pub(crate) position: u64,
    pub(crate) data: Vec<u8>,
}

/// The destination of one tensor: its outputs, by their number among the tensor's outlines.
#[derive(Clone)]
pub(crate) struct Sink {
    pub(crate) writer: Arc<Writer>,
    /// The number of the tensor's first output in the file.
    pub(crate) first: usize,
    /// The queue of the shard's writer thread, if there is one.
    pub(crate) queue: Option<SyncSender<Item>>,
}

/// An entry of the queue of a writer thread.
pub(crate) enum Item {
    Piece(Piece),
    /// The last entry: all pieces of the file were sent.
    End,
}

impl Sink {
    /// Hands bytes of an output to the shard's writer thread, which bounds the bytes that wait.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Interrupted`] after the writer thread has failed: it reports its
    /// error itself.
    pub(crate) fn put(&self, output: usize, offset: u64, data: Vec<u8>) -> Result<()> {
        let position = self.writer.reserve(self.first + output, offset, data.len())?;
        match &self.queue {
            None => self.writer.write_at(position, &data),
            Some(queue) => queue.send(Item::Piece(Piece { position, data })).map_err(|_| Error::Interrupted),
        }
    }

    /// Writes bytes of an output on this thread, without a copy.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn write(&self, output: usize, offset: u64, data: &[u8]) -> Result<()> {
        self.writer.write_at(self.writer.reserve(self.first + output, offset, data.len())?, data)
    }
}
