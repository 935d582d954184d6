//! Exports of ModelOpt and Quark that are only read: MX formats, NVFP4 in blocks of 32, and NVFP4
//! with Quark's names.

use std::path::PathBuf;

use microscale::formats::{E2m1, E4m3};
use microscale_test_support::{Arg, Run, Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{floats, noise, quantize, read_json, tensors};

const ROWS: usize = 32;
const COLS: usize = 64;

const LAYERS: [&str; 2] = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"];

fn name(layer: &str, end: &str) -> &'static str {
    format!("{layer}.{end}").leak()
}

/// Returns random codes of E4M3 without NaN.
fn codes(count: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(3);
    (0..count).map(|_| random.u8(..0x7F)).collect()
}

/// Returns a layer's codes, scales and, if any, scales of scales.
fn layer(layer: &str, codes_dtype: Dtype, scales_dtype: Dtype, per_scale: usize) -> Vec<TensorData> {
    let width = if codes_dtype == Dtype::U8 { COLS / 2 } else { COLS };
    let scales = ROWS * COLS / per_scale;
    let mut random = fastrand::Rng::with_seed(4);
    let scales: Vec<u8> = (0..scales).map(|_| random.u8(0x30..0x50)).collect();
    let mut parts = vec![
        (name(layer, "weight"), codes_dtype, vec![ROWS, width], codes(ROWS * width)),
        (name(layer, "weight_scale"), scales_dtype, vec![ROWS, COLS / per_scale], scales),
    ];
    if scales_dtype == Dtype::F8_E4M3 {
        parts.push((name(layer, "weight_scale_2"), Dtype::F32, vec![], floats(&[0.75e-3])));
    }
    parts
}

/// Computes the values of a [`layer`] one by one.
fn values(parts: &[TensorData], per_scale: usize) -> Vec<f32> {
    let (codes, scales) = (&parts[0].3, &parts[1].3);
    let global = parts.get(2).map(|part| f32::from_le_bytes(part.3[..].try_into().unwrap()));
    let value = |i: usize| {
        let code = match parts[0].1 {
            Dtype::U8 => E2m1::from_bits(codes[i / 2] >> (4 * (i % 2)) & 0xF).to_f32(),
            _ => E4m3::from_bits(codes[i]).to_f32(),
        };
        let scale = scales[i / per_scale];
        let scale = match global {
            Some(global) => E4m3::from_bits(scale).to_f32() * global,
            None => 2f32.powi(i32::from(scale) - 127),
        };
        code * scale
    };
    (0..ROWS * COLS).map(value).collect()
}

