//! Scarce resources: few threads, few open files, little memory, and full disks.

use std::fs;
use std::path::Path;
use std::process::Command;

use microscale_test_support::{Run, Scratch, command, run, sample};
use safetensors::tensor::Dtype;

use super::parts::files;
use super::{floats, noise, quantize};

/// Runs `quantize INPUT --out OUT` in a shell, after a line that sets limits.
fn limited(scratch: &Scratch, limits: &str, input: &Path, more: &[&str]) -> Command {
    let program = command(&[&"quantize", &input, &"--out", &scratch.path("OUT"), &"--device", &"cpu"]);
    let mut shell = Command::new("bash");
    shell.args(["-c", &format!("{limits}; exec \"$@\""), "bash"]).arg(program.get_program());
    shell.args(program.get_args()).args(more);
    shell
}

fn entries(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// Each thread takes a gigabyte of address space, and the limit allows only some threads. At the
/// limit on processes the system refuses threads with the same error.
#[test]
fn runs_work_with_the_available_threads() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "ONE", &[]).ok();
    let mut done = Vec::new();
    for threads in 0..9 {
        let limit = format!("ulimit -v {}", (threads << 20) + 700_000);
        let mut command = limited(&scratch, &limit, &sample(), &[]);
        command.env("RAYON_NUM_THREADS", "4").env("RUST_MIN_STACK", (1 << 30).to_string());
        let run = Run::new(command);
        if run.code == Some(0) {
            assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")), "{threads} threads");
            fs::remove_dir_all(scratch.path("OUT")).unwrap();
        } else {
            run.fails_with(&["thread", "ulimit -u"]);
        }
        assert_eq!(entries(&scratch), ["ONE"], "{threads} threads");
        done.push(run.code == Some(0));
    }
    assert!(!done[0] && done[8] && done.is_sorted(), "{done:?}");
}

#[test]
fn many_small_shards_need_few_open_files() {
    let scratch = Scratch::new();
    let names: Vec<_> = (0..1000)
        .map(|shard| (format!("l.{shard}.up_proj.weight"), format!("{shard}.safetensors")))
        .collect();
    let names: Vec<(&str, &str)> = names.iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
    for (name, file) in &names {
        let name: &'static str = String::leak((*name).into());
        scratch.write_tensors(format!("IN/{file}"), &[(name, Dtype::F32, vec![2, 32], floats(&noise(64)))]);
    }
    scratch.write_index("IN", &names);
    for more in [&["--part", "1/1"][..], &[]] {
        Run::new(limited(&scratch, "ulimit -n 16", &scratch.path("IN"), more)).ok();
    }
    assert_eq!(files(&scratch.path("OUT")).len(), 1 + names.len());
}

#[test]
fn files_beyond_the_limit_are_an_error_and_nothing_is_left() {
    let scratch = Scratch::new();
    let report = scratch.path("R.html");
    let report = ["--report", report.to_str().unwrap()];
    for (more, file) in
        [(&[][..], "safetensors"), (&["--part", "1/1"], "part-1-of-1"), (&report, "safetensors")]
    {
        let run = Run::new(limited(&scratch, "ulimit -f 50", &sample(), more));
        run.fails_with(&["cannot write", file, "File too large"]);
        let left = files(&scratch.path(""));
        assert!(left.keys().all(|file| file.ends_with(".microscale-parts")), "{:?}", left.keys());
    }
}

/// A failed allocation aborts the process. The next run removes its directory.
#[test]
fn leftovers_of_failed_allocations_are_removed_by_the_next_run() {
    let scratch = Scratch::new();
    for megabytes in (40..140).step_by(10) {
        let limit = format!("ulimit -v {}", megabytes << 10);
        let run = Run::new(limited(&scratch, &limit, &sample(), &[]));
        assert!([Some(0), Some(1), None, Some(134)].contains(&run.code), "{run:#?}");
        let _ = fs::remove_dir_all(scratch.path("OUT"));
    }
    quantize(&scratch, &sample(), "OUT", &[]).ok();
    assert_eq!(entries(&scratch), ["OUT"]);
}

/// JSON and reports are written after the output. Their failure does not affect the output.
#[test]
fn a_full_disk_for_reports_does_not_hide_that_the_output_is_complete() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "ONE", &["--format", "nvfp4"]).ok();
    let quantize =
        |more: &[&str]| quantize(&scratch, &sample(), "OUT", &[&["--format", "nvfp4"], more].concat());
    let said = |out: &str| format!("{out} is complete, only this failed: cannot write /dev/full");
    for option in ["--json", "--report"] {
        let run = quantize(&[option, "/dev/full"]);
        run.fails_with(&[&said("OUT"), "No space left"]);
        assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
        fs::remove_dir_all(scratch.path("OUT")).unwrap();
    }
    let part = quantize(&["--part", "1/1", "--json", "/dev/full"]);
    part.fails_with(&["part 1 of 1 of ", &said("OUT")]);
    run(&[&"merge", &sample(), &"--out", &scratch.path("OUT"), &"--json", &"/dev/full"])
        .fails_with(&[&said("OUT")]);
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
    for words in [&["dequantize"][..], &["convert", "--to", "modelopt"]] {
        let mut command = command(&[&words[0], &scratch.path("ONE"), &"--out", &scratch.path(words[0])]);
        command.args(&words[1..]);
        let mut shell = Command::new("bash");
        shell.args(["-c", "\"$@\" > /dev/full", "bash"]).arg(command.get_program()).args(command.get_args());
        Run::new(shell).fails_with(&[words[0], "is complete, only this failed: cannot write to stdout"]);
        assert!(scratch.path(words[0]).join("config.json").exists());
    }
}
