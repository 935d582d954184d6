//! Places in the file system: whether two paths lead to the same one, or one lies in the other,
//! also through links, mounts and other names, and where nothing is there yet.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::write::others;

/// The most links to follow to a file that does not exist yet, the same as Linux's limit.
const MOST_LINKS: usize = 40;
/// How often a path is followed again because other processes created or removed a part of it
/// meanwhile.
const MOST_TRIES: usize = 100;

/// A place that a path leads to.
#[derive(Debug)]
pub(crate) struct Place {
    /// The absolute path without links.
    pub(crate) path: PathBuf,
    /// Device and inode of the path and of each directory that it lies in, where they exist.
    ids: Vec<Option<(u64, u64)>>,
}

impl Place {
    /// Follows a path whose last components need not exist.
    ///
    /// # Errors
    /// [`OutputError::NameTooLong`], and [`Error::Io`] if a directory on the way cannot be looked
    /// into.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        refuse_long_name(path)?;
        let failed = || Error::io("open", path);
        let mut path = std::path::absolute(path).map_err(failed())?;
        // The links of `/dev/fd` lead to pipes that have no path.
        if let Some(found) = fs::metadata(&path).ok().filter(is_stream) {
            return Ok(Self { path, ids: vec![id(&found)] });
        }
        for _ in 0..MOST_LINKS {
            // The target of a link is relative to the directory of the link.
            let Ok(target) = fs::read_link(&path) else { break };
            if path.exists() {
                break;
            }
            path = path.parent().unwrap_or(&path).join(target);
        }
        let (mut missing, mut tries): (Vec<OsString>, _) = (Vec::new(), 0);
        let real = loop {
            let error = match path.canonicalize() {
                Ok(real) => break real,
                Err(error) => error,
            };
            match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) if path.symlink_metadata().is_err() => {
                    missing.push(name.into());
                    path = parent.into();
                }
                // It has come up between the two calls, as when other parts begin.
                _ if error.kind() == ErrorKind::NotFound && tries < MOST_TRIES => tries += 1,
                _ => return Err(failed()(error)),
            }
        };
        let real = missing.into_iter().rev().fold(real, |path, name| path.join(name));
        let ids = real.ancestors().map(|path| fs::metadata(path).ok().and_then(|found| id(&found)));
        Ok(Self { ids: ids.collect(), path: real })
    }

    /// Returns whether both are the same file or directory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.path == other.path || (self.ids[0].is_some() && self.ids[0] == other.ids[0])
    }

    /// Returns whether this is the other, or lies in it.
    pub(crate) fn is_in(&self, other: &Self) -> bool {
        self.path.starts_with(&other.path) || (other.ids[0].is_some() && self.ids.contains(&other.ids[0]))
    }

    /// Returns whether nothing is lost if two outputs are written here.
    fn is_stream(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| is_stream(&found))
    }
}

/// Returns whether something is a pipe or a device.
fn is_stream(found: &Metadata) -> bool {
    !found.is_file() && !found.is_dir()
}

#[cfg(unix)]
fn id(found: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((found.dev(), found.ino()))
}

/// On other systems only canonical paths can be compared.
#[cfg(not(unix))]
fn id(_: &Metadata) -> Option<(u64, u64)> {
    None
}

/// The absolute path without links to a file that need not exist.
///
/// # Errors
/// [`Error::Io`], if a directory on the way cannot be looked into.
pub fn real_path(path: &Path) -> Result<PathBuf> {
    Ok(Place::of(path)?.path)
}

/// The files and directories that an operation reads and writes, each checked against all others
/// before anything is opened for writing.
#[derive(Debug, Default)]
pub struct Places {
    inputs: Vec<Place>,
    outputs: Vec<Place>,
}

