//! The progress bar, and the flag by which Ctrl-C stops an operation.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use microscale_checkpoint::Progress;

use crate::text::names::shown;

/// Set by Ctrl-C. Operations stop at the next tensor and remove what they have written.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A progress bar on stderr. Where that is not a terminal, nothing is shown.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// Shows the bar and takes over Ctrl-C.
    pub(crate) fn new(what: &'static str) -> Self {
        // Setting a handler fails if there is one already, which then is ours, or on systems without signals.
        let _ = ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed));
        // A bar of no length at all begins full.
        let bar = ProgressBar::no_length();
        let template = "{prefix} [{bar:20}] {bytes}/{total_bytes} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self(bar)
    }

    /// Shows progress; the library's operations call it.
    pub(crate) fn update(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        self.0.set_length(progress.total);
        self.0.set_position(progress.done);
        self.0.set_message(shown(progress.tensor));
        if INTERRUPTED.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_empty() {
        let mut bar = Bar::new("quantizing");
        // Nothing of nothing would be all of it.
        assert_eq!((bar.0.length(), bar.0.position()), (None, 0));
        assert!(bar.update(Progress { tensor: "a", done: 512, total: 1024 }).is_continue());
        assert_eq!((bar.0.length(), bar.0.position()), (Some(1024), 512));
    }
}
