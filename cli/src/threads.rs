//! The threads that compute: rayon's, or fewer where the system refuses some of them.

use std::io;
use std::num::NonZero;
use std::sync::mpsc::{self, Sender};
use std::thread::{Builder, JoinHandle, available_parallelism};

use anyhow::{Context, Result};
use rayon::{ThreadBuilder, ThreadPoolBuilder};

use crate::streams::warn;

/// Threads for each core at most: more are no faster, and a million of them take minutes.
const MOST_A_CORE: usize = 16;
/// Threads that write files while others compute. Operations can do with one.
const WRITERS: usize = 3;

/// A thread that waits until rayon has work for it.
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
        given.then_some(()).ok_or_else(|| io::Error::other("there are fewer threads than rayon was told"))
    });
    // It fails in a process that carries this program along and has a pool already, which serves as well.
    let _ = pool.build_global();
    Ok(())
}

/// Starts a thread that waits.
fn wait() -> io::Result<Waiting> {
    let (give, take) = mpsc::channel::<ThreadBuilder>();
    let run = move || take.into_iter().take(1).for_each(ThreadBuilder::run);
    Ok(Waiting { give, thread: Builder::new().spawn(run)? })
}

/// The number of threads that were asked for, or that rayon would start, within reason.
fn wanted(asked: Option<u64>) -> usize {
    let asked = asked.map(|number| usize::try_from(number).unwrap_or(usize::MAX));
    let asked =
        asked.or_else(|| std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok()));
    let cores = available_parallelism().map_or(1, NonZero::get);
    asked.filter(|number| *number > 0).unwrap_or(cores).min(MOST_A_CORE * cores)
}
