//! JSON files that the program writes beside its output.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::NamedTempFile;

/// A JSON file that appears when it is complete. Created first, so that hours of work do not end in a typing error.
pub(super) struct JsonFile {
    path: PathBuf,
    temporary: NamedTempFile,
}

impl JsonFile {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let context = || format!("cannot write {}", path.display());
        anyhow::ensure!(!path.is_dir(), "cannot write {}: it is a directory", path.display());
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        builder.permissions(<fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666));
        let temporary = builder.tempfile_in(parent).with_context(context)?;
        Ok(Self { path: path.into(), temporary })
    }

    pub(super) fn finish(mut self, json: &Value) -> Result<()> {
        let context = || format!("cannot write {}", self.path.display());
        writeln!(self.temporary, "{json:#}").with_context(context)?;
        self.temporary
            .persist(&self.path)
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(())
    }
}
