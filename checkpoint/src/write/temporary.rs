//! Temporary directories: removed when they are dropped or the process is asked to end, and if it
//! was killed, by the next run.
//!
//! Each contains a file that its process has locked. The system releases the lock when the process
//! ends, however that happens, so a directory whose lock is free is abandoned.
//!
//! The file names the machine, as not every file system shows one machine's locks to another.
//! Directories of other machines are reported and never removed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

use crate::write::file_name::with_suffix;
use crate::write::machine::Machine;

/// What names of temporary directories have in common, before a few random characters.
const MARK: &str = ".microscale-";
const RANDOM: usize = 6;
const LOCK: &str = "lock";
/// The name that a directory gets before its contents are removed.
const REMOVED: &str = "removed";

/// The temporary directories of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A temporary directory.
pub(crate) struct Temporary {
    /// Closed before the directory is removed, as Windows removes no open file. `None` where the
    /// file system has no locks.
    lock: Option<File>,
    directory: TempDir,
}

impl Temporary {
    /// Creates one in a directory, with its purpose in its name.
    pub(crate) fn create(parent: &Path, purpose: &OsStr) -> io::Result<Self> {
        let prefix = prefix(purpose);
        loop {
            let directory = tempfile::Builder::new().prefix(&prefix).rand_bytes(RANDOM).tempdir_in(parent)?;
            unfinished().push(directory.path().into());
            let mut temporary = Self { lock: None, directory };
            let lock = temporary.path().join(LOCK);
            let locked = lock_with_name(&lock);
            match locked {
                // Another run may have found the directory before its lock was held, and removed
                // it.
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
        // The next run removes the files that cannot be removed now.
        let _ = remove_contents(self.path());
        self.lock = None;
        let _ = fs::remove_dir_all(self.path());
        unfinished.retain(|path| path != self.directory.path());
    }
}

/// Creates a file and locks it before anything else, and then writes into it which machine this is.
fn lock_with_name(path: &Path) -> io::Result<(Result<(), TryLockError>, File)> {
    let mut file = File::create_new(path)?;
    let locked = file.try_lock();
    file.write_all(Machine::this().to_text().as_bytes())?;
    // Network file systems may show the text to other machines only after this.
    let _ = file.sync_all();
    Ok((locked, file))
}

/// The list of this process's directories. While it is held, [`remove_unfinished`] waits.
pub(crate) fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this process has begun to write and not finished, while its threads may still be
/// writing: for a process that is about to end and does not wait for them. Nothing gets its name
/// after that.
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
    /// The host whose run made it, if that is another one. Then it was not removed: the run may go
    /// on.
    pub other_host: Option<String>,
}

/// Removes abandoned temporary directories, of one purpose or of any, and returns them.
/// Directories of other hosts stay, and are returned too.
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
    let Ok(mut lock) = File::options().read(true).write(true).open(path.join(LOCK)) else {
        // Killed before it had a lock. One with anything in it is not removed so.
        let _ = fs::remove_dir(path);
        return None;
    };
    lock.try_lock().ok()?;
    let mut text = String::new();
    lock.read_to_string(&mut text).ok()?;
    // The text is written before anything else: without one, no run has got any further.
    let other = Machine::parse(&text).filter(|machine| !machine.shares_locks(&Machine::this()));
    let other_host = other.map(|machine| machine.host);
    let left = LeftBehind { path: path.into(), bytes: bytes_in(path), other_host };
    if left.other_host.is_some() {
        return Some(left);
    }
    remove_contents(path).ok()?;
    if cfg!(windows) {
        drop(lock);
    }
    fs::remove_dir_all(path).ok().map(|()| left)
}

/// Removes everything but the file to lock, which comes last: a process that is killed in the
/// middle of this leaves a directory that can still be told from the work of others.
///
/// A directory is renamed first. If locks do not work and its run is about to finish, either this
/// rename or the run's succeeds, and the run never finishes with some of its files.
fn remove_contents(directory: &Path) -> io::Result<()> {
    let removed = directory.join(REMOVED);
    let remove_renamed = || match fs::remove_dir_all(&removed) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    };
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_renamed()?;
            if entry.file_name() != REMOVED {
                fs::rename(entry.path(), &removed)?;
                remove_renamed()?;
            }
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
        assert_eq!(removed, [LeftBehind { path: killed.clone(), bytes: 70, other_host: None }]);
        let expected: Vec<_> =
            before.into_iter().filter(|name| Some(&**name) != killed.file_name()).collect();
        assert_eq!(names(), expected);
        let path = begun.path().to_path_buf();
        drop(begun);
        assert!(!path.exists());
    }

    #[test]
    fn directories_of_other_hosts_are_reported_and_stay() {
        let scratch = tempfile::tempdir().unwrap();
        let left_of = |machine: &str, random: &str| {
            let path = scratch.path().join(format!(".OUT.microscale-{random}"));
            fs::create_dir_all(path.join("output")).unwrap();
            fs::write(path.join("output/shard"), [0; 70]).unwrap();
            fs::write(path.join(LOCK), machine).unwrap();
            path
        };
        let host = Machine::this().host;
        let elsewhere = left_of("host no-such-host\nboot 0\n", "aaaaaa");
        let here = left_of(&Machine::this().to_text(), "bbbbbb");
        let earlier = left_of(&format!("host {host}\nboot 0\n"), "cccccc");
        let mut found = remove_left_behind(scratch.path(), Some("OUT".as_ref()));
        found.sort_by(|a, b| a.path.cmp(&b.path));
        let left = |path: &Path, other_host: Option<&str>| LeftBehind {
            path: path.into(),
            bytes: 70 + fs::metadata(path.join(LOCK)).map_or(0, |lock| lock.len()),
            other_host: other_host.map(str::to_owned),
        };
        assert_eq!(found[0], left(&elsewhere, Some("no-such-host")));
        assert!(elsewhere.join("output/shard").exists());
        assert_eq!(found.len(), 3);
        for (found, path) in found[1..].iter().zip([here, earlier]) {
            assert!(found.path == path && found.other_host.is_none() && !path.exists(), "{found:?}");
        }
    }

    #[test]
    fn a_run_whose_directory_is_removed_has_nothing_to_rename() {
        let scratch = tempfile::tempdir().unwrap();
        let begun = Temporary::create(scratch.path(), "OUT".as_ref()).unwrap();
        let output = begun.path().join("output");
        fs::create_dir_all(output.join("deep")).unwrap();
        // As a run leaves it that is killed while it removes another.
        fs::create_dir_all(begun.path().join(REMOVED).join("deep")).unwrap();
        remove_contents(begun.path()).unwrap();
        let names = fs::read_dir(begun.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), [LOCK]);
        assert!(fs::rename(&output, scratch.path().join("OUT")).is_err());
    }
}
