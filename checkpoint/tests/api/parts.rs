//! Parts and merging: together they are what one run makes.

use std::path::{Path, PathBuf};

use half::bf16;
use microscale::Format;
use microscale_checkpoint::{Checkpoint, Error, Part, PartsError, Quantize, Summary, merge, parts_directory};
use microscale_test_support::Scratch;

use crate::input::{Tensor, write_file, write_model};
use crate::threads::with_threads;
use crate::{BAND, files, going_on, quantize, request};

/// Seven shards. The parts of a fused layer are in three of them, and thirds of the shards differ.
fn write_input(scratch: &Scratch) -> PathBuf {
    let tensor = |shard: usize| match shard {
        0 => ("self_attn.q_proj", BAND / 64 + 5),
        3 => ("self_attn.k_proj", 40),
        6 => ("self_attn.v_proj", 8),
        1 => ("mlp.down_proj", BAND / 64),
        _ => ("mlp.other_proj", 16),
    };
    let name = |shard: usize| format!("model-{shard}.safetensors");
    let names: Vec<_> = (0..7).map(name).collect();
    let of_shard = |shard: usize| {
        let (layer, rows) = tensor(shard);
        let layer = if layer.starts_with("self") { format!("0.{layer}") } else { format!("{shard}.{layer}") };
        vec![
            Tensor::noise::<bf16>(format!("model.layers.{layer}.weight"), &[rows, 64], shard as u64),
            Tensor::noise::<bf16>(format!("model.layers.{shard}.norm.weight"), &[64], shard as u64),
        ]
    };
    let shards: Vec<_> = names.iter().enumerate().map(|(i, name)| (name.as_str(), of_shard(i))).collect();
    scratch.write("IN/config.json", r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#);
    scratch.write("IN/tokenizer.json", "{}");
    write_model(scratch, "IN", &shards)
}

fn part(format: Format, input: &Path, out: &Path, [index, of]: [usize; 2]) -> Summary {
    quantize(&Quantize { part: Some(Part { index, of }), ..request(format) }, input, out).unwrap()
}

fn merged(input: &Path, out: &Path) -> Result<(usize, u64), Error> {
    let merged = merge(&Checkpoint::open(input)?, out, going_on())?;
    assert_eq!(merged.left, None, "nothing is left of the parts");
    Ok((merged.shards, merged.bytes))
}

#[test]
fn parts_in_any_order_are_what_one_run_makes() {
    let scratch = Scratch::new();
    let (input, whole) = (write_input(&scratch), scratch.path("WHOLE"));
    for format in [Format::Mxfp4, Format::Nvfp4] {
        let summary = quantize(&request(format), &input, &whole).unwrap();
        let (expected, totals) = (files(&whole), summary.totals());
        for (order, threads) in [([1, 2, 3], 1), ([3, 1, 2], 2), ([2, 3, 1], 3), ([3, 2, 1], 7)] {
            let out = scratch.path("OUT");
            let (mut made, mut tensors) = (0, 0);
            for index in order {
                let summary = with_threads(threads, || part(format, &input, &out, [index, 3]));
                let of = summary.part.unwrap();
                assert_eq!((of.kept, of.of), (0, 7));
                (made, tensors) = (made + of.made, tensors + summary.tensors.len());
                assert!(!out.exists());
            }
            assert_eq!((made, tensors), (7, summary.tensors.len()));
            let bytes = totals.quantized.with(totals.copied).bytes_after;
            assert_eq!(merged(&input, &out).unwrap(), (7, bytes));
            assert!(files(&out) == expected, "{format}: {order:?}");
            assert!(!parts_directory(&out).unwrap().exists());
            std::fs::remove_dir_all(out).unwrap();
        }
        std::fs::remove_dir_all(&whole).unwrap();
    }
}

#[test]
fn a_part_that_runs_again_keeps_its_shards() {
    let scratch = Scratch::new();
    let (input, out) = (write_input(&scratch), scratch.path("OUT"));
    let first = part(Format::Nvfp4, &input, &out, [1, 2]).part.unwrap();
    let before = scratch.contents();
    let again = part(Format::Nvfp4, &input, &out, [1, 2]).part.unwrap();
    assert_eq!((again.made, again.kept), (0, first.made));
    assert!(scratch.contents() == before);
    // The other split makes the shards that are missing.
    let rest = part(Format::Nvfp4, &input, &out, [1, 1]).part.unwrap();
    assert_eq!((rest.made, rest.kept), (7 - first.made, first.made));
    merged(&input, &out).unwrap();
}

#[test]
fn merging_refuses_missing_shards_and_shards_of_other_requests() {
    let scratch = Scratch::new();
    let (input, out) = (write_input(&scratch), scratch.path("OUT"));
    part(Format::Nvfp4, &input, &out, [1, 3]);
    let made = part(Format::Nvfp4, &input, &out, [3, 3]).part.unwrap().made;
    let error = merged(&input, &out).unwrap_err();
    let Error::Parts(PartsError::Missing { shards, of, .. }) = &error else { panic!("{error:?}") };
    let first = part(Format::Nvfp4, &input, &out, [1, 3]).part.unwrap().kept;
    assert_eq!((shards.len(), *of), (7 - made - first, 7));
    part(Format::Mxfp4, &input, &out, [2, 3]);
    let error = merged(&input, &out).unwrap_err();
    assert!(matches!(error, Error::Parts(PartsError::Differ { .. })), "{error:?}");
    assert!(!out.exists());
    // With the right format the part replaces its shards.
    part(Format::Nvfp4, &input, &out, [2, 3]);
    merged(&input, &out).unwrap();
}

#[test]
fn a_file_has_one_part_that_makes_it() {
    let scratch = Scratch::new();
    let tensor = Tensor::noise::<f32>("a.fc.weight", &[BAND / 64 + 1, 64], 1);
    let input = write_file(&scratch, "in.safetensors", &[tensor]);
    let [out, whole] = ["out.safetensors", "whole.safetensors"].map(|name| scratch.path(name));
    quantize(&request(Format::Nvfp4), &input, &whole).unwrap();
    let made = [2, 1].map(|index| part(Format::Nvfp4, &input, &out, [index, 2]).part.unwrap().made);
    assert_eq!(made.iter().sum::<usize>(), 1);
    merged(&input, &out).unwrap();
    assert!(files(&out) == files(&whole));
}
