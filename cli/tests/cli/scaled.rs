//! Checkpoints with FP8 or INT8 weights as input.

use std::path::PathBuf;

use half::bf16;
use microscale_test_support::{Arg, Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::parts::files;
use super::{Tensors, floats, noise, quantize, read_json, tensors};

pub(super) const SHAPE: [usize; 2] = [200, 320];

/// Returns finite codes of E4M3.
pub(super) fn codes(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..SHAPE[0] * SHAPE[1]).map(|_| random.u8(..0x7F) | random.u8(..2) << 7).collect()
}

/// Returns the scales of 128x128 blocks. The last blocks are smaller.
pub(super) fn scales(seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..2 * 3).map(|_| (random.f32() + 0.5) / 3e3).collect()
}

pub(super) fn bf16s(n: usize) -> Vec<u8> {
    noise(n).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
}

/// Writes a block FP8 model in three shards. The third has only scales, for codes of the first.
fn block_fp8(scratch: &Scratch) -> PathBuf {
    let weight = |name, seed| (name, Dtype::F8_E4M3, SHAPE.to_vec(), codes(seed));
    let scale = |name, seed| (name, Dtype::F32, vec![2, 3], floats(&scales(seed)));
    let first: Vec<TensorData> = vec![
        ("lm_head.weight", Dtype::BF16, vec![64, 320], bf16s(64 * 320)),
        ("model.norm.weight", Dtype::BF16, vec![320], bf16s(320)),
        weight("model.layers.0.self_attn.q_proj.weight", 1),
        weight("model.layers.0.self_attn.k_proj.weight", 2),
        scale("model.layers.0.self_attn.q_proj.weight_scale_inv", 3),
    ];
    let second: Vec<TensorData> = vec![
        weight("model.layers.1.mlp.down_proj.weight", 5),
        scale("model.layers.1.mlp.down_proj.weight_scale_inv", 6),
        ("model.layers.1.mlp.down_proj.input_scale", Dtype::F32, vec![], floats(&[0.5])),
    ];
    let third = vec![scale("model.layers.0.self_attn.k_proj.weight_scale_inv", 4)];
    let shards = [("a.safetensors", first), ("b.safetensors", second), ("c.safetensors", third)];
    let mut entries = Vec::new();
    for (shard, tensors) in &shards {
        scratch.write_tensors(format!("IN/{shard}"), tensors);
        entries.extend(tensors.iter().map(|(name, ..)| (*name, *shard)));
    }
    scratch.write_index("IN", &entries);
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    });
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

/// Returns the tensors of IN after `dequantize`.
pub(super) fn dequantized(scratch: &Scratch, dtype: &str) -> Tensors {
    let out = scratch.path(dtype);
    run(&[&"dequantize", &scratch.path("IN"), &"--dtype", &dtype, &"--out", &out]).ok();
    tensors(&out)
}

/// Returns the tensors without their files.
fn contents(tensors: &Tensors) -> Vec<(&str, &Dtype, &[usize], &[u8])> {
    tensors
        .iter()
        .map(|(name, (dtype, shape, data, _))| (name.as_str(), dtype, &shape[..], &data[..]))
        .collect()
}

#[test]
fn values_are_codes_times_their_blocks_scales() {
    let scratch = Scratch::new();
    block_fp8(&scratch);
    let back = dequantized(&scratch, "f32");
    let names: Vec<_> = back.keys().map(String::as_str).collect();
    assert_eq!(names.len(), 5, "{names:?}");
    for (name, of_codes, of_scales) in
        [("model.layers.0.self_attn.k_proj.weight", 2, 4), ("model.layers.1.mlp.down_proj.weight", 5, 6)]
    {
        let (codes, scales) = (codes(of_codes), scales(of_scales));
        let expected = codes.iter().enumerate().map(|(i, code)| {
            let (row, col) = (i / SHAPE[1], i % SHAPE[1]);
            microscale::formats::E4m3::from_bits(*code).to_f32() * scales[row / 128 * 3 + col / 128]
        });
        let expected: Vec<f32> = expected.collect();
        assert_eq!((&back[name].0, &back[name].1[..]), (&Dtype::F32, &SHAPE[..]));
        assert_eq!(back[name].2, floats(&expected), "{name}");
    }
    let config = read_json(scratch.path("f32/config.json"));
    assert!(config.get("quantization_config").is_none(), "{config}");
}

