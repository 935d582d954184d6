//! A file that appears when it is complete: it is written under a temporary name and renamed at the
//! end. Pipes and devices are written directly.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use microscale_checkpoint::{remove_unfinished_output, replace_file, try_replacing};

use crate::outputs::tell_of_left;

/// A file to write at the end. The path is checked first, so that a typing error does not waste
/// hours of work.
pub(crate) struct Pending {
    path: PathBuf,
    to: To,
}

enum To {
    /// A file, with links resolved: a link remains, and points to the new file.
    File(PathBuf),
    /// A pipe, a device, or this program's own stdout or stderr.
    Stream(Box<dyn Write>),
}

impl Pending {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        anyhow::ensure!(!path.is_dir(), "cannot write {}: it is a directory", path.display());
        let to = To::of(path).with_context(|| cannot_write(path))?;
        Ok(Self { path: path.into(), to })
    }

    /// Writes the text and a line feed, and gives the file its name.
    pub(crate) fn finish(self, text: impl Display) -> Result<()> {
        self.to.finish(text).with_context(|| cannot_write(&self.path))
    }
}

impl To {
    fn of(path: &Path) -> Result<Self> {
        if let Some(stream) = own_stream(path) {
            return Ok(Self::Stream(stream));
        }
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Ok(Self::Stream(Box::new(File::options().append(true).open(path)?)));
        }
        let path = microscale_checkpoint::real_path(path)?;
        tell_of_left(&remove_unfinished_output(&path));
        // The test file is removed: it may be in the input directory, whose files are copied.
        try_replacing(&path)?;
        Ok(Self::File(path))
    }

    fn finish(self, text: impl Display) -> Result<()> {
        match self {
            Self::Stream(mut stream) => {
                writeln!(stream, "{text}")?;
                stream.flush()?;
            }
            Self::File(path) => replace_file(&path, &format!("{text}\n"))?,
        }
        Ok(())
    }
}

/// Returns stdout or stderr if a path leads to the same file. Later output would overwrite a file
/// that was opened twice.
#[cfg(unix)]
fn own_stream(path: &Path) -> Option<Box<dyn Write>> {
    use std::os::unix::fs::MetadataExt;
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let asked = id(path)?;
    if id(Path::new("/dev/stdout")) == Some(asked) {
        Some(Box::new(std::io::stdout()))
    } else if id(Path::new("/dev/stderr")) == Some(asked) {
        Some(Box::new(std::io::stderr()))
    } else {
        None
    }
}

#[cfg(not(unix))]
fn own_stream(_: &Path) -> Option<Box<dyn Write>> {
    None
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
