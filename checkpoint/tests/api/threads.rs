//! The same bytes, reports and errors for any number of threads.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use microscale::{Device, Format, NonFinite, Search};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Convert, Dequantize, Outcome, Quantize, Settings, compare, diagnose,
};
use microscale_test_support::Scratch;

use crate::input::{Tensor, noise, write_file, write_model};
use crate::{BAND, files, going_on, quantize, request};

/// Numbers of threads to compare.
pub(crate) const COUNTS: [usize; 5] = [1, 2, 3, 7, 16];

/// Calls `work` in a pool of `threads` threads.
pub(crate) fn with_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

/// Large and small tensors in three shards, with a fused layer in all of them.
fn model(scratch: &Scratch) -> PathBuf {
    let rows = BAND / 512;
    let layer = |name: &str, rows, seed| {
        Tensor::noise::<bf16>(format!("model.layers.0.{name}.weight"), &[rows, 512], seed)
    };
    let small = |i: u64| Tensor::noise::<f32>(format!("model.layers.1.{i}.fc.weight"), &[3, 64], i);
    let norm = |i: u64| Tensor::noise::<f32>(format!("model.layers.1.{i}.norm.weight"), &[64], i);
    let shards = [
        ("a.safetensors", vec![layer("self_attn.q_proj", rows, 1), norm(0), small(1), small(2)]),
        ("b.safetensors", vec![layer("self_attn.k_proj", rows + 70, 2), small(3), norm(4)]),
        ("c.safetensors", vec![layer("self_attn.v_proj", 5, 3), layer("mlp.down_proj", 2 * rows + 1, 4)]),
    ];
    write_model(scratch, "IN", &shards)
}

/// The description of a result, and the files that it wrote.
type Outcomes = (String, BTreeMap<PathBuf, Vec<u8>>);

/// Runs an operation under every number of threads. Its results must be the same.
///
/// `operation` writes to a path and describes its result, without times.
fn is_the_same(scratch: &Scratch, operation: impl Fn(&Path) -> String + Sync) -> String {
    let run = |threads: usize| -> Outcomes {
        let out = scratch.path("OUT");
        let described = with_threads(threads, || operation(&out));
        let written = if out.exists() { files(&out) } else { BTreeMap::new() };
        let _ = fs::remove_dir_all(&out);
        (described, written)
    };
    let (described, written) = run(1);
    for threads in COUNTS {
        let other = run(threads);
        assert!(other.0 == described, "{threads} threads: {}", difference(&other.0, &described));
        assert!(other.1.keys().eq(written.keys()));
        for (file, bytes) in &other.1 {
            assert!(bytes == &written[file], "{threads} threads: {}", file.display());
        }
    }
    described
}

/// Returns the ends of two texts from shortly before their first difference.
fn difference(first: &str, second: &str) -> String {
    let same = first.bytes().zip(second.bytes()).take_while(|(a, b)| a == b).count();
    let part = |text: &str| text.chars().skip(same.saturating_sub(80)).take(160).collect::<String>();
    format!("{} and not {}", part(first), part(second))
}

/// Quantizes and describes the summary, all private details included.
fn summary(request: &Quantize, input: &Path, out: &Path) -> String {
    let mut summary = match quantize(request, input, out) {
        Ok(summary) => summary,
        Err(error) => return format!("{error:?}"),
    };
    (summary.seconds, summary.quantize_seconds) = (0.0, 0.0);
    // Its text has the number of threads.
    summary.device.clear();
    for tensor in &mut summary.tensors {
        if let Outcome::Quantized { seconds, .. } = &mut tensor.outcome {
            *seconds = 0.0;
        }
    }
    let worst = [summary.worst_relative(7), summary.worst_absolute(7)];
    let worst = worst.iter().flatten().map(|(tensor, block)| (&tensor.name, block)).collect::<Vec<_>>();
    format!("{summary:?} {worst:?} {:?} {:?}", summary.totals(), summary.histograms())
}

#[test]
fn quantizing_without_a_search_is_the_same() {
    let scratch = Scratch::new();
    let input = model(&scratch);
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        let request = Quantize { worst_blocks: Some(7), ..request(format) };
        let described = is_the_same(&scratch, |out| summary(&request, &input, out));
        assert_eq!(described.matches("Quantized {").count(), 7);
    }
}

