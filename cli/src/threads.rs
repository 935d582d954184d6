//! The compute threads: rayon's number, or fewer if the system refuses some.

use std::io;
use std::num::NonZero;
use std::sync::mpsc::{self, Sender};
use std::thread::{Builder, JoinHandle, available_parallelism};

use anyhow::{Context, Result};
use rayon::{ThreadBuilder, ThreadPoolBuilder};

use crate::streams::warn;

/// Maximum threads per core. More are no faster, and a million of them take minutes to start.
const MOST_A_CORE: usize = 16;
/// Threads that write files during the computation. Operations can work with one.
const WRITERS: usize = 3;

/// A started thread that waits for rayon's work.
struct Waiting {
    give: Sender<ThreadBuilder>,
    thread: JoinHandle<()>,
}

/// Starts rayon's threads.
///
/// rayon panics if the system refuses one of them, as it does at the limit on processes. So this
/// function starts the threads first. Operations on checkpoints start the same number of threads
/// again, and [writers](WRITERS): it counts these, and leaves them to the operations.
///
/// # Errors
/// If the system refuses all threads but one.
pub(crate) fn start(asked: Option<u64>) -> Result<()> {
    let wanted = wanted(asked);
    let (mut waiting, mut refused) = (Vec::new(), None);
    while waiting.len() < 2 * wanted + WRITERS && refused.is_none() {
        match wait() {
            Ok(thread) => waiting.push(thread),
            Err(error) => refused = Some(error),
        }
    }
    let spare = (waiting.len().saturating_sub(WRITERS) / 2).max(usize::from(waiting.len() > 1));
    for Waiting { give, thread } in waiting.drain(spare..) {
        drop(give);
        let _ = thread.join();
    }
    if let Some(error) = refused {
        let limit =
            "the system refuses more threads (ulimit -u, ulimit -v, or the container's limit on pids)";
        if spare == 0 {
            return Err(error)
                .with_context(|| format!("no thread to compute with: {limit}; raise the limit"));
        }
        if spare < wanted {
            warn(format_args!("{spare} threads compute instead of {wanted}: {limit}"));
        }
    }
    let pool = ThreadPoolBuilder::new().num_threads(waiting.len());
    let pool = pool.spawn_handler(|thread| {
        let given = waiting.pop().is_some_and(|Waiting { give, .. }| give.send(thread).is_ok());
        given.then_some(()).ok_or_else(|| io::Error::other("fewer threads than rayon expects"))
    });
    // It fails if the process already has a pool, as in Python, and then uses that pool.
    let _ = pool.build_global();
    Ok(())
}

/// Starts a waiting thread.
fn wait() -> io::Result<Waiting> {
    let (give, take) = mpsc::channel::<ThreadBuilder>();
    let run = move || take.into_iter().take(1).for_each(ThreadBuilder::run);
    Ok(Waiting { give, thread: Builder::new().spawn(run)? })
}

/// Returns the requested number of threads, or rayon's, up to [`MOST_A_CORE`] per core.
fn wanted(asked: Option<u64>) -> usize {
    let asked = asked.map(|number| usize::try_from(number).unwrap_or(usize::MAX));
    let asked =
        asked.or_else(|| std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok()));
    let cores = available_parallelism().map_or(1, NonZero::get);
    asked.filter(|number| *number > 0).unwrap_or(cores).min(MOST_A_CORE * cores)
}
