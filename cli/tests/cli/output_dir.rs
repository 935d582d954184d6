//! Output into an existing empty directory, and leftovers of killed runs.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use microscale_test_support::{Run, Scratch, command, run, sample};

use super::parts::{files, input};
use super::quantize;

#[cfg(unix)]
#[test]
fn an_existing_directory_is_filled_and_not_replaced() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "ONE", &[]).ok();
    fs::create_dir_all(scratch.path("closed/OUT")).unwrap();
    let out = scratch.path("closed/OUT");
    fs::set_permissions(&out, fs::Permissions::from_mode(0o700)).unwrap();
    // As at the root of a new file system.
    fs::create_dir(out.join("lost+found")).unwrap();
    let before = fs::metadata(&out).unwrap();
    // Nothing can be created next to it, as next to a mount. (Root can create files anywhere.)
    fs::set_permissions(scratch.path("closed"), fs::Permissions::from_mode(0o555)).unwrap();
    quantize(&scratch, &sample(), "closed/OUT", &[]).ok();
    fs::set_permissions(scratch.path("closed"), fs::Permissions::from_mode(0o755)).unwrap();
    let after = fs::metadata(&out).unwrap();
    assert_eq!((before.ino(), before.mode()), (after.ino(), after.mode()));
    assert_eq!(files(&out), files(&scratch.path("ONE")));
    assert_eq!(fs::read_dir(scratch.path("closed")).unwrap().count(), 1);
    quantize(&scratch, &sample(), "closed/OUT", &[]).fails_with(&["OUT exists"]);
    run(&[&"dequantize", &out, &"--out", &scratch.path("BACK")]).ok();
    assert!(!scratch.path("BACK/lost+found").exists());
}

#[test]
fn the_working_directory_can_be_the_output() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "ONE", &[]).ok();
    fs::create_dir(scratch.path("here")).unwrap();
    let mut command = command(&[&"quantize", &sample(), &"--out", &"."]);
    command.current_dir(scratch.path("here"));
    Run::new(command).ok();
    assert_eq!(files(&scratch.path("here")), files(&scratch.path("ONE")));
}

/// A mount in a private namespace, if the kernel allows users to make one.
#[cfg(target_os = "linux")]
#[test]
fn a_mount_is_filled() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "ONE", &[]).ok();
    fs::create_dir(scratch.path("OUT")).unwrap();
    let program = command(&[&"quantize", &sample(), &"--out", &scratch.path("OUT")]);
    let script = "mount -t tmpfs none \"$OUT\" || exit 77; \"$@\" && cp -r \"$OUT\" \"$COPY\"";
    let mut shell = std::process::Command::new("unshare");
    shell.args(["--mount", "--map-root-user", "sh", "-c", script, "sh"]);
    shell.env("OUT", scratch.path("OUT")).env("COPY", scratch.path("COPY"));
    let Ok(ran) = shell.arg(program.get_program()).args(program.get_args()).output() else { return };
    let text = String::from_utf8_lossy(&ran.stderr);
    if ran.status.code() == Some(77) || text.contains("unshare") {
        eprintln!("no mounts for users here: {text}");
        return;
    }
    assert!(ran.status.success(), "{text}");
    assert_eq!(files(&scratch.path("COPY")), files(&scratch.path("ONE")));
}

#[test]
fn a_directory_is_empty_again_after_a_failure() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    fs::create_dir(scratch.path("OUT")).unwrap();
    let shard = input.join("model-3-of-7.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    // The last number of a norm or a weight becomes NaN.
    let end = bytes.len();
    bytes[end - 64 - 4..].iter_mut().for_each(|byte| *byte = 0xFF);
    fs::write(&shard, bytes).unwrap();
    quantize(&scratch, &input, "OUT", &["--non-finite", "error"]).fails_with(&["q_proj", "NaN"]);
    assert_eq!(fs::read_dir(scratch.path("OUT")).unwrap().count(), 0);
}

/// Makes the leftover of a killed run: a directory without a held lock.
fn left_behind(scratch: &Scratch, name: &str) {
    scratch.write(Path::new(name).join("lock"), "");
    scratch.write(Path::new(name).join("output/model.safetensors"), [0; 3000]);
}

#[test]
fn leftovers_of_killed_runs_are_reported_and_removed() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("EMPTY")).unwrap();
    left_behind(&scratch, ".OUT.microscale-abcdef");
    left_behind(&scratch, "EMPTY/.EMPTY.microscale-ABC123");
    left_behind(&scratch, ".OTHER.microscale-abcdef");
    for (out, left) in [("OUT", ".OUT.microscale-abcdef"), ("EMPTY", "EMPTY/.EMPTY.microscale-ABC123")] {
        let run = quantize(&scratch, &sample(), out, &[]);
        let told = format!("{left} (2.93 KiB), which a run that was killed had left");
        assert!(run.stderr.contains("removed ") && run.stderr.contains(&told), "{run:#?}");
        run.ok();
        assert!(!scratch.path(left).exists());
    }
    assert!(scratch.path(".OTHER.microscale-abcdef").exists(), "it is of another output");
}