/// Writes a model with [`LAYERS`] in this form and other tensors.
fn model(
    scratch: &Scratch,
    layers: &[Vec<TensorData>],
    more: &[TensorData],
    quantization: &Value,
) -> PathBuf {
    let head: TensorData = ("lm_head.weight", Dtype::F32, vec![8, COLS], floats(&noise(8 * COLS)));
    scratch.write_tensors("IN/model.safetensors", &[&layers.concat()[..], more, &[head]].concat());
    let config = json!({ "model_type": "llama", "quantization_config": quantization });
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

fn convert(scratch: &Scratch, to: &str, more: &[&str]) -> Run {
    let (input, out) = (scratch.path("IN"), scratch.path(to));
    let _ = std::fs::remove_dir_all(&out);
    let mut command = microscale_test_support::command(&[&"convert", &input, &"--to", &to, &"--out", &out]);
    command.args(more);
    Run::new(command)
}

fn modelopt(algorithm: &str) -> Value {
    json!({ "ignore": ["lm_head"], "quant_algo": algorithm, "quant_method": "modelopt" })
}

/// Returns Quark's config with these words for weights and inputs.
fn quark(weight: &Value, inputs: &Value) -> Value {
    let layer = json!({ "weight": weight, "input_tensors": inputs });
    json!({ "exclude": ["lm_head"], "global_quant_config": layer, "quant_method": "quark", "version": "0.13" })
}

fn fp4(group: u64, scale_format: &str) -> Value {
    json!({ "dtype": "fp4", "group_size": group, "scale_format": scale_format })
}

/// The two stages of NVFP4.
fn two_stages() -> Value {
    json!([fp4(16, "float32"), { "dtype": "fp8_e4m3", "is_scale_quant": true }])
}

#[test]
fn exports_have_no_defects_and_their_librarys_values() {
    let (u8s, e4m3) = (Dtype::U8, Dtype::F8_E4M3);
    for (quantization, [codes, scales], per_scale) in [
        (modelopt("MXFP8"), [e4m3, u8s], 32),
        (modelopt("mxfp4"), [u8s, u8s], 32),
        (modelopt("W4A8_MXFP4_FP8"), [u8s, u8s], 32),
        (modelopt("W4A8_NVFP4_FP8"), [u8s, e4m3], 32),
        (modelopt("W4A16_NVFP4"), [u8s, e4m3], 16),
        (quark(&fp4(32, "e8m0"), &Value::Null), [u8s, u8s], 32),
        (quark(&two_stages(), &Value::Null), [u8s, e4m3], 16),
    ] {
        let scratch = Scratch::new();
        let layers = LAYERS.map(|name| layer(name, codes, scales, per_scale));
        let input = model(&scratch, &layers, &[], &quantization);
        run(&[&"doctor", &input]).ok();
        run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("F32")]).ok();
        let back = tensors(&scratch.path("F32"));
        assert_eq!(back.len(), 3, "{:?}", back.keys());
        for parts in &layers {
            assert!(back[parts[0].0].2 == floats(&values(parts, per_scale)), "{quantization}");
        }
        let text = run(&[&"compare", &input, &scratch.path("F32")]).ok();
        let total = text.lines().find(|line| line.starts_with("total")).unwrap_or_default();
        assert!(total.split_whitespace().eq(["total", "0", "∞", "0", "1.000000"]), "{text}");
        // Values are unchanged in every format that represents them.
        for to in ["compressed-tensors", "modelopt"] {
            let (is_nvfp4, ran) = (scales == e4m3, convert(&scratch, to, &[]));
            if to == "modelopt" && !is_nvfp4 {
                ran.fails_with(&["modelopt", "choose"]);
                continue;
            }
            ran.ok();
            run(&[&"doctor", &scratch.path(to), &"--against", &scratch.path("F32")]).ok();
            if to == "modelopt" || !is_nvfp4 {
                let text = run(&[&"compare", &input, &scratch.path(to)]).ok();
                let total = text.lines().find(|line| line.starts_with("total")).unwrap_or_default();
                assert!(total.split_whitespace().eq(["total", "0", "∞", "0", "1.000000"]), "{text}");
            }
        }
        // `quantize` reads MX formats, too.
        let quantized = quantize(&scratch, &input, "Q", &["--format", "nvfp4"]);
        match scales {
            Dtype::U8 => {
                quantized.ok();
                quantize(&scratch, &scratch.path("F32"), "F", &["--format", "nvfp4"]).ok();
                let (ours, expected) = (tensors(&scratch.path("Q")), tensors(&scratch.path("F")));
                assert!(ours == expected, "{:?} and {:?}", ours.keys(), expected.keys());
            }
            _ => quantized.fails_with(&["quantized already"]),
        }
    }
}

/// Returns input scales in Quark's form, one per layer.
fn input_scales(scale: f32) -> [TensorData; 2] {
    LAYERS.map(|layer| (name(layer, "input_scale_2"), Dtype::F32, vec![], floats(&[scale])))
}

