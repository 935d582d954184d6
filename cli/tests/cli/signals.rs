//! Runs that receive a signal: they remove incomplete outputs, and end by the signal.

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use microscale_test_support::{Scratch, command, raw_file};
use nix::sys::signal::{SigHandler, Signal, signal as set_handler};

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;

/// Writes a sparse file of zeros, with tensors of `rows` rows and `cols` columns.
fn zeros(scratch: &Scratch, tensors: u64, rows: u64, cols: u64) -> PathBuf {
    let bytes = rows * cols * 4;
    let header = (0..tensors).map(|i| {
        let (start, end) = (i * bytes, (i + 1) * bytes);
        format!(r#""{i}.weight":{{"dtype":"F32","shape":[{rows},{cols}],"data_offsets":[{start},{end}]}}"#)
    });
    let header = format!("{{{}}}", header.collect::<Vec<_>>().join(","));
    let input = scratch.write("in.safetensors", raw_file(&header, &[]));
    let file = fs::File::options().write(true).open(&input).unwrap();
    file.set_len(8 + header.len() as u64 + tensors * bytes).unwrap();
    input
}

/// Returns the number of entries. `contents` would read gigabytes.
fn entries(scratch: &Scratch) -> usize {
    fs::read_dir(scratch.path("")).unwrap().count()
}

/// Starts a program with the default signal actions. A shell that runs the tests in the background
/// may ignore signals, and children inherit that.
fn with_default_signals(command: &mut Command) -> &mut Command {
    let reset = || {
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            // SAFETY: the default action runs no code of this program.
            unsafe { set_handler(signal, SigHandler::SigDfl) }?;
        }
        Ok(())
    };
    // SAFETY: `signal` is async-signal-safe, so it is allowed between fork and exec. It does not
    // allocate.
    unsafe { command.pre_exec(reset) }
}

/// Starts a run, and waits until it writes its output.
fn begun(scratch: &Scratch, input: &Path, more: &[&str]) -> Child {
    let mut command = command(&[&"quantize", &input, &"--out", &scratch.path("OUT")]);
    let command = with_default_signals(&mut command);
    let child = command.args(more).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while entries(scratch) < 2 {
        assert!(started.elapsed().as_secs() < 60, "the program does not begin");
        std::thread::yield_now();
    }
    child
}

fn signal(child: &Child, signal: i32) {
    let kill = Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status();
    assert!(kill.unwrap().success());
}

#[test]
fn an_interrupted_run_leaves_nothing_and_ends_by_the_signal() {
    let scratch = Scratch::new();
    // A gigabyte of tensors, small enough to stop between two of them.
    let input = zeros(&scratch, 256, 1024, 1024);
    for number in [SIGINT, SIGTERM, SIGHUP] {
        let child = begun(&scratch, &input, &[]);
        signal(&child, number);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(stderr, "error: interrupted: nothing was written\n");
        assert_eq!(output.status.signal(), Some(number));
        assert_eq!(entries(&scratch), 1, "only the input should be there");
    }
}

#[test]
fn a_run_inside_of_one_large_tensor_ends_within_a_second() {
    let scratch = Scratch::new();
    // 2.4 GB with a search take minutes.
    let input = zeros(&scratch, 1, 1 << 15, 18_432);
    let options = ["--device", "cpu", "--format", "nvfp4", "--search", "full"];
    let child = begun(&scratch, &input, &options);
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    signal(&child, SIGINT);
    let output = child.wait_with_output().unwrap();
    let took = asked.elapsed();
    assert_eq!(output.status.signal(), Some(SIGINT));
    // One second, plus an allowance for a busy machine.
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(entries(&scratch), 1, "only the input should be there");
}

#[test]
fn a_second_signal_ends_a_run_at_once_and_the_next_run_removes_its_leftovers() {
    let scratch = Scratch::new();
    // A row is searched as a whole, for longer than signals count as one.
    let input = zeros(&scratch, 1, 4, 1 << 27);
    let options = ["--device", "cpu", "--format", "nvfp4", "--search", "full"];
    let killed = || {
        let child = begun(&scratch, &input, &options);
        signal(&child, SIGINT);
        std::thread::sleep(Duration::from_millis(200));
        signal(&child, SIGINT);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(SIGINT));
        let left = fs::read_dir(scratch.path("")).unwrap().map(|entry| entry.unwrap().path());
        left.filter(|path| *path != input).collect::<Vec<_>>()
    };
    // On a busy machine a run may clean up before the second signal.
    let left = (0..10).map(|_| killed()).find(|left| !left.is_empty()).unwrap_or_default();
    assert_eq!(left.len(), 1, "ten runs have cleaned up before the second signal");
    let child = begun(&scratch, &input, &options);
    while left[0].exists() {
        std::thread::yield_now();
    }
    signal(&child, SIGTERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(SIGTERM));
    assert_eq!(entries(&scratch), 1, "only the input should be there");
}

#[test]
fn a_directory_that_was_to_be_filled_is_empty_again() {
    let scratch = Scratch::new();
    let input = zeros(&scratch, 256, 1024, 1024);
    fs::create_dir(scratch.path("OUT")).unwrap();
    let inside = || fs::read_dir(scratch.path("OUT")).unwrap().count();
    fs::create_dir(scratch.path("IN")).unwrap();
    fs::rename(&input, scratch.path("IN/model.safetensors")).unwrap();
    let mut child = begun(&scratch, &scratch.path("IN"), &[]);
    while inside() == 0 && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    signal(&child, SIGINT);
    assert_eq!(child.wait().unwrap().signal(), Some(SIGINT));
    assert_eq!(inside(), 0);
}

#[test]
fn signals_that_are_ignored_stay_so() {
    let scratch = Scratch::new();
    let input = zeros(&scratch, 8, 1024, 1024);
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]);
    let program = command(&[&"quantize", &input, &"--out", &scratch.path("OUT")]);
    let child = shell.arg(program.get_program()).args(program.get_args()).stdout(Stdio::null()).spawn();
    let mut child = child.unwrap();
    let started = Instant::now();
    while entries(&scratch) < 2 {
        assert!(started.elapsed().as_secs() < 60, "the program does not begin");
        std::thread::yield_now();
    }
    signal(&child, SIGHUP);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_loop_in_a_shell_stops() {
    let scratch = Scratch::new();
    let input = zeros(&scratch, 256, 1024, 1024);
    let program = command(&[&"quantize", &input, &"--out", &scratch.path("OUT")]);
    let said = scratch.path("said");
    // The shell gets the signal, too, as from a terminal. It stops only if its child ended by the
    // signal.
    let script = "trap 'exit 130' INT; for i in 1 2 3; do \"$@\"; echo $? >> $SAID; done";
    let mut shell = Command::new("bash");
    shell.args(["-c", script, "bash"]).env("SAID", &said).arg(program.get_program()).args(program.get_args());
    let mut shell = with_default_signals(&mut shell).process_group(0).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while entries(&scratch) < 2 {
        assert!(started.elapsed().as_secs() < 60, "the program does not begin");
        std::thread::yield_now();
    }
    let group = format!("-{}", shell.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    assert_eq!(shell.wait().unwrap().code(), Some(130));
    assert!(!said.exists(), "the loop went on");
    assert_eq!(entries(&scratch), 1, "only the input should be there");
}
