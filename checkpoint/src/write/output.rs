//! The output until it is complete: under a temporary name next to its destination and then renamed, or in
//! the directory that it is to fill.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::config::{CONFIG_FILE, HF_QUANT_CONFIG_FILE};
use crate::read::shard::is_pickle;
use crate::write::others::OF_FILE_SYSTEM;
use crate::write::place::{Place, refuse_overlap};
use crate::write::temporary::{LeftBehind, Temporary, remove_left_behind, unfinished};

/// Output in the making. Dropping it removes everything that was written.
pub(crate) struct Output {
    to: Destination,
    temporary: Temporary,
}

/// The place of an output, which was looked at and may be written.
pub(crate) struct Destination {
    /// Absolute, and free of links.
    pub(crate) path: PathBuf,
    /// True if the output is a directory, like the input.
    directory: bool,
    /// True if it is there, empty. It stays the directory that it is, with its owner and mode: it may be a
    /// mount, or stand where nothing else can be created.
    fills: bool,
}

impl Output {
    /// Prepares to write `out`, which is to be a file or a directory like the input.
    ///
    /// # Errors
    /// If `out` exists (an empty directory may), is or holds the input or lies in it, or cannot be written.
    pub(crate) fn create(input: &Checkpoint, out: &Path) -> Result<Self> {
        let to = destination(input, out)?;
        let within = to.within();
        let temporary = Temporary::create(within, to.name())
            .map_err(Error::io("create a temporary directory in", within))?;
        let output = Self { to, temporary };
        output.refuse_company()?;
        if output.to.directory {
            let contents = output.contents();
            fs::create_dir(&contents).map_err(Error::io("create", &contents))?;
        }
        Ok(output)
    }

    /// The path at which to write a file of the checkpoint, given its path relative to the checkpoint. Its
    /// directory is created.
    pub(crate) fn place(&self, name: &Path) -> Result<PathBuf> {
        if !self.to.directory {
            return Ok(self.contents());
        }
        let path = self.contents().join(name);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(Error::io("create", directory))?;
        }
        Ok(path)
    }

    /// Gives the output its name. Nothing that has come up there meanwhile is replaced.
    pub(crate) fn commit(self) -> Result<()> {
        // Whoever ends the process meanwhile waits, and finds the output complete.
        let held = unfinished();
        let (contents, out) = (self.contents(), &self.to.path);
        let renamed = if self.to.fills {
            self.refuse_company()?;
            sync_directory(&contents);
            fill(&contents, out)
        } else if self.to.directory {
            sync_directory(&contents);
            fs::rename(&contents, out)
        } else {
            rename_file(&contents, out)
        };
        // Directories are renamed over empty ones only.
        let taken = [ErrorKind::AlreadyExists, ErrorKind::DirectoryNotEmpty, ErrorKind::NotADirectory];
        match renamed {
            Err(error) if taken.contains(&error.kind()) => self.to.refuse_existing()?,
            renamed => renamed.map_err(Error::io("rename the finished output to", out))?,
        }
        sync_directory(self.to.within());
        drop(held);
        Ok(())
    }

    /// The files of a directory, or the one file.
    fn contents(&self) -> PathBuf {
        self.temporary.path().join("output")
    }

    /// Makes sure that nothing but this output is in a directory that is to be filled.
    fn refuse_company(&self) -> Result<()> {
        let ours = |name: &OsStr| Some(name) == self.temporary.path().file_name();
        if self.to.fills && !is_empty_but(&self.to.path, ours)? { self.to.refuse_existing() } else { Ok(()) }
    }
}

impl Destination {
    /// The directory in which the output is made.
    fn within(&self) -> &Path {
        if self.fills { &self.path } else { self.path.parent().unwrap_or(&self.path) }
    }

    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    fn refuse_existing<T>(&self) -> Result<T> {
        Err(Error::Output(OutputError::Exists { path: self.path.clone() }))
    }
}

/// The place of an output, which is to be a file or a directory like the input.
///
/// # Errors
/// If it exists (an empty directory may), or is or holds the input or lies in it.
pub(crate) fn destination(input: &Checkpoint, out: &Path) -> Result<Destination> {
    // A link to nothing leads somewhere, but it is there.
    if out.is_symlink() && !out.exists() {
        return Err(Error::Output(OutputError::Exists { path: out.into() }));
    }
    let missing =
        |parent: &Path| Err(Error::Output(OutputError::Parent { path: out.into(), parent: parent.into() }));
    match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => return missing(parent),
        _ => {}
    }
    // PyTorch's files are input alone.
    if !input.directory && is_pickle(out) {
        return Err(Error::Output(OutputError::NamedLikePytorch { path: out.into() }));
    }
    let place = Place::of(out)?;
    refuse_overlap(&[Place::of(&input.path)?], &place)?;
    let (path, directory) = (place.path, input.directory);
    let mut destination = Destination { path, directory, fills: false };
    let path = &destination.path;
    if path.is_dir() {
        if !directory {
            return Err(Error::Output(OutputError::Kind { path: path.clone() }));
        }
        if !is_empty_but(path, |_| false)? {
            return destination.refuse_existing();
        }
        destination.fills = true;
    } else if path.symlink_metadata().is_ok() {
        return destination.refuse_existing();
    }
    Ok(destination)
}

/// Removes what runs that were killed have left of this output, and returns what that was.
///
/// A run that goes on holds a lock, by which it is known.
pub fn remove_unfinished_output(out: &Path) -> Vec<LeftBehind> {
    let Ok(Place { path: out, .. }) = Place::of(out) else { return Vec::new() };
    let name = out.file_name().unwrap_or_default();
    let beside = out.parent().map(|parent| remove_left_behind(parent, Some(name)));
    let mut left = beside.unwrap_or_default();
    left.extend(remove_left_behind(&out, Some(name)));
    left
}

fn is_empty_but(directory: &Path, known: impl Fn(&OsStr) -> bool) -> Result<bool> {
    for entry in fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let name = entry.map_err(Error::io("list", directory))?.file_name();
        if name != OF_FILE_SYSTEM && !known(&name) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Gives a finished file its name, if that is free: also if two runs do it at once.
fn rename_file(from: &Path, to: &Path) -> io::Result<()> {
    let file = TempPath::try_from_path(from)?;
    let Err(refused) = file.persist_noclobber(to) else { return Ok(()) };
    // Some file systems can only replace.
    if refused.error.kind() == ErrorKind::AlreadyExists || to.symlink_metadata().is_ok() {
        return Err(ErrorKind::AlreadyExists.into());
    }
    Ok(refused.path.persist(to)?)
}

/// Moves everything into a directory, and what makes it a checkpoint last. What was moved is moved back if
/// that fails in the middle.
fn fill(from: &Path, to: &Path) -> io::Result<()> {
    let names = fs::read_dir(from)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_by_key(|name| {
        let description = name == CONFIG_FILE || name == HF_QUANT_CONFIG_FILE;
        (description, name.to_string_lossy().ends_with(".index.json"), Reverse(name.clone()))
    });
    for (moved, name) in names.iter().enumerate() {
        if let Err(error) = fs::rename(from.join(name), to.join(name)) {
            names[..moved].iter().for_each(|name| drop(fs::rename(to.join(name), from.join(name))));
            return Err(error);
        }
    }
    Ok(())
}

/// Makes the entries of a directory durable, where the system can.
fn sync_directory(directory: &Path) {
    if cfg!(unix) {
        // Some file systems refuse; the files themselves are on the disk already.
        let _ = File::open(directory).and_then(|directory| directory.sync_all());
    }
}
