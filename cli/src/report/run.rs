//! The run that a report is about.

use std::path::Path;
use std::time::SystemTime;

use microscale_checkpoint::Summary;

/// Blocks in each table of the worst, and so all that need to be kept of a tensor.
pub(crate) const WORST_BLOCKS: usize = 20;

/// The subject of the report.
pub(crate) struct Run<'a> {
    /// The summary, with details.
    pub(crate) summary: &'a Summary,
    /// The path as it was given.
    pub(crate) input: &'a Path,
    pub(crate) out: &'a Path,
    pub(crate) started: SystemTime,
}