#[test]
fn quarks_scales_of_inputs_are_kept_under_the_names_of_the_target() {
    let nvfp4 = LAYERS.map(|name| layer(name, Dtype::U8, Dtype::F8_E4M3, 16));
    let scratch = Scratch::new();
    let input = model(&scratch, &nvfp4, &input_scales(0.003), &quark(&two_stages(), &two_stages()));
    run(&[&"doctor", &input]).ok();
    run(&[&"dequantize", &input, &"--out", &scratch.path("BACK")]).ok();
    assert_eq!(tensors(&scratch.path("BACK")).len(), 3);
    for (to, end, shape, expected) in [
        ("modelopt", "input_scale", vec![], 0.003),
        ("compressed-tensors", "input_global_scale", vec![1], 1.0 / 0.003),
        ("comfyui", "input_scale", vec![], 0.003),
    ] {
        let text = convert(&scratch, to, &[]).ok();
        let stored = tensors(&scratch.path(to));
        assert!(stored.keys().all(|name| !name.contains("input_scale_2")), "{:?}", stored.keys());
        for layer in LAYERS {
            let found = &stored[name(layer, end)];
            assert_eq!((found.0, &found.1, &found.2), (Dtype::F32, &shape, &floats(&[expected])), "{to}");
        }
        assert!(!text.contains("no longer says") && !text.contains("left out"), "{text}");
        if to == "comfyui" {
            continue;
        }
        let config = read_json(scratch.path(to).join("config.json"));
        let group = &config["quantization_config"]["config_groups"]["group_0"];
        assert_eq!(group["input_activations"]["num_bits"], 4, "{config}");
        run(&[&"doctor", &scratch.path(to)]).ok();
    }
    let own = read_json(scratch.path("modelopt/hf_quant_config.json"));
    assert_eq!(own["quantization"]["quant_algo"], "NVFP4");
    // Formats without input scales report them.
    for (to, more) in [("compressed-tensors", &["--format", "mxfp8-e4m3"][..]), ("fp8-block", &[])] {
        let text = convert(&scratch, to, &[more, &["--requantize"]].concat()).ok();
        assert!(text.contains("the scales of 2 layers' inputs were left out"), "{text}");
        assert!(text.contains("the config no longer says that inputs are quantized: fp4"), "{text}");
        assert!(tensors(&scratch.path(to)).keys().all(|name| !name.contains("input")));
    }
}

/// A single file has no config. The names of its input scales identify Quark.
#[test]
fn quarks_nvfp4_is_told_by_its_names_in_a_single_file() {
    let scratch = Scratch::new();
    let stored = [layer(LAYERS[0], Dtype::U8, Dtype::F8_E4M3, 16), input_scales(0.5)[..1].to_vec()].concat();
    let input = scratch.write_tensors("x.safetensors", &stored);
    let text = run(&[&"inspect", &input]).ok();
    assert!(text.contains("1 tensors in 1 file, 1 of them quantized"), "{text}");
    let out = scratch.path("y.safetensors");
    run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &out]).ok();
    assert!(tensors(&out).contains_key("model.layers.0.mlp.up_proj.input_scale"));
}

#[test]
fn layers_without_a_scale_of_inputs_are_named_where_others_have_one() {
    let nvfp4 = LAYERS.map(|name| layer(name, Dtype::U8, Dtype::F8_E4M3, 16));
    let scratch = Scratch::new();
    model(&scratch, &nvfp4, &input_scales(0.003)[..1], &quark(&two_stages(), &two_stages()));
    for to in ["modelopt", "compressed-tensors"] {
        let ran = convert(&scratch, to, &[]);
        let parts =
            ["1 layers have no scale of their inputs", "model.layers.0.mlp.down_proj.weight has none"];
        assert!(parts.iter().all(|part| ran.stderr.contains(part)), "{ran:?}");
        ran.ok();
        let found = run(&[&"doctor", &scratch.path(to)]);
        assert!(found.code == Some(1) && found.stdout.starts_with("input-scale\n"), "{found:?}");
    }
}

