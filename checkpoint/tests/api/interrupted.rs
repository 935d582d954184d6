//! Progress: how it is reported, and operations that the caller breaks off.

use std::ops::ControlFlow;
use std::path::Path;

use half::bf16;
use microscale::{Device, Format};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Convert, Dequantize, Error, OnProgress, Part, Quantize, Result, compare,
    diagnose, merge,
};
use microscale_test_support::Scratch;

use crate::input::{Tensor, write_model};
use crate::{BAND, going_on, paths, quantize, request, with_plan};

/// The calls at which operations are broken off. There is one call for each tensor at least.
const CALLS: [usize; 6] = [0, 1, 2, 3, 5, 8];

/// Twelve tensors in four shards, one of them larger than a band.
fn write_input(scratch: &Scratch) -> std::path::PathBuf {
    let tensor = |shard: usize, i: usize| {
        let shape = [if (shard, i) == (1, 1) { BAND / 64 + 9 } else { 8 }, 128];
        let name = format!("model.layers.{shard}.{i}.fc.weight");
        Tensor::noise::<bf16>(name, &shape, (10 * shard + i) as u64)
    };
    let of_shard = |shard: usize| (0..3).map(|i| tensor(shard, i)).collect::<Vec<_>>();
    let files = ["a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors"];
    let shards: Vec<_> = files.iter().enumerate().map(|(i, file)| (*file, of_shard(i))).collect();
    write_model(scratch, "IN", &shards)
}

/// Breaks an operation off at the calls of `CALLS`. It must return an error and leave nothing.
fn is_interrupted(scratch: &Scratch, operation: impl Fn(&Path, &mut OnProgress<'_>) -> Result<()>) {
    let (out, before) = (scratch.path("OUT"), paths(scratch));
    for at in CALLS {
        let mut calls = 0;
        let result = operation(&out, &mut |_| {
            calls += 1;
            if calls > at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(result, Err(Error::Interrupted)), "at call {at}: {result:?}");
        assert_eq!(calls, at + 1, "it is not called again after it broke off");
        assert_eq!(paths(scratch), before, "at call {at}");
    }
    operation(&out, going_on()).unwrap();
}

#[test]
fn quantizing_that_is_broken_off_leaves_nothing() {
    for format in [Format::Mxfp4, Format::Nvfp4] {
        let scratch = Scratch::new();
        let input = write_input(&scratch);
        is_interrupted(&scratch, |out, progress| {
            with_plan(&request(format), &input, |plan| plan.run(out, &Device::Cpu, progress)).map(drop)
        });
    }
}

#[test]
fn reading_and_rewriting_that_is_broken_off_leaves_nothing() {
    let scratch = Scratch::new();
    let (input, packed) = (write_input(&scratch), scratch.path("PACKED"));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let [original, checkpoint] = [&input, &packed].map(|path| Checkpoint::open(path).unwrap());
    is_interrupted(&scratch, |_, progress| compare(&original, &checkpoint, &Device::Cpu, progress).map(drop));
    is_interrupted(&scratch, |_, progress| {
        diagnose(&checkpoint, Some(&original), &Device::Cpu, progress).map(drop)
    });
    is_interrupted(&scratch, |out, progress| {
        Dequantize::default().run(&checkpoint, out, &Device::Cpu, progress).map(drop)
    });
    std::fs::remove_dir_all(scratch.path("OUT")).unwrap();
    is_interrupted(&scratch, |out, progress| {
        Convert::new(CheckpointFormat::Modelopt).run(&checkpoint, out, &Device::Cpu, progress).map(drop)
    });
}

#[test]
fn merging_that_is_broken_off_can_be_repeated() {
    let scratch = Scratch::new();
    let (input, out) = (write_input(&scratch), scratch.path("OUT"));
    let request = Quantize { part: Some(Part { index: 1, of: 1 }), ..request(Format::Nvfp4) };
    quantize(&request, &input, &out).unwrap();
    let (checkpoint, before) = (Checkpoint::open(&input).unwrap(), scratch.contents());
    for at in 0..4 {
        let mut calls = 0;
        let result = merge(&checkpoint, &out, &mut |_| {
            calls += 1;
            if calls > at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(result, Err(Error::Interrupted)), "at call {at}: {result:?}");
        assert!(scratch.contents() == before, "at call {at}");
    }
    assert_eq!(merge(&checkpoint, &out, going_on()).unwrap().shards, 4);
}

#[test]
fn progress_grows_to_the_bytes_of_the_input_and_names_every_tensor() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    let checkpoint = Checkpoint::open(&input).unwrap();
    let mut names: Vec<_> = checkpoint.tensors().map(|tensor| tensor.name.to_owned()).collect();
    let bytes = checkpoint.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>();
    let (mut reported, mut last) = (Vec::<String>::new(), 0);
    with_plan(&request(Format::Nvfp4), &input, |plan| {
        plan.run(&scratch.path("OUT"), &Device::Cpu, &mut |progress| {
            assert_eq!(progress.total, bytes);
            assert!((last..=bytes).contains(&progress.done));
            last = progress.done;
            if reported.last().is_none_or(|name| name != progress.tensor) {
                reported.push(progress.tensor.into());
            }
            ControlFlow::Continue(())
        })
    })
    .unwrap();
    assert_eq!(last, bytes);
    assert_eq!(reported.pop().as_deref(), Some(""));
    // Threads may start a tensor before an earlier one.
    reported.sort();
    names.sort();
    assert_eq!(reported, names);
}
