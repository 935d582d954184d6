//! Replacing a single file, such as a report: the new one appears when it is complete. The next run
//! removes the unfinished file of a killed run, as it removes unfinished outputs.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::write::temporary::{Temporary, unfinished};

/// Makes sure that a file can be created in the directory of a path, which must be absolute and
/// free of links.
///
/// # Errors
/// The system's.
pub fn try_replacing(path: &Path) -> io::Result<()> {
    temporary(path).map(drop)
}

/// Writes a file and gives it its name when it is complete. It keeps the mode of a file that it
/// replaces. The path must be absolute and free of links.
///
/// # Errors
/// The system's. A file that was there is unchanged then.
pub fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let temporary = temporary(path)?;
    let unnamed = temporary.path().join("file");
    let mut file = File::create_new(&unnamed)?;
    file.write_all(text.as_bytes())?;
    if let Ok(replaced) = fs::metadata(path) {
        file.set_permissions(replaced.permissions())?;
    }
    // Windows renames no open file.
    drop(file);
    let _held = unfinished();
    fs::rename(unnamed, path)
}

fn temporary(path: &Path) -> io::Result<Temporary> {
    let parent = path.parent().unwrap_or(Path::new("."));
    Temporary::create(parent, path.file_name().unwrap_or_default())
}
