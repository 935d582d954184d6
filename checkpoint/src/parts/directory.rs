//! `OUT.parts`, the directory of finished shards. A file in it says what it is, so that nothing of anybody
//! else is replaced or removed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::parts::note::Note;
use crate::parts::part::Part;
use crate::read::checkpoint::Checkpoint;
use crate::read::shard::Shard;
use crate::write::file_name::with_suffix;
use crate::write::output::destination;
use crate::write::place::{Place, refuse_overlap};
use crate::write::temporary::{LeftBehind, Temporary, remove_left_behind};

/// The file that marks such a directory.
const MARK: &str = ".microscale-parts";

/// `OUT.parts`.
pub(crate) struct Directory {
    pub(crate) path: PathBuf,
}

impl Directory {
    /// The directory of an output, whether it is there or not.
    ///
    /// # Errors
    /// If it, or the output, is or holds the input or lies in it; if there is an output.
    pub(crate) fn find(checkpoint: &Checkpoint, out: &Path) -> Result<Self> {
        let path = parts_of(&destination(checkpoint, out)?.path);
        refuse_overlap(&[Place::of(&checkpoint.path)?], &Place::of(&path)?)?;
        Ok(Self { path })
    }

    /// The directory of an output, which is created if it is not there.
    ///
    /// # Errors
    /// The errors of [`find`](Self::find), and [`OutputError::NotParts`] for one that is not empty and not marked.
    pub(crate) fn create(checkpoint: &Checkpoint, out: &Path) -> Result<Self> {
        let found = Self::find(checkpoint, out)?;
        let (path, mark) = (&found.path, found.path.join(MARK));
        match fs::create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            created => created.map_err(Error::io("create", path))?,
        }
        let mut entries = fs::read_dir(path).map_err(Error::io("list", path))?;
        let empty = entries.next().is_none();
        // Other parts may have begun a moment ago. The mark is the first thing that they create.
        if empty {
            File::create(&mark).map_err(Error::io("write", &mark))?;
        } else if !mark.is_file() {
            return Err(Error::Output(OutputError::NotParts { path: found.path }));
        }
        Ok(found)
    }

    /// The place of a finished shard.
    pub(crate) fn shard(&self, shard: &Shard) -> PathBuf {
        self.path.join(shard.written_name())
    }

    /// A place for the unfinished shards of a part.
    pub(crate) fn temporary(&self, part: Part) -> Result<Temporary> {
        let created = Temporary::create(&self.path, &purpose(part));
        created.map_err(Error::io("create a temporary directory in", &self.path))
    }

    /// Removes finished shards with their notes, what killed runs have left, and the directory, if nothing
    /// else is in it. Returns whether it is gone.
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

/// `OUT.parts`, the directory in which `quantize --part` puts the finished shards of an output.
///
/// # Errors
/// [`Error::Io`].
pub fn parts_directory(out: &Path) -> Result<PathBuf> {
    Ok(parts_of(&Place::of(out)?.path))
}

/// Removes what runs of a part that were killed have left in `OUT.parts`, and returns what that was.
///
/// Directories of other parts stay: those parts may be made on other machines, and not every file system
/// tells machines of each other's locks.
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
