//! The file that values come from, if a device reads them by itself.

use std::path::Path;

/// The place of values in a file.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The file.
    pub file: &'a Path,
    /// The place of the first value, in bytes.
    pub offset: u64,
}
