//! The output until it is complete: under a temporary name next to its destination and then
//! renamed, or in the directory that it is to fill.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::checkpoint_format::CheckpointFormat;
use crate::error::output::OutputError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::config::{CONFIG_FILE, HF_QUANT_CONFIG_FILE};
use crate::write::others::{OF_FILE_SYSTEM, is_named_like_weights};
use crate::write::place::{Place, refuse_long_name, refuse_overlap};
use crate::write::temporary::{LeftBehind, Temporary, remove_left_behind, unfinished};

/// Output in the making. Dropping it removes everything that was written.
pub(crate) struct Output {
    to: Destination,
    temporary: Temporary,
    /// The path and size of each file that was written.
    files: Vec<(PathBuf, u64)>,
}

/// The place of an output, which was looked at and may be written.
pub(crate) struct Destination {
    /// Absolute, and free of links.
    pub(crate) path: PathBuf,
    /// True if the output is a directory, like the input.
    directory: bool,
    /// True if it is there, empty. It stays the directory that it is, with its owner and mode: it
    /// may be a mount, or stand where nothing else can be created.
    fills: bool,
}

impl Output {
    /// Prepares to write `out`, which is to be a file or a directory like the input.
    ///
    /// # Errors
    /// If `out` exists (an empty directory may), is or holds the input or lies in it, or cannot be
    /// written.
    pub(crate) fn create(input: &Checkpoint, out: &Path) -> Result<Self> {
        let to = destination(input, out)?;
        let within = to.within();
        let temporary = Temporary::create(within, to.name())
            .map_err(Error::io("create a temporary directory in", within))?;
        let output = Self { to, temporary, files: Vec::new() };
        output.refuse_company()?;
        if output.to.directory {
            let contents = output.contents();
            fs::create_dir(&contents).map_err(Error::io("create", &contents))?;
        }
        Ok(output)
    }

    /// The path at which to write a file of the checkpoint, given its path relative to the
    /// checkpoint. Its directory is created.
    pub(crate) fn place(&self, name: &Path) -> Result<PathBuf> {
        if !self.to.directory {
            return Ok(self.contents());
        }
        let path = self.contents().join(name);
        create_directories(&self.contents(), name.parent().unwrap_or(Path::new("")))?;
        refuse_long_name(&path)?;
        Ok(path)
    }

    /// Notes that a file is complete at the path that [`place`](Self::place) gave it.
    pub(crate) fn wrote(&mut self, path: PathBuf, bytes: u64) {
        self.files.push((path, bytes));
    }

    /// Gives the output its name. Nothing that has come up there meanwhile is replaced.
    ///
    /// # Errors
    /// [`OutputError::Lost`] if another process removed or cut files, [`OutputError::Exists`],
    /// [`Error::Io`].
    pub(crate) fn commit(self) -> Result<()> {
        // A thread that ends the process meanwhile waits until the output is complete.
        let held = unfinished();
        let (contents, out) = (self.contents(), &self.to.path);
        self.check_files(&contents)?;
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
        // A process that was removing files when they got their names goes on with it.
        self.check_files(out)
    }