#[test]
fn leftovers_of_other_hosts_are_reported_and_kept() {
    let scratch = Scratch::new();
    left_behind(&scratch, ".OUT.microscale-abcdef");
    scratch.write(".OUT.microscale-abcdef/lock", "host no-such-host\nboot 0\n");
    let run = quantize(&scratch, &sample(), "OUT", &[]);
    let path = scratch.path(".OUT.microscale-abcdef");
    assert!(run.stderr.contains("stays: a run on no-such-host made it"), "{run:#?}");
    assert!(run.stderr.contains(&format!("rm -r {}", path.display())), "{run:#?}");
    run.ok();
    assert!(path.join("output/model.safetensors").exists());
}

#[test]
fn temporary_reports_of_killed_runs_are_removed() {
    let scratch = Scratch::new();
    for option in ["--json", "--report"] {
        left_behind(&scratch, ".R.microscale-abcdef");
        let report = scratch.path("R");
        let run = quantize(&scratch, &sample(), "OUT", &[option, report.to_str().unwrap()]);
        assert!(
            run.stderr.contains(".R.microscale-abcdef (2.93 KiB), which a run that was killed had left"),
            "{run:#?}"
        );
        run.ok();
        fs::remove_dir_all(scratch.path("OUT")).unwrap();
        let left = fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["R"]);
    }
}

#[test]
fn outputs_in_progress_are_not_leftovers() {
    let scratch = Scratch::new();
    // Half a minute of work, during which other runs start and end.
    let options = ["--format", "nvfp4", "--search", "full", "--search-global", "--device", "cpu"];
    let mut slow = command(&[&"quantize", &sample(), &"--out", &scratch.path("OUT")]);
    slow.args(options).env("RAYON_NUM_THREADS", "1").stdout(Stdio::null());
    let mut slow = slow.spawn().unwrap();
    let making = || {
        let entries = fs::read_dir(scratch.path("")).unwrap().flatten().map(|entry| entry.file_name());
        entries.filter(|name| name.to_string_lossy().starts_with(".OUT.microscale-")).count()
    };
    while making() == 0 && slow.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    let other = quantize(&scratch, &sample(), "OUT", &[]);
    assert!(!other.stderr.contains("removed"), "{other:#?}");
    let (first, second) = (slow.wait().unwrap().success(), other.code == Some(0));
    assert!(first != second, "one of the two is the output: {first}, {second}");
    assert_eq!(making(), 0);
}

#[test]
fn one_of_two_runs_with_the_same_output_fails() {
    let scratch = Scratch::new();
    let file = sample().join("model-00001-of-00002.safetensors");
    for round in 0..10 {
        for (input, out) in [(file.as_path(), "F"), (&sample(), "D"), (&sample(), "E")] {
            let out = scratch.path(format!("{out}{round}"));
            if out.ends_with(format!("E{round}")) {
                fs::create_dir(&out).unwrap();
            }
            let formats = ["mxfp4", "nvfp4"];
            let children = formats.map(|format| {
                let mut command = command(&[&"quantize", &input, &"--out", &out, &"--format", &format]);
                command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
            });
            let ended = children.map(|child| child.wait_with_output().unwrap());
            let won = ended.iter().filter(|output| output.status.success()).count();
            // In an existing directory, both runs may see each other and both give up.
            let least = if out.is_dir() && fs::read_dir(&out).unwrap().count() == 0 { 0 } else { 1 };
            assert_eq!(won, least, "{}: {ended:#?}", out.display());
            for lost in ended.iter().filter(|output| !output.status.success()) {
                let said = String::from_utf8_lossy(&lost.stderr);
                assert!(said.contains("exists\nhint: name an output that does not"), "{said}");
            }
            if won == 1 {
                run(&[&"inspect", &out]).ok();
            }
        }
    }
}

#[test]
fn names_may_be_as_long_as_the_system_allows() {
    let scratch = Scratch::new();
    for length in [200, 244, 245, 250, 255] {
        let name = "x".repeat(length);
        quantize(&scratch, &sample(), &name, &[]).ok();
        fs::remove_dir_all(scratch.path(&name)).unwrap();
        quantize(&scratch, &sample(), &name, &["--part", "1/1"]).ok();
        run(&[&"merge", &sample(), &"--out", &scratch.path(&name)]).ok();
        assert!(scratch.path(&name).join("config.json").exists());
        assert_eq!(fs::read_dir(scratch.path("")).unwrap().count(), 1, "{length}");
        fs::remove_dir_all(scratch.path(&name)).unwrap();
    }
}

#[test]
fn names_that_are_too_long_are_refused_before_any_work() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "PACKED", &[]).ok();
    let (long, packed) = ("x".repeat(256), scratch.path("PACKED"));
    let (path, before) = (scratch.path(&long), scratch.contents());
    let path = path.to_str().unwrap();
    let refused = |run: Run| {
        run.fails_with(&["the file system takes no name or path as long as", &long]);
        assert_eq!(scratch.contents(), before);
    };
    refused(quantize(&scratch, &sample(), &long, &[]));
    refused(quantize(&scratch, &sample(), &long, &["--part", "1/1"]));
    refused(quantize(&scratch, &sample(), "OUT", &["--json", path]));
    refused(quantize(&scratch, &sample(), "OUT", &["--report", path]));
    refused(run(&[&"merge", &sample(), &"--out", &path]));
    refused(run(&[&"dequantize", &packed, &"--out", &path]));
    refused(run(&[&"convert", &packed, &"--to", &"modelopt", &"--out", &path]));
    refused(run(&[&"compare", &packed, &packed, &"--plot", &path]));
}