#[test]
fn quantizing_is_that_of_the_values_in_every_numerics() {
    let scratch = Scratch::new();
    let input = block_fp8(&scratch);
    let bf16 = dequantized(&scratch, "bf16");
    dequantized(&scratch, "f32");
    for (options, method) in [
        (&["--format", "nvfp4"][..], "compressed-tensors"),
        (&["--format", "mxfp4"], "compressed-tensors"),
        (&["--format", "nvfp4", "--numerics", "modelopt", "--to", "modelopt"], "modelopt"),
    ] {
        let (out, other) = (format!("Q-{}", options.join("")), format!("F-{}", options.join("")));
        let text = quantize(&scratch, &input, &out, options).ok();
        quantize(&scratch, &scratch.path("f32"), &other, options).ok();
        let (ours, expected) = (tensors(&scratch.path(&out)), tensors(&scratch.path(&other)));
        // Unquantized tensors have the dtype of the dequantized checkpoint.
        let quantized = |tensors: &Tensors| -> Vec<_> {
            contents(tensors)
                .into_iter()
                .filter(|(name, ..)| name.contains("_proj"))
                .map(|(name, _, shape, data)| (name.to_string(), shape.to_vec(), data.to_vec()))
                .collect()
        };
        assert_eq!(quantized(&ours), quantized(&expected), "{options:?}");
        assert!(ours.keys().all(|name| !name.ends_with("_inv") && !name.ends_with("input_scale")));
        assert_eq!(ours["lm_head.weight"].2, bf16["lm_head.weight"].2);
        assert!(text.contains("output head"), "{text}");
        let config = read_json(scratch.path(&out).join("config.json"));
        let quantization = &config["quantization_config"];
        assert_eq!(quantization["quant_method"], method);
        assert_eq!(quantization["ignore"], json!(["lm_head"]));
        assert!(quantization.get("weight_block_size").is_none() && config["model_type"] == "qwen3");
        let index = read_json(scratch.path(&out).join("model.safetensors.index.json"));
        let listed: Vec<_> = index["weight_map"].as_object().unwrap().keys().cloned().collect();
        assert!(ours.keys().all(|name| listed.contains(name)) && listed.len() == ours.len(), "{index}");
        run(&[&"doctor", &scratch.path(&out), &"--against", &input]).ok();
    }
}