    /// Makes sure that every file of the output is there, at a path that the whole output has, with
    /// its size.
    fn check_files(&self, at: &Path) -> Result<()> {
        let contents = self.contents();
        for (written, expected) in &self.files {
            let name = written.strip_prefix(&contents).unwrap_or(written);
            // A path that is joined with an empty name ends in a slash, as only directories may.
            let file = if self.to.directory { at.join(name) } else { at.into() };
            let found = file.symlink_metadata().ok().filter(|found| found.is_file()).map(|found| found.len());
            if found != Some(*expected) {
                let (out, expected) = (self.to.path.clone(), *expected);
                return Err(Error::Output(OutputError::Lost { file, expected, found, out }));
            }
        }
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
    /// The directory that will contain the output.
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

/// Creates directories below another, which is not created: if a process removed it, the files in
/// it are lost.
pub(crate) fn create_directories(top: &Path, below: &Path) -> Result<()> {
    let mut path = top.to_path_buf();
    for name in below {
        path.push(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            created => created.map_err(Error::io("create", &path))?,
        }
    }
    Ok(())
}

/// The place of an output, which is to be a file or a directory like the input.
///
/// # Errors
/// If it exists (an empty directory may), is or holds the input or lies in it, or has too long a
/// name.
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
    if !input.directory {
        check_extension(input, out)?;
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

/// Refuses a file that is named like one of another container. This program and others choose their
/// readers by such names.
fn check_extension(input: &Checkpoint, out: &Path) -> Result<()> {
    let gguf = input.own_format() == CheckpointFormat::Gguf;
    let extension = if gguf { "gguf" } else { "safetensors" };
    let own = out.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension));
    if own || !is_named_like_weights(out) {
        return Ok(());
    }
    Err(Error::Output(OutputError::NamedLikeOther { path: out.into(), extension }))
}

/// Removes what runs that were killed have left of this output, and returns what that was.
///
/// A run that goes on holds a lock. Directories of other hosts stay and are returned too, as their
/// locks may be invisible here.
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

/// Moves all entries into a directory. The index and the configs, which make it a checkpoint, come
/// last.
///
/// If a move fails, the entries moved before are moved back, or removed if that fails, too.
fn fill(from: &Path, to: &Path) -> io::Result<()> {
    let names = fs::read_dir(from)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_by_key(|name| {
        let description = name == CONFIG_FILE || name == HF_QUANT_CONFIG_FILE;
        (description, name.to_string_lossy().ends_with(".index.json"), Reverse(name.clone()))
    });
    for (moved, name) in names.iter().enumerate() {
        if let Err(error) = fs::rename(from.join(name), to.join(name)) {
            for moved in names[..moved].iter().map(|name| to.join(name)) {
                let back = moved.file_name().map(|name| from.join(name));
                if back.is_none_or(|back| fs::rename(&moved, back).is_err()) {
                    let _ = fs::remove_file(&moved).or_else(|_| fs::remove_dir_all(&moved));
                }
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of a checkpoint of one tensor.
    fn shard(path: &Path) {
        let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7]].concat();
        fs::write(path, bytes).unwrap();
    }

    /// Writes an output of some files, has something done to it, and gives it its name.
    fn committed(input: &Path, out: &Path, sabotage: impl Fn(&Path)) -> Result<()> {
        let checkpoint = Checkpoint::open(input)?;
        let mut output = Output::create(&checkpoint, out)?;
        let names: &[&str] = if checkpoint.directory { &["a", "deep/er/b", "empty"] } else { &[""] };
        for name in names {
            let path = output.place(Path::new(name))?;
            let text = if *name == "empty" { "" } else { "text" };
            fs::write(&path, text).unwrap();
            output.wrote(path, text.len() as u64);
        }
        sabotage(&output.contents());
        output.commit()
    }

    #[test]
    fn an_output_with_a_file_that_is_gone_or_cut_is_not_given_its_name() {
        let scratch = tempfile::tempdir().unwrap();
        let path = |name: &str| scratch.path().join(name);
        fs::create_dir(path("in")).unwrap();
        shard(&path("in/model.safetensors"));
        let (directory, file) = (path("in"), path("in/model.safetensors"));
        let longer = |path: &Path| fs::write(path, "longer").unwrap();
        for (number, (input, sabotage)) in [
            (&directory, &(|at: &Path| fs::remove_file(at.join("deep/er/b")).unwrap()) as &dyn Fn(&Path)),
            (&directory, &|at| longer(&at.join("a"))),
            (&directory, &|at| fs::write(at.join("a"), "").unwrap()),
            (&directory, &|at| fs::remove_file(at.join("empty")).unwrap()),
            (&directory, &|at| fs::remove_dir_all(at).unwrap()),
            (&file, &|at| fs::remove_file(at).unwrap()),
            (&file, &|at| longer(at)),
        ]
        .into_iter()
        .enumerate()
        {
            for fills in [false, true].into_iter().filter(|fills| !fills || input.is_dir()) {
                let out = path(&format!("OUT-{number}-{fills}"));
                if fills {
                    fs::create_dir(&out).unwrap();
                }
                let lost = committed(input, &out, sabotage);
                let expected = matches!(lost, Err(Error::Output(OutputError::Lost { .. })));
                assert!(expected, "{number}: {lost:?}");
                assert!(
                    if fills { is_empty_but(&out, |_| false).unwrap() } else { !out.exists() },
                    "{number}"
                );
                committed(input, &out, |_| {}).unwrap();
            }
        }
    }

    #[test]
    fn directories_are_created_below_one_that_is_there_only() {
        let scratch = tempfile::tempdir().unwrap();
        let top = scratch.path().join("top");
        assert!(create_directories(&top, Path::new("a/b")).is_err() && !top.exists());
        fs::create_dir(&top).unwrap();
        create_directories(&top, Path::new("a/b")).unwrap();
        create_directories(&top, Path::new("a/b")).unwrap();
        assert!(top.join("a/b").is_dir());
    }
}
