//! Blocks: quantizing one, cutting matrices into runs of them, and counting events.

pub(super) mod format;
pub(super) mod output;
pub(super) mod partition;
pub(super) mod slow_path;
pub(super) mod tally;
pub(super) mod vectorized;