#[test]
fn layers_that_are_excluded_are_bf16() {
    let scratch = Scratch::new();
    let input = block_fp8(&scratch);
    let exclude = ["--format", "nvfp4", "--exclude", "*.layers.1.*"];
    let plan = run(&[
        &[&"quantize" as Arg<'_>, &input, &"--dry-run"],
        &exclude.each_ref().map(|a| a as Arg<'_>)[..],
    ]
    .concat())
    .ok();
    assert!(plan.contains("excluded by \"*.layers.1.*\"; dequantized to bf16"), "{plan}");
    let text = quantize(&scratch, &input, "Q", &exclude).ok();
    assert!(text.contains("excluded by \"*.layers.1.*\"; dequantized to bf16"), "{text}");
    let (ours, bf16) = (tensors(&scratch.path("Q")), dequantized(&scratch, "bf16"));
    let name = "model.layers.1.mlp.down_proj.weight";
    assert_eq!((&ours[name].0, &ours[name].1, &ours[name].2), (&Dtype::BF16, &bf16[name].1, &bf16[name].2));
    assert!(ours.keys().filter(|found| found.contains("layers.1")).eq([name]), "{:?}", ours.keys());
    let config = read_json(scratch.path("Q/config.json"));
    assert_eq!(config["quantization_config"]["ignore"], json!(["lm_head", "model.layers.1.mlp.down_proj"]));
    run(&[&"doctor", &scratch.path("Q"), &"--against", &input]).ok();
}

#[test]
fn parts_make_the_same_files() {
    let scratch = Scratch::new();
    let input = block_fp8(&scratch);
    quantize(&scratch, &input, "ONE", &["--format", "nvfp4"]).ok();
    for part in ["1/2", "2/2"] {
        quantize(&scratch, &input, "OUT", &["--format", "nvfp4", "--part", part]).ok();
    }
    run(&[&"merge", &input, &"--out", &scratch.path("OUT")]).ok();
    let merged = files(&scratch.path("OUT"));
    assert_eq!(merged, files(&scratch.path("ONE")));
    assert!(merged.keys().all(|file| !file.ends_with("c.safetensors")), "{:?}", merged.keys());
}

#[test]
fn scales_that_do_not_fit_are_refused_by_name() {
    let weight: TensorData = ("a.weight", Dtype::F8_E4M3, SHAPE.to_vec(), codes(1));
    let scale = |dtype: Dtype, shape: &[usize]| -> TensorData {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        ("a.weight_scale_inv", dtype, shape.to_vec(), vec![0; bytes])
    };
    let config = json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [128, 128] } });
    for (scales, parts) in [
        (None, &["its scales, a.weight_scale_inv, are missing"][..]),
        (Some(scale(Dtype::F32, &[2, 2])), &["[200, 320]", "[2, 2]", "a.weight_scale_inv", "128x128"]),
        (Some(scale(Dtype::F32, &[6])), &["[6]", "128x128"]),
        (Some(scale(Dtype::I32, &[2, 3])), &["a.weight_scale_inv, are I32"]),
    ] {
        let scratch = Scratch::new();
        let tensors: Vec<_> = [weight.clone()].into_iter().chain(scales).collect();
        scratch.write_tensors("IN/model.safetensors", &tensors);
        scratch.write("IN/config.json", config.to_string());
        let (input, out) = (scratch.path("IN"), scratch.path("OUT"));
        let parts = [&["model.safetensors", "a.weight"], parts].concat();
        quantize(&scratch, &input, "OUT", &[]).fails_with(&parts);
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        run(&[&"compare", &input, &input]).fails_with(&parts);
        let text = run(&[&"inspect", &input]).ok();
        assert!(text.contains("cannot be read") && parts.iter().all(|part| text.contains(part)), "{text}");
        let found = run(&[&"doctor", &input]);
        assert!(found.code == Some(1) && found.stdout.contains("unreadable"), "{found:?}");
        assert!(!out.exists());
    }
    let scratch = Scratch::new();
    // DeepSeek-V4's layers have power-of-two or F32 scales with this name.
    let powers: TensorData = ("a.scale", Dtype::F8_E8M0, vec![2, 3], vec![110, 112, 114, 116, 118, 120]);
    let renamed: TensorData = ("a.weight_scale_inv", powers.1, powers.2.clone(), powers.3.clone());
    for (name, scales) in [("beside", powers), ("after", renamed)] {
        scratch.write_tensors(format!("{name}/model.safetensors"), &[weight.clone(), scales]);
        scratch.write(format!("{name}/config.json"), config.to_string());
        quantize(&scratch, &scratch.path(name), &format!("Q-{name}"), &["--format", "nvfp4"]).ok();
    }
    let [beside, after] = ["Q-beside", "Q-after"].map(|name| tensors(&scratch.path(name)));
    assert_eq!(beside, after);
    // The config gives other block sizes.
    let scratch = Scratch::new();
    scratch.write_tensors("IN/model.safetensors", &[weight, scale(Dtype::F32, &[4, 3])]);
    let config = json!({ "quantization_config": { "quant_method": "fp8", "weight_block_size": [64, 128] } });
    scratch.write("IN/config.json", config.to_string());
    quantize(&scratch, &scratch.path("IN"), "OUT", &[]).ok();
}

#[test]
fn reading_commands_understand_them() {
    let scratch = Scratch::new();
    let input = block_fp8(&scratch);
    let text = run(&[&"inspect", &input]).ok();
    assert!(text.contains("F8_E4M3") && text.contains("F32 for 128×128"), "{text}");
    assert!(text.contains("5 tensors in 3 files, 3 of them quantized"), "{text}");
    run(&[&"doctor", &input]).ok();
    dequantized(&scratch, "f32");
    let text = run(&[&"compare", &input, &scratch.path("f32")]).ok();
    let total = text.lines().find(|line| line.starts_with("total")).unwrap_or_default();
    assert!(total.split_whitespace().eq(["total", "0", "∞", "0", "1.000000"]), "{text}");
    run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &scratch.path("OUT")])
        .fails_with(&["F8_E4M3 under scales", "`quantize` takes them as input"]);
    // A NaN scale is a finding.
    let mut broken = scales(3);
    broken[4] = f32::INFINITY;
    let weight: TensorData = ("a.weight", Dtype::F8_E4M3, SHAPE.to_vec(), codes(1));
    let file = scratch.write_tensors(
        "x.safetensors",
        &[weight, ("a.weight_scale_inv", Dtype::F32, vec![2, 3], floats(&broken))],
    );
    let found = run(&[&"doctor", &file]);
    assert!(
        found.stdout.contains("1 of the 6 scales in a.weight_scale_inv, the first at 4 (inf)"),
        "{found:?}"
    );
}

