//! Temporary directories: removed when they are dropped or the process is asked to end, and if it was killed,
//! by the next run.
//!
//! Each holds a file that its process has locked. The system lets go of the lock when the process ends,
//! however that happens: so a directory whose lock is free was left behind.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use crate::write::file_name::with_suffix;

/// What names of temporary directories have in common, before a few random characters.
const MARK: &str = ".microscale-";
const RANDOM: usize = 6;
const LOCK: &str = "lock";

/// The temporary directories of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary directory.
pub(crate) struct Temporary {
    /// Closed before the directory is removed, as Windows removes no open file. `None` where the file system
    /// has no locks.
    lock: Option<File>,
    directory: TempDir,
}

impl Temporary {
    /// Creates one in a directory, with a name that says what it is for.
    pub(crate) fn create(parent: &Path, purpose: &OsStr) -> io::Result<Self> {
        let prefix = prefix(purpose);
        loop {
            let directory = tempfile::Builder::new().prefix(&prefix).rand_bytes(RANDOM).tempdir_in(parent)?;
            unfinished().push(directory.path().into());
            let mut temporary = Self { lock: None, directory };
            let lock = temporary.path().join(LOCK);
            let locked = File::create_new(&lock).map(|file| (file.try_lock(), file));
            match locked {
                // Another run may have found the directory before its lock was held, and removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
                Ok((Err(TryLockError::WouldBlock), _)) => continue,
                Ok((Err(TryLockError::Error(_)), _)) => {}
                Ok((Ok(()), _)) if !lock.exists() => continue,
                Ok((Ok(()), file)) => temporary.lock = Some(file),
            }
            return Ok(temporary);
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let mut unfinished = unfinished();
        // What cannot be removed now is by the next run.
        let _ = remove_contents(self.path());
        self.lock = None;
        let _ = fs::remove_dir_all(self.path());
        unfinished.retain(|path| path != self.directory.path());
    }
}

/// The list of this process's directories. While it is held, [`remove_unfinished`] waits.
pub(crate) fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this process has begun to write and not finished, while its threads may still be writing: for
/// a process that is about to end and does not wait for them. Nothing gets its name after that.
pub fn remove_unfinished() {
    let unfinished = unfinished();
    for path in unfinished.iter() {
        // A thread may create a file while the others are removed.
        let removed = |path: &Path| remove_contents(path).is_ok() && fs::remove_dir_all(path).is_ok();
        let _ = (0..10).find(|_| removed(path) || !path.exists());
    }
    std::mem::forget(unfinished);
}

/// Something that a run wrote and did not come to finish.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftBehind {
    /// The directory.
    pub path: PathBuf,
    /// The bytes of the files in it.
    pub bytes: u64,
}

/// Removes temporary directories that processes left behind, of one purpose or of any, and returns what they
/// were.
pub(crate) fn remove_left_behind(parent: &Path, purpose: Option<&OsStr>) -> Vec<LeftBehind> {
    let prefix = purpose.map(prefix);
    let is_one =
        |name: &OsStr| prefix.as_ref().map_or_else(|| is_temporary(name), |prefix| is_of(name, prefix));
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let ours = ours.filter(|entry| is_one(&entry.file_name())).map(|entry| entry.path());
    ours.filter_map(|path| remove_if_left(&path)).collect()
}

/// Returns whether a directory belongs to a run, one that goes on or one that was killed.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with('.') && name.rsplit_once(MARK).is_some_and(|(_, random)| is_random(random))
}

fn remove_if_left(path: &Path) -> Option<LeftBehind> {
    let Ok(lock) = File::options().read(true).write(true).open(path.join(LOCK)) else {
        // Killed before it had a lock. One with anything in it is not removed so.
        let _ = fs::remove_dir(path);
        return None;
    };
    lock.try_lock().ok()?;
    let left = LeftBehind { path: path.into(), bytes: bytes_in(path) };
    remove_contents(path).ok()?;
    if cfg!(windows) {
        drop(lock);
    }
    fs::remove_dir_all(path).ok().map(|()| left)
}

/// Removes everything but the file to lock, which comes last: who is killed in the middle of this leaves what
/// can still be told from the work of others.
fn remove_contents(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != LOCK {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn bytes_in(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_in(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    bytes.sum()
}

/// The beginning of the names of a purpose.
fn prefix(purpose: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(with_suffix(purpose, MARK, RANDOM + 1));
    prefix
}

fn is_of(name: &OsStr, prefix: &OsStr) -> bool {
    let (name, prefix) = (name.as_encoded_bytes(), prefix.as_encoded_bytes());
    let random = name.strip_prefix(prefix).and_then(|random| std::str::from_utf8(random).ok());
    random.is_some_and(is_random)
}

fn is_random(text: &str) -> bool {
    text.len() == RANDOM && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_works_on_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let names = || {
            let entries = fs::read_dir(scratch.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let begun = Temporary::create(scratch.path(), "OUT".as_ref()).unwrap();
        assert!(is_temporary(begun.path().file_name().unwrap()));
        let copy = |name: &str| {
            let path = scratch.path().join(name);
            fs::create_dir_all(path.join("output")).unwrap();
            fs::write(path.join("output/shard"), [0; 70]).unwrap();
            path
        };
        let killed = copy(".OUT.microscale-abcDEF");
        fs::write(killed.join(LOCK), "").unwrap();
        for other in [".OUT2.microscale-abcDEF", ".OUT.microscale-abcDEFG", "OUT.microscale-abcDEF"] {
            fs::write(copy(other).join(LOCK), "").unwrap();
        }
        // Without the file to lock it is not known whose it is.
        copy(".OUT.microscale-123456");
        let before = names();

        let removed = remove_left_behind(scratch.path(), Some("OUT".as_ref()));
        assert_eq!(removed, [LeftBehind { path: killed.clone(), bytes: 70 }]);
        let expected: Vec<_> =
            before.into_iter().filter(|name| Some(&**name) != killed.file_name()).collect();
        assert_eq!(names(), expected);
        let path = begun.path().to_path_buf();
        drop(begun);
        assert!(!path.exists());
    }
}
