//! Temporary directories that another process removes during a run: the run fails without a loss.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::{Device, Format};
use microscale_checkpoint::{
    self as checkpoint, Checkpoint, CheckpointFormat, Convert, Dequantize, Error, OnProgress, OutputError,
    Part, Plan, Quantize, Result, Settings,
};
use microscale_test_support::Scratch;

use super::parts::{files, input};

/// Runs an operation that writes an output.
type Operation<'a> = &'a dyn Fn(&Path, &mut OnProgress<'_>) -> Result<()>;

fn plan(input: &Checkpoint, part: Option<Part>) -> Plan<'_> {
    let settings = Settings { format: Some(Format::Nvfp4), ..Settings::default() };
    Quantize { part, ..Quantize::new(settings) }.plan(input).unwrap()
}

fn quantize(input: &Path, out: &Path, progress: &mut OnProgress<'_>) -> Result<()> {
    plan(&Checkpoint::open(input)?, None).run(out, &Device::Cpu, progress).map(drop)
}

/// Returns the temporary directories of an output: in its parent, or in an existing output.
fn temporaries(out: &Path) -> Vec<PathBuf> {
    let entries = [out.parent().unwrap(), out].into_iter().filter_map(|within| fs::read_dir(within).ok());
    let directories = entries.flatten().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    directories.filter(|path| path.file_name().unwrap().to_string_lossy().contains(".microscale-")).collect()
}

/// Removes them, even while workers write files into them.
fn remove(out: &Path) {
    for path in temporaries(out) {
        while path.exists() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Removes the temporary directory at each report of progress. Each time the run must fail, leave
/// no output, and leave everything else equal to `before`.
fn fails_whenever_its_directory_is_removed(
    operation: Operation<'_>,
    out: &Path,
    fill: bool,
    before: &dyn Fn(),
) {
    for at in 0.. {
        if fill {
            fs::create_dir_all(out).unwrap();
        }
        let mut calls = 0;
        let result = operation(out, &mut |_| {
            if calls == at {
                remove(out);
            }
            calls += 1;
            ControlFlow::Continue(())
        });
        if calls <= at {
            result.unwrap_or_else(|error| panic!("call {at}: {error}"));
            assert!(at > 0, "an operation reports its progress");
            return;
        }
        let error = result.expect_err("a run succeeded without its files");
        let lost = matches!(error, Error::Io { .. } | Error::Output(OutputError::Lost { .. }));
        assert!(lost, "call {at}: {error}");
        let left = if out.is_dir() { fs::read_dir(out).unwrap().count() } else { usize::from(out.exists()) };
        assert_eq!(left, 0, "call {at}: a part of the output");
        before();
    }
}

/// All operations that write a checkpoint, to a directory or a file.
#[test]
fn runs_whose_temporary_directory_is_removed_fail_and_lose_nothing() {
    let check = fails_whenever_its_directory_is_removed;
    let scratch = Scratch::new();
    let directory = input(&scratch);
    let file = directory.join("model-0-of-7.safetensors");
    for (number, input) in [directory, file].into_iter().enumerate() {
        let path = |name: &str| scratch.path(format!("{number}/{name}"));
        fs::create_dir(path("")).unwrap();
        let (fills, packed) = ([false, true], path("PACKED"));
        quantize(&input, &packed, &mut |_| ControlFlow::Continue(())).unwrap();
        let quantized = |out: &Path, progress: &mut OnProgress<'_>| quantize(&input, out, progress);
        let dequantized = |out: &Path, progress: &mut OnProgress<'_>| {
            Dequantize::default().run(&Checkpoint::open(&packed)?, out, &Device::Cpu, progress).map(drop)
        };
        let converted = |out: &Path, progress: &mut OnProgress<'_>| {
            let packed = Checkpoint::open(&packed)?;
            Convert::new(CheckpointFormat::Modelopt).run(&packed, out, &Device::Cpu, progress).map(drop)
        };
        let operations: [Operation<'_>; 3] = [&quantized, &dequantized, &converted];
        for (place, operation) in operations.into_iter().enumerate() {
            for fill in fills.into_iter().filter(|fill| !fill || input.is_dir()) {
                check(operation, &path(&format!("OUT{place}{fill}")), fill, &|| {});
            }
        }
        let opened = Checkpoint::open(&input).unwrap();
        for fill in fills.into_iter().filter(|fill| !fill || input.is_dir()) {
            let out = path(&format!("MERGED{fill}"));
            let part = Part { index: 1, of: 1 };
            let go_on = &mut |_: checkpoint::Progress<'_>| ControlFlow::Continue(());
            plan(&opened, Some(part)).run(&out, &Device::Cpu, go_on).unwrap();
            let parts = checkpoint::parts_directory(&out).unwrap();
            let complete = files(&parts);
            let merged = |out: &Path, progress: &mut OnProgress<'_>| {
                checkpoint::merge(&opened, out, progress).map(drop)
            };
            check(&merged, &out, fill, &|| assert_eq!(files(&parts), complete, "a part is lost"));
        }
    }
}

#[test]
fn parts_whose_temporary_directory_is_removed_fail_and_are_made_again() {
    let scratch = Scratch::new();
    let (input, whole) = (input(&scratch), scratch.path("WHOLE"));
    quantize(&input, &whole, &mut |_| ControlFlow::Continue(())).unwrap();
    let opened = Checkpoint::open(&input).unwrap();
    let part = |out: &Path, progress: &mut OnProgress<'_>| {
        plan(&opened, Some(Part { index: 1, of: 1 })).run(out, &Device::Cpu, progress)
    };
    let mut failed = 0;
    for at in 0.. {
        let (out, mut calls) = (scratch.path(format!("OUT{at}")), 0);
        let parts = checkpoint::parts_directory(&out).unwrap();
        let result = part(&out, &mut |_| {
            if calls == at {
                remove(&parts);
            }
            calls += 1;
            ControlFlow::Continue(())
        });
        failed += usize::from(result.is_err());
        part(&out, &mut |_| ControlFlow::Continue(())).unwrap();
        checkpoint::merge(&opened, &out, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(files(&out), files(&whole), "call {at}");
        if calls <= at {
            break;
        }
    }
    assert!(failed > 0, "no directory was removed in time");
}
