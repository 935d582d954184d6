//! The place of the output: next to its destination under a temporary name, and renamed when complete.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;

/// Output in the making. Dropping it removes everything that was written.
pub(crate) struct Output {
    out: PathBuf,
    parent: PathBuf,
    /// Holds the files of a directory, or the one file.
    temporary: TempDir,
    /// The name of the file, if the output is not a directory.
    single: Option<PathBuf>,
}

impl Output {
    /// Prepares to write `out`, which is to be a file or a directory like the input.
    ///
    /// # Errors
    /// If `out` exists (an empty directory may), is or holds the input or lies in it, or cannot be written.
    pub(crate) fn create(input: &Checkpoint, out: &Path) -> Result<Self> {
        let out = destination(input, out)?;
        let (Some(parent), Some(name)) = (out.parent(), out.file_name()) else {
            return Err(Error::Output(OutputError::Exists { path: out }));
        };
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(name);
        prefix.push(".tmp");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        // The renamed directory should have the permissions of an ordinary new one.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let temporary =
            builder.tempdir_in(parent).map_err(Error::io("create a temporary directory in", parent))?;
        let single = (!input.directory).then(|| PathBuf::from(name));
        Ok(Self { parent: parent.into(), temporary, single, out })
    }

    /// The path at which to write a file of the checkpoint, given its path relative to the checkpoint. Its
    /// directory is created.
    pub(crate) fn place(&self, name: &Path) -> Result<PathBuf> {
        let path = self.temporary.path().join(self.single.as_deref().unwrap_or(name));
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(Error::io("create", directory))?;
        }
        Ok(path)
    }

    /// Gives the output its name.
    pub(crate) fn commit(self) -> Result<()> {
        let from = self
            .single
            .as_ref()
            .map_or(self.temporary.path().into(), |name| self.temporary.path().join(name));
        // An empty directory of that name is replaced; anything that has come up meanwhile is not.
        if self.out.is_dir() {
            fs::remove_dir(&self.out).map_err(Error::io("replace", &self.out))?;
        } else if self.out.symlink_metadata().is_ok() {
            return Err(Error::Output(OutputError::Exists { path: self.out }));
        }
        sync_directory(self.temporary.path());
        fs::rename(&from, &self.out).map_err(Error::io("rename the finished output to", &self.out))?;
        sync_directory(&self.parent);
        if self.single.is_none() {
            // Renamed away: there is nothing left to remove.
            let _ = self.temporary.keep();
        }
        Ok(())
    }
}

/// The absolute path of an output, which is to be a file or a directory like the input.
///
/// # Errors
/// If it exists (an empty directory may), or is or holds the input or lies in it.
pub(crate) fn destination(input: &Checkpoint, out: &Path) -> Result<PathBuf> {
    let out = resolve(out)?;
    let real_input = input.path.canonicalize().map_err(Error::io("open", &input.path))?;
    if out.starts_with(&real_input) || real_input.starts_with(&out) {
        return Err(Error::Output(OutputError::Overlap { input: real_input, output: out }));
    }
    refuse_existing(input, &out)?;
    Ok(out)
}

/// Makes the entries of a directory durable, where the system can.
fn sync_directory(directory: &Path) {
    if cfg!(unix) {
        // Some file systems refuse; the files themselves are on the disk already.
        let _ = File::open(directory).and_then(|directory| directory.sync_all());
    }
}

/// The absolute path of a file that need not exist yet, free of symbolic links.
fn resolve(out: &Path) -> Result<PathBuf> {
    if out.symlink_metadata().is_ok() {
        // A symbolic link to nothing cannot be resolved, but it is there.
        return out.canonicalize().map_err(|_| Error::Output(OutputError::Exists { path: out.into() }));
    }
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = out.file_name().ok_or_else(|| Error::Output(OutputError::Exists { path: out.into() }))?;
    if !parent.is_dir() {
        return Err(Error::Output(OutputError::Parent { path: out.into(), parent: parent.into() }));
    }
    Ok(parent.canonicalize().map_err(Error::io("open", parent))?.join(name))
}

fn refuse_existing(input: &Checkpoint, out: &Path) -> Result<()> {
    if out.symlink_metadata().is_err() {
        return Ok(());
    }
    if !out.is_dir() {
        return Err(Error::Output(OutputError::Exists { path: out.into() }));
    }
    if !input.directory {
        return Err(Error::Output(OutputError::Kind { path: out.into() }));
    }
    let mut entries = fs::read_dir(out).map_err(Error::io("list", out))?;
    if entries.next().is_some() {
        Err(Error::Output(OutputError::Exists { path: out.into() }))
    } else {
        Ok(())
    }
}
