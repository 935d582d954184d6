//! Work without the interpreter's lock, over rayon's threads.
//!
//! A process that was forked has no thread but the one that forked: the pool of its parent would
//! never answer. `multiprocessing` and PyTorch's data loaders fork, so that work in such a process
//! gets a pool of its own.

use std::process;
use std::sync::{Mutex, OnceLock, PoisonError};

use microscale::cpu::Isa;
use pyo3::marker::Ungil;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::errors::error;

/// The process that the module was loaded in.
static HOME: OnceLock<u32> = OnceLock::new();
/// The pool of a forked process. Pools are never dropped: the threads of the pool of a parent do
/// not exist here.
static FORKED: Mutex<Option<(u32, &'static ThreadPool)>> = Mutex::new(None);

/// Threads for each core at most: a million of them would take minutes to start.
const MOST_A_CORE: usize = 16;

/// The number of threads if `RAYON_NUM_THREADS` asks for more than [`MOST_A_CORE`] per core; 0
/// leaves it to rayon.
fn capped() -> usize {
    let most = MOST_A_CORE * std::thread::available_parallelism().map_or(1, usize::from);
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok());
    if asked.is_some_and(|asked: usize| asked > most) { most } else { 0 }
}

/// Notes which process has rayon's own pool. Starts the pool if it would have too many threads.
pub(crate) fn remember_process() {
    HOME.get_or_init(process::id);
    let threads = capped();
    if threads > 0 {
        // It fails if the process has a pool already, which serves as well.
        let _ = ThreadPoolBuilder::new().num_threads(threads).build_global();
    }
}

/// Does work while other threads of Python run.
///
/// # Errors
///
/// `microscale.Error` if `MICROSCALE_CPU` names no instruction set of this machine, as the program.
pub(crate) fn work<R: Send + Ungil>(py: Python<'_>, work: impl FnOnce() -> R + Send + Ungil) -> PyResult<R> {
    require_instruction_set(py)?;
    Ok(py.detach(|| match pool_of_fork() {
        None => work(),
        Some(pool) => pool.install(work),
    }))
}

/// Raises an error for an instruction set in `MICROSCALE_CPU` that is not there. The first work
/// decides which one is used, so that later changes of the variable change nothing.
fn require_instruction_set(py: Python<'_>) -> PyResult<()> {
    static CHECKED: OnceLock<()> = OnceLock::new();
    if CHECKED.get().is_none() {
        Isa::asked().map_err(|why| error(py, why))?;
        CHECKED.get_or_init(|| ());
    }
    Ok(())
}

/// The pool to work in, if it is not rayon's own.
fn pool_of_fork() -> Option<&'static ThreadPool> {
    let process = process::id();
    if HOME.get() == Some(&process) {
        return None;
    }
    let mut forked = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    match *forked {
        Some((owner, pool)) if owner == process => Some(pool),
        _ => {
            // Without threads of its own a process can still work: by one.
            let pool = ThreadPoolBuilder::new().num_threads(capped()).build().ok()?;
            let pool: &'static ThreadPool = Box::leak(Box::new(pool));
            *forked = Some((process, pool));
            Some(pool)
        }
    }
}
