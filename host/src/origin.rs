//! The file that values come from, for devices that read it themselves.

use std::path::Path;

/// The position of values in a file.
#[derive(Clone, Copy, Debug)]
pub struct Origin<'a> {
    /// The file.
    pub file: &'a Path,
    /// The offset of the first value in bytes.
    pub offset: u64,
}
