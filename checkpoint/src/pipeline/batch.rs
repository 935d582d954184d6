//! Batches of bands: the work of one driver that other threads help with.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use crate::error::Result;
use crate::pipeline::interrupt::Interrupt;
use crate::pipeline::reply::Reply;

/// A batch, whatever its bands return.
pub(super) trait Bands: Send + Sync {
    /// Takes bands and works on them until all are taken.
    fn help(&self, interrupt: &Interrupt);

    /// Returns whether some bands are not taken yet.
    fn has_more(&self) -> bool;

    /// Counts another thread that helps.
    fn joined(&self);

    /// The number of threads that have helped.
    fn helpers(&self) -> usize;
}

/// The work on one band, by its number.
type Work<'env, P> = Box<dyn Fn(usize) -> Result<P> + Send + Sync + 'env>;

/// A number of bands, the work on each, and the way of the results to the driver.
pub(super) struct Batch<'env, P> {
    count: usize,
    /// The first band that no thread has taken.
    next: AtomicUsize,
    helpers: AtomicUsize,
    band: Work<'env, P>,
    results: Sender<(usize, Option<Result<P>>)>,
}

impl<'env, P: Send + 'env> Batch<'env, P> {
    pub(super) fn new(
        count: usize,
        band: Work<'env, P>,
        results: Sender<(usize, Option<Result<P>>)>,
    ) -> Self {
        Self { count, next: AtomicUsize::new(0), helpers: AtomicUsize::new(0), band, results }
    }

    /// Works on the next band that no thread has taken. Returns false if there is none.
    fn work_on_next(&self, interrupt: &Interrupt) -> bool {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.count {
            return false;
        }
        let mut reply = Reply::new(&self.results, (number, None));
        reply.message = Some((number, Some(interrupt.go_on().and_then(|()| (self.band)(number)))));
        true
    }

    /// Works on bands, and passes all results to `fold` in the order of the bands.
    ///
    /// # Errors
    /// The first error in the order of the bands, or of `fold`.
    pub(super) fn drive(
        &self,
        interrupt: &Interrupt,
        results: &Receiver<(usize, Option<Result<P>>)>,
        fold: &mut dyn FnMut(P) -> Result<()>,
    ) -> Result<()> {
        let (mut early, mut folded) = (BTreeMap::new(), 0);
        while folded < self.count {
            let more = self.work_on_next(interrupt);
            // Without another band to work on, the driver waits for the other threads' bands.
            early.extend(if more { None } else { results.recv().ok() });
            early.extend(results.try_iter());
            while let Some(result) = early.remove(&folded) {
                let result = result.unwrap_or_else(|| panic!("another thread panicked"));
                fold(result?)?;
                folded += 1;
            }
        }
        Ok(())
    }

    /// Lets no thread take another band.
    pub(super) fn close(&self) {
        self.next.store(self.count, Ordering::Relaxed);
    }
}

impl<'env, P: Send + 'env> Bands for Batch<'env, P> {
    fn help(&self, interrupt: &Interrupt) {
        while self.work_on_next(interrupt) {}
    }

    fn has_more(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.count
    }

    fn joined(&self) {
        self.helpers.fetch_add(1, Ordering::Relaxed);
    }

    fn helpers(&self) -> usize {
        self.helpers.load(Ordering::Relaxed)
    }
}
