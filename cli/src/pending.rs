//! A file that appears when it is complete: it is written under a temporary name and renamed at the end.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

/// A file to be written at the end. Created first, under a temporary name, so that hours of work do not
/// end in a typing error.
pub(crate) struct Pending {
    path: PathBuf,
    temporary: NamedTempFile,
}

impl Pending {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let context = || format!("cannot write {}", path.display());
        anyhow::ensure!(!path.is_dir(), "cannot write {}: it is a directory", path.display());
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let builder = &mut tempfile::Builder::new();
        #[cfg(unix)]
        let builder = builder
            .permissions(<std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
        let temporary = builder.tempfile_in(parent).with_context(context)?;
        Ok(Self { path: path.into(), temporary })
    }

    /// Writes the text and a line feed, and gives the file its name.
    pub(crate) fn finish(mut self, text: impl Display) -> Result<()> {
        let context = || format!("cannot write {}", self.path.display());
        writeln!(self.temporary, "{text}").with_context(context)?;
        self.temporary
            .persist(&self.path)
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(())
    }
}