#[test]
fn scales_of_inputs_in_another_format_are_left_out_by_name() {
    let scratch = Scratch::new();
    let mxfp4 = LAYERS.map(|name| layer(name, Dtype::U8, Dtype::U8, 32));
    let fp8 = json!({ "dtype": "fp8_e4m3" });
    let inputs = LAYERS.map(|layer| (name(layer, "input_scale"), Dtype::F32, vec![], floats(&[0.5])));
    let input = model(&scratch, &mxfp4, &inputs, &quark(&fp4(32, "e8m0"), &fp8));
    run(&[&"doctor", &input]).ok();
    let text = convert(&scratch, "compressed-tensors", &[]).ok();
    assert!(text.contains("the scales of 2 layers' inputs were left out"), "{text}");
    assert!(text.contains("the config no longer says that inputs are quantized: fp8_e4m3"), "{text}");
    quantize(&scratch, &input, "Q", &["--format", "mxfp4"]).ok();
    for out in ["compressed-tensors", "Q"] {
        assert!(tensors(&scratch.path(out)).keys().all(|name| !name.contains("input")), "{out}");
    }
    // W4A8_NVFP4 has FP8 input scales, too.
    let scratch = Scratch::new();
    let nvfp4 = LAYERS.map(|name| layer(name, Dtype::U8, Dtype::F8_E4M3, 32));
    model(&scratch, &nvfp4, &inputs, &modelopt("W4A8_NVFP4_FP8"));
    let text = convert(&scratch, "modelopt", &[]).ok();
    assert!(text.contains("the config no longer says that inputs are quantized: W4A8_NVFP4_FP8"), "{text}");
    assert!(tensors(&scratch.path("modelopt")).keys().all(|name| !name.contains("input")));
    let config = read_json(scratch.path("modelopt/config.json"));
    assert_eq!(config["quantization_config"]["quant_algo"], "W4A16_NVFP4");
}

#[test]
fn a_cache_that_quark_quantizes_is_reported() {
    let nvfp4 = LAYERS.map(|name| layer(name, Dtype::U8, Dtype::F8_E4M3, 16));
    let scratch = Scratch::new();
    let mut quantization = quark(&two_stages(), &two_stages());
    quantization["kv_cache_quant_config"] =
        json!({ "*k_proj": { "output_tensors": { "dtype": "fp8_e4m3" } } });
    model(&scratch, &nvfp4, &input_scales(0.003), &quantization);
    let text = convert(&scratch, "modelopt", &[]).ok();
    assert!(text.contains("how the cache of keys and values is quantized: \"fp8_e4m3\""), "{text}");
}

/// AMD FP4 has the names, dtypes and shapes of MXFP4.
#[test]
fn amd_fp4_is_not_taken_for_mxfp4() {
    let refused = |scratch: &Scratch, input: &PathBuf, words: &str| {
        let out = scratch.path("OUT");
        for command in [
            &[&"dequantize" as Arg<'_>, input, &"--out", &out][..],
            &[&"convert", input, &"--to", &"compressed-tensors", &"--out", &out],
            &[&"quantize", input, &"--out", &out],
            &[&"compare", input, input],
        ] {
            run(command).fails_with(&["proj.weight", words, "quantize the original again"]);
        }
        assert!(run(&[&"inspect", input]).ok().contains(words));
    };
    let mxfp4 = || LAYERS.map(|name| layer(name, Dtype::U8, Dtype::U8, 32));
    let e5m3 = fp4(32, "e5m3");
    let per_layer = json!({ "*up_proj": { "weight": e5m3 } });
    let mut mixed = quark(&fp4(32, "e8m0"), &Value::Null);
    mixed["layer_quant_config"] = per_layer;
    for quantization in [quark(&e5m3, &e5m3), mixed] {
        let scratch = Scratch::new();
        let input = model(&scratch, &mxfp4(), &[], &quantization);
        refused(&scratch, &input, "scales are E5M3 (AMD FP4)");
    }
    // With a global scale, the config does not distinguish it.
    let scratch = Scratch::new();
    let global: TensorData = (name(LAYERS[0], "weight_scale_2"), Dtype::F32, vec![], floats(&[0.5]));
    let input = model(&scratch, &mxfp4(), &[global], &quark(&fp4(32, "float32"), &Value::Null));
    refused(&scratch, &input, "its scales have one of their own, model.layers.0.mlp.up_proj.weight_scale_2");
}