/// The config of a model with another quantization method still names it.
#[test]
fn other_methods_are_not_mistaken() {
    let scratch = Scratch::new();
    let weight: TensorData = ("a.weight", Dtype::F8_E4M3, SHAPE.to_vec(), codes(1));
    scratch.write_tensors("IN/model.safetensors", &[weight]);
    let config: Value = json!({ "quantization_config": { "quant_method": "gptq" } });
    scratch.write("IN/config.json", config.to_string());
    quantize(&scratch, &scratch.path("IN"), "OUT", &[]).fails_with(&["gptq", "quantized already"]);
}

/// Methods of configs, with the names of a layer's codes and scales.
fn one_scale_for_many() -> Vec<(&'static str, Vec<TensorData>)> {
    let weight = |dtype| ("a.weight", dtype, SHAPE.to_vec(), codes(7));
    let scale = |dtype, shape: &[usize], bytes| ("a.weight_scale", dtype, shape.to_vec(), bytes);
    let rows: Vec<f32> = noise(SHAPE[0]).iter().map(|value| value.abs() / 64.0 + 1e-4).collect();
    let (f32s, powers) = (floats(&rows), vec![120; SHAPE[0] * SHAPE[1] / 32]);
    let bf16s: Vec<u8> = rows.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    let input = |bytes| ("a.input_scale", Dtype::F32, vec![], bytes);
    vec![
        ("compressed-tensors", vec![weight(Dtype::F8_E4M3), scale(Dtype::F32, &[SHAPE[0], 1], f32s)]),
        ("compressed-tensors", vec![weight(Dtype::F8_E4M3), scale(Dtype::BF16, &[1], bf16s[..2].to_vec())]),
        ("compressed-tensors", vec![weight(Dtype::I8), scale(Dtype::BF16, &[SHAPE[0], 1], bf16s)]),
        (
            "modelopt",
            vec![weight(Dtype::F8_E4M3), scale(Dtype::F32, &[], floats(&[0.01])), input(floats(&[1.0]))],
        ),
        // MXFP8, which is an output format, too.
        (
            "compressed-tensors",
            vec![weight(Dtype::F8_E4M3), scale(Dtype::U8, &[SHAPE[0], SHAPE[1] / 32], powers)],
        ),
    ]
}

#[test]
fn scales_of_rows_tensors_and_blocks_of_a_row_are_input_too() {
    for (method, tensors_in) in one_scale_for_many() {
        let scratch = Scratch::new();
        let head = ("lm_head.weight", Dtype::BF16, vec![64, 320], bf16s(64 * 320));
        let stored: Vec<_> = [head].into_iter().chain(tensors_in.clone()).collect();
        scratch.write_tensors("IN/model.safetensors", &stored);
        let config = json!({ "quantization_config": { "quant_method": method, "kv_cache_scheme": null } });
        scratch.write("IN/config.json", config.to_string());
        let input = scratch.path("IN");
        run(&[&"doctor", &input]);
        let values = dequantized(&scratch, "f32");
        assert!(values.keys().eq(["a.weight", "lm_head.weight"]), "{:?}", values.keys());
        for options in [&["--format", "nvfp4"][..], &["--format", "mxfp4"]] {
            let (out, other) = (format!("Q{}", options[1]), format!("F{}", options[1]));
            quantize(&scratch, &input, &out, options).ok();
            quantize(&scratch, &scratch.path("f32"), &other, options).ok();
            let (ours, expected) = (tensors(&scratch.path(&out)), tensors(&scratch.path(&other)));
            assert!(ours.keys().eq(expected.keys()), "{:?} and {:?}", ours.keys(), expected.keys());
            for (name, (_, shape, bytes, _)) in ours.iter().filter(|(name, _)| name.starts_with("a.")) {
                assert_eq!((shape, bytes), (&expected[name].1, &expected[name].2), "{method}: {name}");
            }
        }
        let only = ["--include", "lm_head.*", "--exclude", "a.*"];
        quantize(&scratch, &input, "KEPT", &only).ok();
        let (kept, bf16) = (tensors(&scratch.path("KEPT")), dequantized(&scratch, "bf16"));
        assert_eq!((kept["a.weight"].0, &kept["a.weight"].2), (Dtype::BF16, &bf16["a.weight"].2));
        assert!(!kept.contains_key("a.weight_scale") && !kept.contains_key("a.input_scale"));
    }
}

