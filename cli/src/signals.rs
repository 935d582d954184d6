//! Ctrl-C, SIGTERM and SIGHUP. The program removes incomplete outputs and then ends by the same
//! signal, so that the parent process sees it.
//!
//! Operations check [`caught`] before each tensor. If an operation does not stop in time, the
//! program ends without it. A second signal ends the program immediately.
//!
//! SIGXFSZ is ignored, so that a file beyond the size limit (`ulimit -f`) is an ordinary write
//! error.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The time for an operation to stop by itself. Stopping and cleanup should take less than a
/// second.
const PATIENCE: Duration = Duration::from_millis(600);

static CAUGHT: AtomicBool = AtomicBool::new(false);
static WORKING: AtomicBool = AtomicBool::new(false);

/// Sets whether an operation is running that stops by itself and needs a cleanup.
pub(crate) fn set_working(working: bool) {
    WORKING.store(working, Ordering::Relaxed);
}

/// Returns whether a signal asked the program to end.
pub(crate) fn caught() -> bool {
    CAUGHT.load(Ordering::Relaxed)
}

/// Records the first signal, and returns whether to wait for a running operation.
fn catch() -> bool {
    CAUGHT.store(true, Ordering::Relaxed);
    WORKING.load(Ordering::Relaxed)
}

/// Waits, and then cleans up for an operation that has not stopped.
fn clean_up() {
    std::thread::sleep(PATIENCE);
    microscale_checkpoint::remove_unfinished();
    crate::streams::error("interrupted: nothing was written");
}

#[cfg(unix)]
pub(crate) use unix::{end, watch};

#[cfg(unix)]
mod unix {
    use std::sync::Mutex;
    use std::thread::Builder;
    use std::time::{Duration, Instant};

    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};

    use super::{catch, clean_up};

    const SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    /// Signals within this time count as one: `timeout` signals both the process and its group.
    const ONE: Duration = Duration::from_millis(150);

    static FIRST: Mutex<Option<Signal>> = Mutex::new(None);

    /// Starts to watch for signals. Call it before other threads start: they inherit the mask that
    /// leaves signals to the watching thread.
    pub(crate) fn watch() {
        ignore(Signal::SIGXFSZ);
        let watched: SigSet = SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)).collect();
        let watches =
            watched.thread_block().is_ok() && Builder::new().spawn(move || wait_for(watched)).is_ok();
        if !watches {
            // Signals then end the program immediately, and the next run cleans up.
            let _ = watched.thread_unblock();
        }
    }

    /// Ends the program by the caught signal, if any.
    pub(crate) fn end() {
        let first = FIRST.lock().map_or(None, |first| *first);
        first.into_iter().for_each(end_by);
    }

    fn wait_for(watched: SigSet) {
        let mut since: Option<Instant> = None;
        while let Ok(signal) = watched.wait() {
            match since {
                Some(since) if since.elapsed() < ONE => {}
                Some(_) => end_by(signal),
                None => {
                    since = Some(Instant::now());
                    let _ = FIRST.lock().map(|mut first| *first = Some(signal));
                    if !catch() {
                        end_by(signal);
                    }
                    let end = move || {
                        clean_up();
                        end_by(signal);
                    };
                    // Without another thread, a second signal waits for the cleanup.
                    if Builder::new().spawn(end).is_err() {
                        end();
                    }
                }
            }
        }
    }

    /// Restores the default action of a signal and raises it.
    fn end_by(signal: Signal) {
        let _ = SigSet::from(signal).thread_unblock();
        let _ = raise(signal);
    }

    /// Returns whether the parent process had the program ignore a signal, as `nohup` does.
    fn is_ignored(signal: Signal) -> bool {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: neither the default action nor the previous one runs code of this program,
        // because it has not set a handler yet.
        let before = unsafe { sigaction(signal, &default) };
        let ignored = before.is_ok_and(|before| matches!(before.handler(), SigHandler::SigIgn));
        if ignored {
            ignore(signal);
        }
        ignored
    }

    fn ignore(signal: Signal) {
        let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
        // SAFETY: an ignored signal runs no code, and the program had no handler to replace.
        let _ = unsafe { sigaction(signal, &ignore) };
    }
}

#[cfg(not(unix))]
pub(crate) use other::{end, watch};

#[cfg(not(unix))]
mod other {
    use std::process::exit;

    use super::{catch, caught, clean_up};

    /// The exit code of a process that Ctrl-C ended.
    const ENDED: i32 = 0xC000_013A_u32 as i32;

    /// Starts to watch for Ctrl-C.
    pub(crate) fn watch() {
        // It fails only if a handler exists already.
        let _ = ctrlc::set_handler(|| {
            if caught() || !catch() {
                exit(ENDED);
            }
            std::thread::spawn(|| {
                clean_up();
                exit(ENDED);
            });
        });
    }

    /// Ends the program with the exit code of Ctrl-C, if it was pressed.
    pub(crate) fn end() {
        if caught() {
            exit(ENDED);
        }
    }
}
