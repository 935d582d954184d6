//! The progress bar, whose updates also stop an operation after a signal.

use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressStyle};
use microscale_checkpoint::Progress;

use crate::signals;
use crate::streams::is_quiet;
use crate::text::names::shown;

/// A progress bar on stderr, hidden if stderr is not a terminal.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// Shows the bar of an operation. From here on, signals let the operation clean up.
    pub(crate) fn new(what: &'static str) -> Self {
        signals::set_working(true);
        // A bar of length 0 would start full.
        let bar = if is_quiet() { ProgressBar::hidden() } else { ProgressBar::no_length() };
        let template = "{prefix} [{bar:20}] {bytes}/{total_bytes} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self(bar)
    }

    /// Shows progress. The library's operations call it.
    pub(crate) fn update(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        self.0.set_length(progress.total);
        self.0.set_position(progress.done);
        self.0.set_message(shown(progress.tensor));
        if signals::caught() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// A progress bar of a model's layers.
#[cfg(feature = "models")]
pub(crate) struct LayersBar(Bar);

#[cfg(feature = "models")]
impl LayersBar {
    /// Shows the bar of an operation.
    pub(crate) fn new(what: &'static str) -> Self {
        let bar = Bar::new(what);
        if let Ok(style) =
            ProgressStyle::with_template("{prefix} [{bar:20}] {percent} %, {eta} left {wide_msg}")
        {
            bar.0.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    /// Shows progress.
    pub(crate) fn update(&mut self, progress: microscale_models::Progress) -> ControlFlow<()> {
        self.0.0.set_length(progress.total);
        self.0.0.set_position(progress.done);
        self.0.0.set_message(format!("layer {}", progress.layer));
        if signals::caught() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        signals::set_working(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_empty() {
        let mut bar = Bar::new("quantizing");
        // Zero of zero bytes would be complete.
        assert_eq!((bar.0.length(), bar.0.position()), (None, 0));
        assert!(bar.update(Progress { tensor: "a", done: 512, total: 1024 }).is_continue());
        assert_eq!((bar.0.length(), bar.0.position()), (Some(1024), 512));
    }
}