#[test]
fn quantizing_with_a_checked_search_and_importance_is_the_same() {
    let scratch = Scratch::new();
    let input = model(&scratch);
    let importance: Vec<f32> = noise(512, 5);
    let importance: Vec<_> = importance.into_iter().map(f32::abs).collect();
    let vectors = ["self_attn.q_proj", "mlp.down_proj"]
        .map(|layer| Tensor::of(format!("model.layers.0.{layer}.weight.importance"), &[512], &importance));
    let file = write_file(&scratch, "importance.safetensors", &vectors);
    for format in [Format::Mxfp4, Format::Nvfp4] {
        let search_global = (format == Format::Nvfp4).then_some(true);
        let search = Some(Search::Full);
        let settings = Settings { format: Some(format), search, search_global, ..Settings::default() };
        let importance = Some(file.clone());
        let request = Quantize { importance, worst_blocks: Some(7), ..Quantize::new(settings) };
        let request = Quantize { check_search: format == Format::Nvfp4, ..request };
        let described = is_the_same(&scratch, |out| summary(&request, &input, out));
        assert!(described.contains("plain: Some("));
        assert_eq!(described.contains("checked_blocks: Some("), request.check_search);
    }
}

#[test]
fn dequantizing_is_the_same() {
    let scratch = Scratch::new();
    let (input, packed) = (model(&scratch), scratch.path("PACKED"));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let checkpoint = Checkpoint::open(&packed).unwrap();
    for dtype in [None, Some(microscale::Dtype::F16), Some(microscale::Dtype::F32)] {
        let dequantize = Dequantize { dtype, non_finite: NonFinite::Error };
        is_the_same(&scratch, |out| {
            let mut done = dequantize.run(&checkpoint, out, &Device::Cpu, going_on()).unwrap();
            (done.seconds, done.compute_seconds) = (0.0, 0.0);
            done.device.clear();
            format!("{done:?}")
        });
    }
}

#[test]
fn converting_is_the_same() {
    let scratch = Scratch::new();
    let input = model(&scratch);
    let [mxfp4, nvfp4, modelopt] = ["MXFP4", "NVFP4", "MODELOPT"].map(|name| scratch.path(name));
    quantize(&request(Format::Mxfp4), &input, &mxfp4).unwrap();
    quantize(&request(Format::Nvfp4), &input, &nvfp4).unwrap();
    let convert = |input: &Path, request: Convert, out: &Path| {
        let checkpoint = Checkpoint::open(input).unwrap();
        match request.run(&checkpoint, out, &Device::Cpu, going_on()) {
            Ok(mut done) => {
                done.seconds = 0.0;
                format!("{done:?}")
            }
            Err(error) => format!("{error:?}"),
        }
    };
    convert(&nvfp4, Convert::new(CheckpointFormat::Modelopt), &modelopt);
    let requantize = |to, format| Convert { format, requantize: true, ..Convert::new(to) };
    let ours = CheckpointFormat::CompressedTensors;
    for (input, request, done) in [
        (&nvfp4, Convert::new(CheckpointFormat::Modelopt), "Rounding {"),
        (&modelopt, Convert::new(ours), "Converted {"),
        (&nvfp4, requantize(ours, Some(Format::Mxfp4)), "Requantized {"),
        (&mxfp4, requantize(ours, Some(Format::Nvfp4)), "cast: 7, requantized: []"),
        (&nvfp4, requantize(CheckpointFormat::Fp8Block, None), "Requantized {"),
        (&nvfp4, Convert::new(CheckpointFormat::Fp8Block), "--requantize rounds these blocks"),
    ] {
        let described = is_the_same(&scratch, |out| convert(input, request, out));
        assert!(described.contains(done), "{done}");
    }
}

#[test]
fn comparing_and_diagnosing_are_the_same() {
    let scratch = Scratch::new();
    let (input, packed) = (model(&scratch), scratch.path("PACKED"));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let [first, second] = [&input, &packed].map(|path| Checkpoint::open(path).unwrap());
    let comparison = is_the_same(&scratch, |_| {
        format!("{:?}", compare(&first, &second, &Device::Cpu, going_on()).unwrap())
    });
    assert_eq!(comparison.matches("Values(").count(), 9);
    // The original in another order of values gives a finding for each large tensor.
    let mut other = Tensor::noise::<bf16>("model.layers.0.mlp.down_proj.weight", &[BAND / 256 + 1, 512], 9);
    other.bytes.rotate_left(1024);
    let other = write_file(&scratch, "other.safetensors", &[other]);
    let other = Checkpoint::open(&other).unwrap();
    for (against, findings) in [(None, 0), (Some(&first), 0), (Some(&other), 1)] {
        let diagnosis = is_the_same(&scratch, |_| {
            format!("{:?}", diagnose(&second, against, &Device::Cpu, going_on()).unwrap())
        });
        assert_eq!(diagnosis.matches("OtherValues").count(), findings);
    }
}
