//! `dist`: packs the program, the tests and their data for machines with a GPU and without Rust.

mod artifacts;

use crate::{layout, process};
use anyhow::{Context, Result, bail};
use artifacts::Executable;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const README: &str = include_str!("dist/README.md");
const RUN_TESTS: &str = include_str!("dist/run-tests.sh");

/// Data for tests and users, at the same paths as in the repository.
const DATA: [&str; 4] = ["host/ptx", "tests/golden", "sample", "fuzz/corpus"];

/// Builds everything and packs it.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = layout::root()?;
    let folder = match arguments {
        [] => root.join("dist"),
        [folder] if !folder.starts_with('-') => PathBuf::from(folder),
        _ => bail!("usage: cargo xtask dist [DIR]"),
    };
    let program = artifacts::build_program(&root)?;
    let tests = artifacts::build_tests(&root)?;

    empty(&folder)?;
    install(&program, &folder)?;
    for test in &tests {
        install(test, &folder.join("test-programs"))?;
    }
    for data in DATA {
        copy_tree(&root.join(data), &folder.join(data))?;
    }
    write_executable(&folder.join("run-tests.sh"), RUN_TESTS.as_bytes())?;
    let glibc = newest_glibc(tests.iter().chain([&program]))?;
    fs::write(folder.join("README.md"), README.replace("@REQUIREMENTS@", &requirements(glibc)))?;

    let megabytes = size(&folder)? as f64 / 1e6;
    println!("{}: {} test programs, {megabytes:.1} MB", folder.display(), tests.len());
    Ok(())
}

/// Makes the folder, or empties it if this command made it. Any other folder is an error.
fn empty(folder: &Path) -> Result<()> {
    let ours = folder.join("run-tests.sh").is_file() && folder.join("test-programs").is_dir();
    if ours {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    } else if folder.exists() && fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_some()) {
        bail!("{} exists, and is not a folder that this command made", folder.display());
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Copies an executable under its stable name, without its debug information.
fn install(executable: &Executable, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let copy = folder.join(format!("{}{}", executable.name, std::env::consts::EXE_SUFFIX));
    fs::copy(&executable.path, &copy)
        .with_context(|| format!("cannot copy {}", executable.path.display()))?;
    // A linker usually comes with `strip`. Without it the folder is larger but works.
    let stripped = process::run(Command::new("strip").arg("-S").arg(&copy));
    if let Err(error) = stripped {
        println!("{} keeps its debug information: {error:#}", executable.name);
    }
    Ok(())
}

/// Copies a folder except for files that Python or git leave in it.
///
/// A folder that does not exist counts as empty.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == OsStr::new("__pycache__") || name.to_string_lossy().starts_with('.') {
            continue;
        }
        let (source, copy) = (entry.path(), to.join(name));
        if entry.file_type()?.is_dir() {
            copy_tree(&source, &copy)?;
        } else {
            fs::copy(&source, &copy).with_context(|| format!("cannot copy {}", source.display()))?;
        }
    }
    Ok(())
}

fn write_executable(file: &Path, contents: &[u8]) -> Result<()> {
    fs::write(file, contents).with_context(|| format!("cannot write {}", file.display()))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn requirements(glibc: Option<u32>) -> String {
    let system = format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH);
    match glibc {
        Some(minor) => format!("{system} with glibc 2.{minor} or newer"),
        None => system,
    }
}

/// Returns the newest `GLIBC_2.x` symbol version that the executables need.
///
/// The README states it, so that users of older systems learn it first.
fn newest_glibc<'a>(executables: impl Iterator<Item = &'a Executable>) -> Result<Option<u32>> {
    let mut newest = None;
    for executable in executables {
        let bytes = fs::read(&executable.path)?;
        newest = newest.max(glibc_versions(&bytes).max());
    }
    Ok(newest)
}

fn glibc_versions(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let prefix = b"GLIBC_2.";
    let found = bytes.windows(prefix.len()).enumerate().filter(move |(_, window)| window == prefix);
    found.filter_map(move |(start, _)| {
        let digits = bytes[start + prefix.len()..].iter().take(3).take_while(|byte| byte.is_ascii_digit());
        digits.fold(None, |number, digit| Some(number.unwrap_or(0) * 10 + u32::from(digit - b'0')))
    })
}

fn size(folder: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_versions_are_parsed() {
        let bytes = b"..GLIBC_2.17\0..GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBC_2.";
        assert_eq!(glibc_versions(bytes).collect::<Vec<_>>(), [17, 34, 2]);
    }

    #[test]
    fn a_foreign_folder_is_not_overwritten() {
        let folder = std::env::temp_dir().join(format!("xtask-dist-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        empty(&folder).expect("an empty folder is fine");
        fs::write(folder.join("thesis.txt"), "x").unwrap();
        assert!(empty(&folder).is_err());
        assert!(folder.join("thesis.txt").exists());
        fs::create_dir_all(folder.join("test-programs")).unwrap();
        fs::write(folder.join("run-tests.sh"), RUN_TESTS).unwrap();
        empty(&folder).expect("one of ours is emptied");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
    }
}