#[test]
fn weights_with_further_parts_are_refused_by_name() {
    let weight: TensorData = ("a.weight", Dtype::I8, SHAPE.to_vec(), codes(1));
    let scale: TensorData = ("a.weight_scale", Dtype::F32, vec![SHAPE[0], 1], floats(&[0.5; SHAPE[0]]));
    let zeros = |bytes| ("a.weight_zero_point", Dtype::I8, vec![SHAPE[0], 1], bytes);
    let mut points = vec![0; SHAPE[0]];
    let scratch = Scratch::new();
    let symmetric =
        scratch.write_tensors("x.safetensors", &[weight.clone(), scale.clone(), zeros(points.clone())]);
    quantize(&scratch, &symmetric, "X.safetensors", &[]).ok();
    assert!(!tensors(&scratch.path("X.safetensors")).contains_key("a.weight_zero_point"));
    points[7] = 3;
    let other = scratch.write_tensors("y.safetensors", &[weight.clone(), scale.clone(), zeros(points)]);
    quantize(&scratch, &other, "Y.safetensors", &[]).fails_with(&[
        "a.weight",
        "a.weight_zero_point",
        "not 0",
    ]);
    let scaled = ("a.pre_quant_scale", Dtype::BF16, vec![320], bf16s(320));
    let smooth = scratch.write_tensors("z.safetensors", &[weight.clone(), scale, scaled]);
    quantize(&scratch, &smooth, "Z.safetensors", &[]).fails_with(&["a.weight", "a.pre_quant_scale"]);
    let under = ("a.weight_global_scale", Dtype::F32, vec![1], floats(&[2.0]));
    let grouped = ("a.weight_scale", Dtype::F32, vec![SHAPE[0], 20], floats(&[0.5; SHAPE[0] * 20]));
    let file = scratch.write_tensors("v.safetensors", &[weight.clone(), grouped, under]);
    quantize(&scratch, &file, "V.safetensors", &[]).fails_with(&[
        "a.weight",
        "a.weight_global_scale",
        "tensor_group",
    ]);
    let few = ("a.weight_scale", Dtype::F32, vec![SHAPE[0] - 1, 1], floats(&[0.5; SHAPE[0] - 1]));
    let file = scratch.write_tensors("w.safetensors", &[weight, few]);
    quantize(&scratch, &file, "W.safetensors", &[]).fails_with(&[
        "[199, 1]",
        "neither one scale for all, nor for each row, nor for equal groups of a row, nor for each block of 128x128",
    ]);
}

#[test]
fn a_single_block_with_one_scale_is_block_fp8() {
    let scratch = Scratch::new();
    // One scale, not representable in bf16, for each whole matrix of [128, 128] and [100, 64].
    let scale = |name| (name, Dtype::F32, vec![1, 1], floats(&[1.0 / 3.0]));
    let weight = |name, rows: usize, cols: usize| {
        (name, Dtype::F8_E4M3, vec![rows, cols], codes(1)[..rows * cols].to_vec())
    };
    let stored: [TensorData; 6] = [
        weight("a.weight", 128, 128),
        scale("a.weight_scale_inv"),
        weight("b.weight", 100, 64),
        scale("b.weight_scale_inv"),
        ("c.weight_packed", Dtype::U8, vec![2, 16], vec![0x21; 32]),
        ("c.weight_scale", Dtype::U8, vec![2, 1], vec![120; 2]),
    ];
    let input = scratch.write_tensors("x.safetensors", &stored);
    let out = scratch.path("OUT.safetensors");
    run(&[&"convert", &input, &"--to", &"fp8-block", &"--out", &out]).ok();
    let (before, after) = (tensors(&input), tensors(&out));
    for name in ["a.weight", "a.weight_scale_inv", "b.weight", "b.weight_scale_inv"] {
        let [(.., shape, codes, _), (.., shape_after, codes_after, _)] = [&before[name], &after[name]];
        assert_eq!((shape, codes), (shape_after, codes_after), "{name}");
    }
    for (file, to) in [(&input, "BEFORE.safetensors"), (&out, "AFTER.safetensors")] {
        run(&[&"dequantize", file, &"--dtype", &"f32", &"--out", &scratch.path(to)]).ok();
    }
    let values = |file| tensors(&scratch.path(file)).into_values().map(|tensor| tensor.2).collect::<Vec<_>>();
    assert_eq!(values("BEFORE.safetensors"), values("AFTER.safetensors"));
}