impl Places {
    /// Adds a checkpoint to be read, with all of its files.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.read_file(&checkpoint.path)?;
        checkpoint.shards.iter().try_for_each(|shard| self.read_file(&shard.path))?;
        if checkpoint.directory {
            let configs = [&checkpoint.config, &checkpoint.hf_quant_config].into_iter().flatten();
            let index = checkpoint.index.iter().map(|index| &index.file);
            index.chain(configs.map(|config| &config.file)).try_for_each(|file| self.read_file(file))?;
            let (others, _) = others::list(checkpoint)?;
            others.iter().try_for_each(|name| self.read_file(&checkpoint.path.join(name)))?;
        }
        Ok(())
    }

    /// Adds a file to be read.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read_file(&mut self, file: &Path) -> Result<()> {
        self.inputs.push(Place::of(file)?);
        Ok(())
    }

    /// Adds a checkpoint to be written, or the directory of its parts.
    ///
    /// # Errors
    /// [`OutputError::Overlap`] if it is, holds or lies in anything that is read;
    /// [`OutputError::Same`] if that is so with anything that is written; [`Error::Io`].
    pub fn write(&mut self, out: &Path) -> Result<()> {
        let out = Place::of(out)?;
        refuse_overlap(&self.inputs, &out)?;
        self.add(out)
    }

    /// Adds a file to be written, which may lie in a directory that is read, but be no file of it.
    ///
    /// # Errors
    /// [`OutputError::Overlap`], [`OutputError::Same`], [`Error::Io`].
    pub fn write_file(&mut self, file: &Path) -> Result<()> {
        let file = Place::of(file)?;
        let there = file.path.is_file();
        let is = self.inputs.iter().find(|input| file.is(input));
        let lies_in = || self.inputs.iter().find(|input| there && file.is_in(input));
        match is.or_else(lies_in) {
            Some(input) => Err(overlap(input, &file)),
            None => self.add(file),
        }
    }

    fn add(&mut self, new: Place) -> Result<()> {
        let together = |other: &&Place| new.is_in(other) || other.is_in(&new);
        match self.outputs.iter().find(together).filter(|_| !new.is_stream()) {
            Some(other) => {
                let (first, second) = (other.path.clone(), new.path);
                Err(Error::Output(OutputError::Same { first, second }))
            }
            None => {
                self.outputs.push(new);
                Ok(())
            }
        }
    }
}

/// Refuses a path that the file system cannot have.
pub(crate) fn refuse_long_name(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::InvalidFilename => {
            Err(Error::Output(OutputError::NameTooLong { path: path.into() }))
        }
        _ => Ok(()),
    }
}

/// Refuses an output that is, holds or lies in an input.
pub(crate) fn refuse_overlap(inputs: &[Place], out: &Place) -> Result<()> {
    match inputs.iter().find(|input| out.is_in(input) || input.is_in(out)) {
        Some(input) => Err(overlap(input, out)),
        None => Ok(()),
    }
}

fn overlap(input: &Place, output: &Place) -> Error {
    // Links and mounts give one place several paths: it is said as if there were one.
    let input_path = if output.is(input) { output.path.clone() } else { input.path.clone() };
    Error::Output(OutputError::Overlap { input: input_path, output: output.path.clone() })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[cfg(unix)]
    #[test]
    fn links_and_other_names_lead_to_one_place() {
        use std::os::unix::fs::symlink;
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        fs::create_dir_all(path("in/sub")).unwrap();
        fs::write(path("in/a"), "").unwrap();
        fs::hard_link(path("in/a"), path("b")).unwrap();
        symlink("in", path("link")).unwrap();
        symlink("in/new", path("dangling")).unwrap();
        symlink("there", path("back")).unwrap();
        symlink("back", path("there")).unwrap();
        let place = |name: &str| Place::of(&path(name)).unwrap();

        for (one, other) in [
            ("in", "link"),
            ("in/a", "b"),
            ("in/a", "link/a"),
            ("in/new", "link/new"),
            ("in/new", "dangling"),
            ("in/new/x/y", "link/sub/../new/x/y"),
        ] {
            assert!(place(one).is(&place(other)) && place(other).is(&place(one)), "{one}, {other}");
        }
        assert!(place("link/new/x").is_in(&place("in")) && !place("in").is_in(&place("link/new")));
        assert!(!place("in/a").is(&place("in/sub")) && !place("in/one").is(&place("in/two")));
        assert!(Place::of(&path("back")).is_err(), "links in a circle");
    }

    #[test]
    fn directories_that_come_and_go_are_places() {
        let scratch = tempfile::tempdir().unwrap();
        let (real, path) = (scratch.path().canonicalize().unwrap(), scratch.path().join("OUT.parts"));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    fs::create_dir(&path).unwrap();
                    fs::remove_dir(&path).unwrap();
                }
            });
            let found = (0..30_000).map(|_| Place::of(&path.join("shard")).map(|place| place.path));
            let wrong = found
                .filter(|found| !found.as_ref().is_ok_and(|found| *found == real.join("OUT.parts/shard")));
            let wrong: Vec<_> = wrong.take(1).collect();
            stop.store(true, Ordering::Relaxed);
            assert!(wrong.is_empty(), "{wrong:?}");
        });
    }

    #[test]
    fn names_and_paths_that_are_too_long_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = |length: usize| scratch.path().join("x".repeat(length));
        assert!(Place::of(&path(255)).is_ok());
        let deep = (0..30).fold(scratch.path().to_path_buf(), |path, _| path.join("x".repeat(200)));
        for path in [path(256), path(256).join("y"), deep] {
            let refused = Place::of(&path);
            assert!(matches!(refused, Err(Error::Output(OutputError::NameTooLong { .. }))), "{refused:?}");
        }
    }
}
