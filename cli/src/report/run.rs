//! The run that a report describes.

use std::path::Path;
use std::time::SystemTime;

use microscale_checkpoint::Summary;

/// Rows in each table of worst blocks, and so the number of blocks to keep per tensor.
pub(crate) const WORST_BLOCKS: usize = 20;

/// The subject of the report.
pub(crate) struct Run<'a> {
    /// The summary, with details.
    pub(crate) summary: &'a Summary,
    /// The path on the command line.
    pub(crate) input: &'a Path,
    pub(crate) out: &'a Path,
    pub(crate) started: SystemTime,
}
