//! Checkpoints in MXFP8, which keep the names of tensors.

use half::bf16;
use microscale::formats::ScaleRule;
use microscale::{Format, Numerics, QuantizedShape, QuantizedTensor, Recipe, Scheme, Shape};
use microscale_test_support::{Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{bf16s, floats, quantizable, quantize, read_json, tensors};

#[test]
fn the_sample_goes_there_and_back() {
    let scratch = Scratch::new();
    let text = quantize(&scratch, &sample(), "OUT", &["--format", "mxfp8-e4m3"]).ok();
    assert!(text.contains("\nformat  mxfp8-e4m3, numerics ocp: scale rule floor\n"), "{text}");
    let (out, back) = (scratch.path("OUT"), scratch.path("BACK"));
    run(&[&"dequantize", &out, &"--out", &back]).ok();
    let (before, after, back_again) = (tensors(&sample()), tensors(&out), tensors(&back));
    assert!(before.keys().eq(back_again.keys()));
    let recipe = Recipe::of(Format::Mxfp8E4m3, Numerics::Ocp).unwrap();
    for (name, (dtype, shape, data, file)) in &before {
        if !quantizable(name) {
            assert_eq!(after[name], (*dtype, shape.clone(), data.clone(), file.clone()), "{name}");
            continue;
        }
        let (rows, cols) = (shape[0], shape[1]);
        let tensor = microscale::quantize(&bf16s(data), Shape::new(rows, cols), &recipe).unwrap().tensor;
        let codes = (Dtype::F8_E4M3, vec![rows, cols], tensor.codes().to_vec(), file.clone());
        let scales = (Dtype::U8, vec![rows, cols / 32], tensor.scales().to_vec(), file.clone());
        assert_eq!((&after[name], &after[&format!("{name}_scale")]), (&codes, &scales), "{name}");
        let quantized_shape = QuantizedShape::new(Format::Mxfp8E4m3, rows, cols);
        let read = QuantizedTensor::from_parts(quantized_shape, codes.2, scales.2).unwrap();
        let values = microscale::dequantize::<bf16>(&read);
        assert_eq!(bf16s(&back_again[name].2), values, "{name}");
    }
    // compressed-tensors 0.20.0 writes the same entry: tests/golden/README.md.
    let quantization = read_json(out.join("config.json"))["quantization_config"].clone();
    assert_eq!(quantization["format"], "mxfp8-quantized");
    let group = &quantization["config_groups"]["group_0"];
    assert_eq!(group["format"], "mxfp8-quantized");
    assert_eq!(
        group["weights"],
        json!({
            "dynamic": false, "group_size": 32, "num_bits": 8, "scale_dtype": "torch.uint8",
            "strategy": "group", "symmetric": true, "type": "float",
        })
    );
    assert_eq!(read_json(back.join("config.json")), read_json(sample().join("config.json")));
}

#[test]
fn the_scale_rule_can_be_chosen() {
    let scratch = Scratch::new();
    let values: Vec<f32> = (0..64).map(|i| 1.0 + i as f32).collect();
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![1, 64], floats(&values))]);
    for rule in <ScaleRule as microscale::Words>::values() {
        let word = microscale::Words::word(rule);
        quantize(&scratch, &input, word, &["--format", "mxfp8-e4m3", "--scale-rule", word]).ok();
        let recipe = Recipe { scheme: Scheme::Mxfp8E4m3(rule), ..Recipe::default() };
        let expected = microscale::quantize(&values, Shape::new(1, 64), &recipe).unwrap().tensor;
        let written = tensors(&scratch.path(word));
        assert_eq!(
            (&written["a.weight"].2[..], &written["a.weight_scale"].2[..]),
            (expected.codes(), expected.scales()),
            "{word}"
        );
    }
}

#[test]
fn inspect_and_compare_know_it() {
    let scratch = Scratch::new();
    let mut values = vec![0.0f32; 64];
    (values[0], values[1], values[2], values[40]) = (448.0, -3.0, 2.5, f32::NAN);
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![1, 64], floats(&values))]);
    let out = scratch.path("OUT");
    quantize(&scratch, &input, "OUT", &["--format", "mxfp8-e4m3", "--non-finite", "propagate"]).ok();
    let text = run(&[&"inspect", &out]).ok();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let counted = |start: &[&str]| words.iter().any(|line| line.starts_with(start));
    assert!(counted(&["a.weight", "mxfp8-e4m3", "1×64", "66", "B", "2^0", "…", "2^0", "1"]), "{text}");
    assert!(counted(&["2^0", "127", "1"]) && counted(&["NaN", "255", "1"]), "{text}");
    assert!(counted(&["-2^1", "…", "-2^2", "1"]) && counted(&["2^1", "…", "2^2", "1"]), "{text}");
    assert!(counted(&["2^8", "…", "2^9", "1"]) && counted(&["0", "61"]), "{text}");
    let text = run(&[&"compare", &input, &out]).ok();
    assert!(text.contains("left out: 32 of 64 values, not finite"), "{text}");
    let line = text.lines().find(|line| line.starts_with("a.weight")).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["a.weight", "0", "∞", "0", "1.000000"]);
}

/// Published diffusion models are cast to FP8: the codes are the values.
#[test]
fn plain_fp8_without_scales_is_left_alone() {
    let scratch = Scratch::new();
    let codes = |name, dtype| (name, dtype, vec![4, 32], vec![0x38; 128]);
    let tensors_in = [codes("a.weight", Dtype::F8_E5M2), codes("b.weight", Dtype::F8_E4M3)];
    let input = scratch.write_tensors("x.safetensors", &tensors_in);
    run(&[&"dequantize", &input, &"--out", &scratch.path("OUT")]).fails_with(&["nothing to dequantize"]);
    assert!(run(&[&"inspect", &input]).ok().contains("2 tensors in 1 file, 0 of them quantized"));
    assert!(run(&[&"compare", &input, &input]).ok().contains("same bytes"));
    run(&[&"doctor", &input]).fails_with(&["is unquantized"]);
}

#[test]
fn a_scale_whose_name_is_taken_is_an_error() {
    let scratch = Scratch::new();
    let weight = ("a.weight", Dtype::F32, vec![4, 32], vec![0; 512]);
    let taken = ("a.weight_scale", Dtype::F32, vec![1], vec![0; 4]);
    let input = scratch.write_tensors("x.safetensors", &[weight, taken]);
    quantize(&scratch, &input, "OUT", &["--format", "mxfp8-e4m3"])
        .fails_with(&["a.weight becomes a.weight_scale"]);
}
