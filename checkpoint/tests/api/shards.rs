//! Shards: the tensors of each file, copied tensors, and the index.

use std::path::Path;

use half::bf16;
use microscale::{Device, Format, Recipe, Shape};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Convert, Dequantize, Quantize, Recipes, Selection, Settings,
};
use microscale_test_support::Scratch;
use safetensors::tensor::Dtype;

use crate::input::{InFile, Tensor, write_file, write_model};
use crate::{BAND, files, going_on, quantize, request, shards, tensors};

#[test]
fn copied_tensors_larger_than_a_band_keep_their_bytes() {
    let scratch = Scratch::new();
    let mut random = fastrand::Rng::with_seed(1);
    let bytes: Vec<u8> = (0..5 * BAND + 7).map(|_| random.u8(..)).collect();
    let copied = [
        Tensor::noise::<f32>("model.embed_tokens.weight", &[3 * BAND / 256 + 1, 256], 1),
        Tensor::noise::<bf16>("lm_head.weight", &[4 * BAND / 256, 256], 2),
        Tensor::of_bytes("model.table", Dtype::U8, &[5 * BAND + 7], &bytes),
    ];
    let weight = Tensor::noise::<bf16>("model.layers.0.fc.weight", &[2, 32], 3);
    let input = write_file(&scratch, "in.safetensors", &[&copied[..], &[weight]].concat());
    let [packed, values, modelopt] =
        ["packed", "values", "modelopt"].map(|name| scratch.path(format!("{name}.safetensors")));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let checkpoint = Checkpoint::open(&packed).unwrap();
    Dequantize::default().run(&checkpoint, &values, &Device::Cpu, going_on()).unwrap();
    let convert = Convert::new(CheckpointFormat::Modelopt);
    convert.run(&checkpoint, &modelopt, &Device::Cpu, going_on()).unwrap();
    for output in [packed, values, modelopt] {
        let output = tensors(&output);
        for tensor in &copied {
            let (dtype, shape, bytes) = &output[&tensor.name];
            assert_eq!((dtype, shape), (&tensor.dtype, &tensor.shape), "{}", tensor.name);
            assert!(*bytes == tensor.bytes, "{}", tensor.name);
        }
    }
}

#[test]
fn hundreds_of_small_tensors_stay_in_their_shards() {
    let scratch = Scratch::new();
    let tensor = |shard: u64, i: u64| match i % 4 {
        3 => Tensor::noise::<bf16>(format!("model.layers.{shard}.{i}.norm.weight"), &[32], i),
        _ => Tensor::noise::<bf16>(format!("model.layers.{shard}.{i}.fc.weight"), &[2, 32], 40 * shard + i),
    };
    let names: Vec<_> = (0..30).map(|shard| format!("model-{shard:02}.safetensors")).collect();
    let of_shard = |shard: u64| (0..20).map(|i| tensor(shard, i)).collect::<Vec<_>>();
    let input: Vec<_> = names.iter().zip(0..).map(|(name, shard)| (&**name, of_shard(shard))).collect();
    let model = write_model(&scratch, "IN", &input);
    let out = scratch.path("OUT");
    quantize(&request(Format::Mxfp4), &model, &out).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&files(&out)["model.safetensors.index.json".as_ref() as &Path]).unwrap();
    let (mut entries, mut bytes) = (0, 0);
    for (shard, of_shard) in &input {
        let output = tensors(&out.join(shard));
        for tensor in of_shard {
            if tensor.shape.len() == 1 {
                assert_eq!(output[&tensor.name].2, tensor.bytes, "{}", tensor.name);
                continue;
            }
            let expected =
                microscale::quantize(&tensor.values::<bf16>(), Shape::new(2, 32), &Recipe::default())
                    .unwrap();
            let found = InFile::take(&output, &tensor.name, &tensor.shape, Format::Mxfp4);
            assert_eq!(found.codes, expected.tensor.codes(), "{}", tensor.name);
            assert_eq!(found.scales, expected.tensor.scales(), "{}", tensor.name);
        }
        for (name, (.., data)) in &output {
            assert_eq!(index["weight_map"][name], *shard);
            (entries, bytes) = (entries + 1, bytes + data.len());
        }
    }
    assert_eq!(index["weight_map"].as_object().unwrap().len(), entries);
    assert_eq!(index["metadata"]["total_size"], bytes);
}

#[test]
fn a_shard_without_tensors_stays_one() {
    let scratch = Scratch::new();
    let tensor = Tensor::noise::<f32>("a.weight", &[2, 32], 1);
    write_file(&scratch, "IN/a.safetensors", &[]);
    write_file(&scratch, "IN/b.safetensors", std::slice::from_ref(&tensor));
    let (input, out) = (scratch.path("IN"), scratch.path("OUT"));
    let include = Selection::new(&["a.*"], &[""; 0]).unwrap();
    let request = Quantize { recipes: Recipes::new(Settings::default(), include), ..Quantize::default() };
    let summary = quantize(&request, &input, &out).unwrap();
    assert_eq!(summary.tensors.len(), 1);
    let written = shards(&out);
    assert!(written.keys().eq(shards(&input).keys()));
    assert_eq!(tensors(&out.join("a.safetensors")).len(), 0);
    let output = tensors(&out);
    let found = InFile::take(&output, "a.weight", &[2, 32], Format::Mxfp4);
    let expected = microscale::quantize(&tensor.values::<f32>(), Shape::new(2, 32), &Recipe::default());
    assert_eq!(found.codes, expected.unwrap().tensor.codes());
}
