//! A message that is sent even if the sender panics.

use std::sync::mpsc::Sender;

/// A message that is sent when this is dropped: the message of a panic, unless another takes its
/// place.
pub(crate) struct Reply<'s, M> {
    to: &'s Sender<M>,
    pub(crate) message: Option<M>,
}

impl<'s, M> Reply<'s, M> {
    pub(crate) fn new(to: &'s Sender<M>, panicked: M) -> Self {
        Self { to, message: Some(panicked) }
    }
}

impl<M> Drop for Reply<'_, M> {
    fn drop(&mut self) {
        // The receiver has gone after an error.
        self.message.take().into_iter().for_each(|message| drop(self.to.send(message)));
    }
}
