//! Runs that do not come to their end: killed at any moment, or without leave to write. The output is
//! complete or absent. (A full disk is in `malformed`.)

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use microscale_test_support::{Scratch, command, program, run, sample};

use super::quantize;

const OPTIONS: [&str; 4] = ["--format", "nvfp4", "--search", "full"];

/// Every file of a directory, with its bytes.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), fs::read(path).unwrap())).collect()
}

/// The entries of a scratch directory, except temporary directories, which only a kill leaves.
fn visible(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

#[test]
fn killed_at_a_hundred_moments() {
    let scratch = Scratch::new();
    // Built before the clock starts.
    program();
    let start = Instant::now();
    quantize(&scratch, &sample(), "WHOLE", &OPTIONS).ok();
    let (whole, seconds) = (files(&scratch.path("WHOLE")), start.elapsed().as_secs_f64());
    let mut random = fastrand::Rng::with_seed(3);
    let mut finished = 0;
    for _ in 0..100 {
        let out = scratch.path("OUT");
        let mut child = command(&[&"quantize", &sample(), &"--out", &out]);
        let mut child = child.args(OPTIONS).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(random.f64() * seconds * 1.2));
        child.kill().unwrap();
        child.wait().unwrap();
        if out.exists() {
            finished += 1;
            assert_eq!(files(&out), whole);
            fs::remove_dir_all(&out).unwrap();
        }
    }
    assert!(finished < 100, "no kill came in time");
    assert_eq!(visible(&scratch), ["WHOLE"]);
    quantize(&scratch, &sample(), "OUT", &OPTIONS).ok();
    assert_eq!(files(&scratch.path("OUT")), whole);
}

#[cfg(target_os = "linux")]
#[test]
fn where_nothing_can_be_written() {
    let refused = run(&[&"quantize", &sample(), &"--out", &"/proc/OUT"]);
    refused.fails_with(&["cannot create a temporary directory in", "/proc"]);
    let refused = run(&[&"quantize", &sample(), &"--out", &"/proc/OUT", &"--part", &"1/1"]);
    refused.fails_with(&["cannot create", "/proc/OUT.parts"]);
}
