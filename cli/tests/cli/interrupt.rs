//! Interrupted runs: killed at any moment, or without write permission. The output is complete or
//! absent. (`malformed` tests a full disk.)

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use microscale_test_support::{Scratch, command, program, run, sample};

use super::parts::{files, input};
use super::quantize;

const OPTIONS: [&str; 4] = ["--format", "nvfp4", "--search", "full"];

/// Returns every entry of a scratch directory, including leftovers of killed runs.
fn entries(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Runs a command a hundred times and kills it at a random moment, or shortly after its end.
///
/// After each run `check` examines the directory and returns whether the output exists. At the end
/// there is an output, and no other new entry.
fn killed_at_a_hundred_moments(
    scratch: &Scratch,
    begin: impl Fn() -> Command,
    check: impl Fn() -> bool,
    seconds: f64,
) {
    let mut random = fastrand::Rng::with_seed(3);
    let mut finished = 0;
    for _ in 0..100 {
        let mut child = begin().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(random.f64() * seconds * 1.2));
        child.kill().unwrap();
        child.wait().unwrap();
        finished += u32::from(check());
        let _ = fs::remove_dir_all(scratch.path("OUT"));
    }
    assert!(finished < 100, "no kill came in time");
}

/// Returns the seconds that a command takes.
fn seconds_of(mut command: Command) -> f64 {
    // The first run builds the program.
    program();
    let start = Instant::now();
    assert!(command.stdout(Stdio::null()).status().unwrap().success());
    start.elapsed().as_secs_f64()
}

/// Kills a command. Its output, in place of `WHOLE`, must be complete or absent.
fn whole_or_absent(scratch: &Scratch, begin: impl Fn(&Path) -> Command) {
    let (out, whole) = (scratch.path("OUT"), scratch.path("WHOLE"));
    let seconds = seconds_of(begin(&whole));
    let (whole, before) = (files(&whole), entries(scratch));
    let check = || {
        assert!(!out.exists() || files(&out) == whole, "there is a part of the output");
        out.exists()
    };
    killed_at_a_hundred_moments(scratch, || begin(&out), check, seconds);
    assert!(begin(&out).stdout(Stdio::null()).status().unwrap().success());
    assert!(check());
    fs::remove_dir_all(&out).unwrap();
    assert_eq!(entries(scratch), before, "what killed runs have left is removed by the next");
}

#[test]
fn quantize_is_killed() {
    let scratch = Scratch::new();
    whole_or_absent(&scratch, |out| {
        let mut command = command(&[&"quantize", &sample(), &"--out", &out]);
        command.args(OPTIONS);
        command
    });
}

#[test]
fn convert_is_killed() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "IN", &["--format", "nvfp4"]).ok();
    let input = scratch.path("IN");
    whole_or_absent(&scratch, |out| command(&[&"convert", &input, &"--to", &"modelopt", &"--out", &out]));
}

#[test]
fn a_part_is_killed() {
    let scratch = Scratch::new();
    let (input, out) = (input(&scratch), scratch.path("OUT"));
    quantize(&scratch, &input, "WHOLE", &OPTIONS).ok();
    let (whole, before) = (files(&scratch.path("WHOLE")), entries(&scratch));
    let begin = || {
        let mut command = command(&[&"quantize", &input, &"--out", &out, &"--part", &"1/1"]);
        command.args(OPTIONS);
        command
    };
    let merge = || run(&[&"merge", &input, &"--out", &out]);
    let seconds = seconds_of(begin());
    merge().ok();
    fs::remove_dir_all(&out).unwrap();
    let check = || {
        let merged = merge();
        match merged.code {
            Some(0) => assert_eq!(files(&out), whole),
            _ => merged.fails_with(&["shards are not in"]),
        }
        out.exists()
    };
    killed_at_a_hundred_moments(&scratch, begin, check, seconds);
    assert!(begin().stdout(Stdio::null()).status().unwrap().success());
    assert!(check());
    fs::remove_dir_all(&out).unwrap();
    assert_eq!(entries(&scratch), before, "what killed parts have left is removed by merging");
}

#[test]
fn merge_is_killed() {
    let scratch = Scratch::new();
    let (input, out, parts) = (input(&scratch), scratch.path("OUT"), scratch.path("OUT.parts"));
    quantize(&scratch, &input, "WHOLE", &OPTIONS).ok();
    let (whole, before) = (files(&scratch.path("WHOLE")), entries(&scratch));
    quantize(&scratch, &input, "OUT", &[&OPTIONS[..], &["--part", "1/1"]].concat()).ok();
    let complete = files(&parts);
    let restore = || {
        let _ = fs::remove_dir_all(&parts);
        complete
            .iter()
            .for_each(|(name, bytes)| drop(scratch.write(Path::new("OUT.parts").join(name), bytes)));
    };
    let begin = || command(&[&"merge", &input, &"--out", &out]);
    let seconds = seconds_of(begin());
    fs::remove_dir_all(&out).unwrap();
    restore();
    let check = || {
        if out.exists() {
            assert_eq!(files(&out), whole);
            restore();
            return true;
        }
        assert_eq!(files(&parts), complete, "a merge that was killed can be repeated");
        false
    };
    killed_at_a_hundred_moments(&scratch, begin, check, seconds);
    run(&[&"merge", &input, &"--out", &out]).ok();
    assert_eq!(files(&out), whole);
    fs::remove_dir_all(&out).unwrap();
    assert_eq!(entries(&scratch), before, "what killed merges have left is removed by the next");
}

#[cfg(target_os = "linux")]
#[test]
fn where_nothing_can_be_written() {
    let refused = run(&[&"quantize", &sample(), &"--out", &"/proc/OUT"]);
    refused.fails_with(&["cannot create a temporary directory in", "/proc"]);
    let refused = run(&[&"quantize", &sample(), &"--out", &"/proc/OUT", &"--part", &"1/1"]);
    refused.fails_with(&["cannot create", "/proc/OUT.parts"]);
}
