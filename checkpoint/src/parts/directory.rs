//! `OUT.parts`, the directory of finished shards. A marker file in it prevents microscale from
//! replacing or removing a directory that another program made.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::parts::note::Note;
use crate::plan::part::Part;
use crate::read::checkpoint::Checkpoint;
use crate::read::shard::Shard;
use crate::write::file_name::with_suffix;
use crate::write::output::destination;
use crate::write::place::{Place, refuse_overlap};
use crate::write::temporary::{LeftBehind, Temporary, remove_left_behind};

/// The marker file.
const MARK: &str = ".microscale-parts";

/// `OUT.parts`.
pub(crate) struct Directory {
    pub(crate) path: PathBuf,
}

impl Directory {
    /// The directory of an output, which need not exist.
    ///
    /// # Errors
    /// [`OutputError::Overlap`] if the directory or the output overlaps the input, and
    /// [`OutputError::Exists`] if the output exists.
    pub(crate) fn find(checkpoint: &Checkpoint, out: &Path) -> Result<Self> {
        let path = parts_of(&destination(checkpoint, out)?.path);
        refuse_overlap(&[Place::of(&checkpoint.path)?], &Place::of(&path)?)?;
        Ok(Self { path })
    }

    /// The directory of an output. Creates it if it does not exist.
    ///
    /// # Errors
    /// The errors of [`find`](Self::find), and [`OutputError::NotParts`] if the directory has other
    /// files and no marker.
    pub(crate) fn create(checkpoint: &Checkpoint, out: &Path) -> Result<Self> {
        let found = Self::find(checkpoint, out)?;
        let (path, mark) = (&found.path, found.path.join(MARK));
        match fs::create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            created => created.map_err(Error::io("create", path))?,
        }
        let mut entries = fs::read_dir(path).map_err(Error::io("list", path))?;
        let empty = entries.next().is_none();
        // Other parts may have started a moment ago. They create the marker before anything else.
        if empty {
            File::create(&mark).map_err(Error::io("write", &mark))?;
        } else if !mark.is_file() {
            return Err(Error::Output(OutputError::NotParts { path: found.path }));
        }
        Ok(found)
    }

    /// The path of a finished shard.
    pub(crate) fn shard(&self, shard: &Shard) -> PathBuf {
        self.path.join(shard.written_name())
    }

    /// Creates a temporary directory for the unfinished shards of a part.
    pub(crate) fn temporary(&self, part: Part) -> Result<Temporary> {
        let created = Temporary::create(&self.path, &purpose(part));
        created.map_err(Error::io("create a temporary directory in", &self.path))
    }

    /// Removes finished shards and their notes, leftovers of killed runs, and the directory if it
    /// is empty then. Returns whether the directory is gone.
    pub(crate) fn remove(&self, shards: impl Iterator<Item = PathBuf>) -> bool {
        for shard in shards {
            let (_, removed) = (fs::remove_file(Note::path(&shard)), fs::remove_file(&shard));
            let folders = shard.ancestors().skip(1).take_while(|folder| **folder != self.path);
            if removed.is_ok() {
                folders.take_while(|folder| fs::remove_dir(folder).is_ok()).for_each(drop);
            }
        }
        remove_left_behind(&self.path, None);
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        if entries.map(|entry| entry.file_name()).all(|name| name == MARK) {
            let _ = fs::remove_file(self.path.join(MARK));
        }
        fs::remove_dir(&self.path).is_ok()
    }
}

/// `OUT.parts`, the directory for the finished shards of `quantize --part`.
///
/// # Errors
/// [`Error::Io`] if the path of `out` cannot be resolved.
pub fn parts_directory(out: &Path) -> Result<PathBuf> {
    Ok(parts_of(&Place::of(out)?.path))
}

/// Removes and returns the leftovers of killed runs of a part in `OUT.parts`.
///
/// Directories of other parts stay. Other machines may be writing them, and not every file system
/// shows the locks of other machines.
pub fn remove_unfinished_part(out: &Path, part: Part) -> Vec<LeftBehind> {
    let directory = parts_directory(out);
    directory.map_or(Vec::new(), |directory| remove_left_behind(&directory, Some(&purpose(part))))
}

fn parts_of(out: &Path) -> PathBuf {
    out.with_file_name(with_suffix(out.file_name().unwrap_or_default(), ".parts", 0))
}

fn purpose(Part { index, of }: Part) -> OsString {
    format!("part-{index}-of-{of}").into()
}
