//! Being asked to end: Ctrl-C, SIGTERM, SIGHUP. What was begun is removed, and the program then ends by that
//! signal, so that whoever started it can tell.
//!
//! Operations look at [`caught`] before each tensor. If that takes too long, they are not waited for. A second
//! signal ends the program at once.
//!
//! SIGXFSZ is ignored: a file beyond the limit on sizes (`ulimit -f`) then is an error of writing like any other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The time for an operation to stop by itself. Together with what follows it should be less than a second.
const PATIENCE: Duration = Duration::from_millis(600);

static CAUGHT: AtomicBool = AtomicBool::new(false);
static WORKING: AtomicBool = AtomicBool::new(false);

/// Says whether an operation is going on, which is to stop by itself and to be cleaned up after.
pub(crate) fn set_working(working: bool) {
    WORKING.store(working, Ordering::Relaxed);
}

/// Returns whether the program was asked to end.
pub(crate) fn caught() -> bool {
    CAUGHT.load(Ordering::Relaxed)
}

/// Notes the first signal, and returns whether the operation that is going on has to be given time.
fn catch() -> bool {
    CAUGHT.store(true, Ordering::Relaxed);
    WORKING.load(Ordering::Relaxed)
}

/// Waits, and then does the work of an operation that has not stopped.
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
    /// Signals that follow that fast are one: `timeout` sends its signal to the process and to its group.
    const ONE: Duration = Duration::from_millis(150);

    static FIRST: Mutex<Option<Signal>> = Mutex::new(None);

    /// Begins to watch for signals. To be called before there are other threads, which are to leave them to
    /// the one that watches.
    pub(crate) fn watch() {
        ignore(Signal::SIGXFSZ);
        let watched: SigSet = SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)).collect();
        let watches =
            watched.thread_block().is_ok() && Builder::new().spawn(move || wait_for(watched)).is_ok();
        if !watches {
            // They end the program at once, and the next run cleans up after it.
            let _ = watched.thread_unblock();
        }
    }

    /// Ends the program by the signal that was caught, if one was.
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
                    // Without another thread, a second signal has to wait for this.
                    if Builder::new().spawn(end).is_err() {
                        end();
                    }
                }
            }
        }
    }

    /// Lets a signal do to this process what it would have done.
    fn end_by(signal: Signal) {
        let _ = SigSet::from(signal).thread_unblock();
        let _ = raise(signal);
    }

    /// Returns whether whoever started the program has it ignore a signal, as `nohup` does.
    fn is_ignored(signal: Signal) -> bool {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: neither the default nor what was there before runs code of this program: nothing has set a
        // handler yet.
        let before = unsafe { sigaction(signal, &default) };
        let ignored = before.is_ok_and(|before| matches!(before.handler(), SigHandler::SigIgn));
        if ignored {
            ignore(signal);
        }
        ignored
    }

    fn ignore(signal: Signal) {
        let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
        // SAFETY: a signal that is ignored runs no code, and this program has no handler that is replaced.
        let _ = unsafe { sigaction(signal, &ignore) };
    }
}

#[cfg(not(unix))]
pub(crate) use other::{end, watch};

#[cfg(not(unix))]
mod other {
    use std::process::exit;

    use super::{catch, caught, clean_up};

    /// The exit code of a process that Ctrl-C has ended.
    const ENDED: i32 = 0xC000_013A_u32 as i32;

    /// Begins to watch for Ctrl-C.
    pub(crate) fn watch() {
        // It fails only if there is a handler.
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

    /// Ends the program as Ctrl-C does, if it was pressed.
    pub(crate) fn end() {
        if caught() {
            exit(ENDED);
        }
    }
}