#[test]
fn cache_settings_are_kept_or_reported() {
    let fp8 =
        json!({ "dynamic": false, "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true });
    let int8 = json!({ "num_bits": 8, "type": "int" });
    for (cache, kept) in [(fp8, true), (int8, false)] {
        let scratch = Scratch::new();
        let (_, stored) = one_scale_for_many().remove(0);
        scratch.write_tensors("IN/model.safetensors", &stored);
        let method = json!({ "quant_method": "compressed-tensors", "kv_cache_scheme": cache });
        scratch.write("IN/config.json", json!({ "quantization_config": method }).to_string());
        let ran = quantize(&scratch, &scratch.path("IN"), "OUT", &["--format", "nvfp4"]);
        assert_eq!(!ran.stderr.contains("no longer say how the cache of keys and values"), kept, "{ran:?}");
        ran.ok();
        let config = read_json(scratch.path("OUT/config.json"));
        let said = &config["quantization_config"]["kv_cache_scheme"];
        assert_eq!(said.is_object(), kept, "{config}");
        assert!(!kept || said["num_bits"] == 8 && said["type"] == "float", "{config}");
    }
}

#[test]
fn formats_of_four_bits_are_still_quantized_already() {
    let scratch = Scratch::new();
    quantize(&scratch, &microscale_test_support::sample(), "Q", &["--format", "mxfp4"]).ok();
    quantize(&scratch, &scratch.path("Q"), "AGAIN", &[])
        .fails_with(&["compressed-tensors", "quantized already"]);
}

#[test]
fn two_tensors_of_scales_for_one_of_codes_are_refused_by_both_names() {
    let scratch = Scratch::new();
    let codes: TensorData = ("a.weight", Dtype::F8_E4M3, vec![16, 32], vec![0x38; 512]);
    let scale = |name| -> TensorData { (name, Dtype::F32, vec![1], floats(&[0.5])) };
    for [first, second] in [
        ["a.weight_scale_inv", "a.weight_scale"],
        ["a.weight_scale_inv", "a.scale"],
        ["a.weight_scale", "a.scale"],
    ] {
        scratch.write_tensors("in.safetensors", &[codes.clone(), scale(first), scale(second)]);
        let input = scratch.path("in.safetensors");
        let parts = ["a.weight", first, second, "remove one"];
        quantize(&scratch, &input, "OUT.safetensors", &[]).fails_with(&parts);
        run(&[&"dequantize", &input, &"--out", &scratch.path("OUT.safetensors")]).fails_with(&parts);
    }
}

/// Writes an FP8 matrix whose bf16 values are infinite at row 1, column 2, and NaN at row 3, column
/// 4.
fn beyond_bf16(scratch: &Scratch) -> PathBuf {
    let mut codes = vec![0x38; 16 * 64];
    (codes[64 + 2], codes[3 * 64 + 4]) = (0x7E, 0xFF);
    let fc = floats(&noise(16 * 64));
    scratch.write_tensors(
        "in.safetensors",
        &[
            ("fc.weight", Dtype::F32, vec![16, 64], fc),
            ("lm_head.weight", Dtype::F8_E4M3, vec![16, 64], codes),
            ("lm_head.weight_scale", Dtype::F32, vec![1], floats(&[1e36])),
        ],
    );
    scratch.path("in.safetensors")
}

#[test]
fn codes_that_stay_and_are_not_finite_in_bf16_follow_the_policy_and_are_counted() {
    let scratch = Scratch::new();
    let input = beyond_bf16(&scratch);
    let refused =
        ["lm_head.weight", "1 of its values are infinite and 1 are NaN", "row 1, column 2", "--non-finite"];
    quantize(&scratch, &input, "OUT.safetensors", &["--format", "nvfp4"]).fails_with(&refused);
    let json = scratch.path("facts.json");
    let report = scratch.path("report.html");
    for (policy, infinite, nan) in
        [("propagate", f32::INFINITY, f32::NAN), ("saturate", bf16::MAX.to_f32(), 0.0)]
    {
        let out = format!("{policy}.safetensors");
        let files = ["--json", json.to_str().unwrap(), "--report", report.to_str().unwrap()];
        let options = [&["--format", "nvfp4", "--non-finite", policy][..], &files].concat();
        let text = quantize(&scratch, &input, &out, &options).ok();
        let counts =
            |what: &str| text.lines().any(|line| line.contains(what) && line.trim_end().ends_with('1'));
        assert!(counts("NaN") && counts("infinities"), "{text}");
        let facts = read_json(json.clone());
        assert_eq!((&facts["loss"]["nan"], &facts["loss"]["infinite"]), (&json!(1), &json!(1)));
        let tensors_of = facts["tensors"].as_array().unwrap();
        let head = tensors_of.iter().find(|tensor| tensor["name"] == "lm_head.weight").unwrap();
        assert_eq!((&head["nan"], &head["infinite"]), (&json!(1), &json!(1)));
        assert!(std::fs::read_to_string(&report).unwrap().contains("infinite elements"));
        let values = super::bf16s(&tensors(&scratch.path(&out))["lm_head.weight"].2);
        let found = [values[64 + 2], values[3 * 64 + 4]].map(bf16::to_f32);
        assert!(found[0] == infinite && (found[1] == nan || found[1].is_nan() && nan.is_nan()), "{found:?}");
        assert_eq!(values.iter().filter(|value| **value == bf16::from_f32(1e36)).count(), 16 * 64 - 2);
    }
}

#[test]
fn dequantized_values_beyond_the_dtype_follow_the_policy_and_are_counted() {
    let scratch = Scratch::new();
    let values: Vec<f32> = noise(16 * 64).iter().map(|value| value * 1e5).collect();
    scratch.write_tensors("f32.safetensors", &[("a.weight", Dtype::F32, vec![16, 64], floats(&values))]);
    let fp8: [TensorData; 2] = [
        (
            "a.weight",
            Dtype::F8_E4M3,
            vec![16, 64],
            (0..16 * 64).map(|i| [0x7E, 0x38, 0xFE, 0][i % 4]).collect(),
        ),
        ("a.weight_scale", Dtype::F32, vec![1], floats(&[1e3])),
    ];
    scratch.write_tensors("fp8.safetensors", &fp8);
    for format in ["mxfp4", "nvfp4", "mxfp8-e4m3"] {
        let out = format!("{format}.safetensors");
        quantize(&scratch, &scratch.path("f32.safetensors"), &out, &["--format", format]).ok();
    }
    for name in ["mxfp4", "nvfp4", "mxfp8-e4m3", "fp8"] {
        let (input, out) = (scratch.path(format!("{name}.safetensors")), scratch.path("OUT.safetensors"));
        let back = |dtype: &str, policy: Option<&str>| {
            let _ = std::fs::remove_file(&out);
            let mut arguments: Vec<Arg<'_>> = vec![&"dequantize", &input, &"--out", &out, &"--dtype", &dtype];
            arguments.extend(policy.iter().flat_map(|policy| [&"--non-finite" as Arg<'_>, policy]));
            run(&arguments)
        };
        back("f32", None).ok();
        let exact = tensors(&out)["a.weight"].2.clone();
        let exact: Vec<f32> = exact.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let beyond = exact.iter().filter(|value| value.abs() >= 65520.0).count();
        let first = exact.iter().position(|value| value.abs() >= 65520.0).unwrap();
        assert!(beyond > 10 && beyond < exact.len(), "{name}: {beyond}");
        let place = format!("row {}, column {}", first / 64, first % 64);
        let refused = ["a.weight", &format!("{beyond} of its values are infinite"), &place, "65504"];
        back("f16", None).fails_with(&refused);
        assert!(!out.exists(), "{name}");
        for (policy, largest) in [("propagate", f32::INFINITY), ("saturate", 65504.0)] {
            let text = back("f16", Some(policy)).ok();
            let said = format!("{beyond} values are beyond f16's largest number");
            assert!(text.contains(&said), "{name}: {text}");
            let halves = &tensors(&out)["a.weight"].2;
            let halves = halves.as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32());
            for (half, exact) in halves.zip(&exact) {
                let rounded = half::f16::from_f32(*exact).to_f32();
                let expected = if rounded.is_infinite() { largest.copysign(*exact) } else { rounded };
                assert_eq!(half, expected, "{name} {policy} {exact}");
            }
        }
    }
}
