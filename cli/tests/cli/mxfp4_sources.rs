//! Published MXFP4: DeepSeek-V4's experts with block FP8 layers, AMD Quark's, and Kimi's.

use std::path::PathBuf;

use half::bf16;
use microscale::formats::{E2m1, E4m3, E8m0};
use microscale_test_support::{Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::parts::files;
use super::{floats, noise, quantize, read_json, tensors};

const ROWS: usize = 192;
const COLS: usize = 256;

/// Returns 4-bit codes, two per byte, and scales of blocks of 32 that NVFP4 can represent.
fn expert(seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let codes = (0..ROWS * COLS / 2).map(|_| random.u8(..)).collect();
    (codes, (0..ROWS * COLS / 32).map(|_| random.u8(112..124)).collect())
}

/// Returns finite codes of E4M3, and scales of 128x128 blocks.
fn dense(seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let codes = (0..ROWS * COLS).map(|_| random.u8(..0x7F) | random.u8(..2) << 7).collect();
    (codes, (0..4).map(|_| random.u8(110..120)).collect())
}

fn values_of_expert(seed: u64) -> Vec<f32> {
    let (codes, scales) = expert(seed);
    let value = |i: usize| {
        let code = E2m1::from_bits(codes[i / 2] >> (4 * (i % 2)) & 0xF);
        code.to_f32() * E8m0::from_bits(scales[i / 32]).to_f32()
    };
    (0..ROWS * COLS).map(value).collect()
}

fn values_of_dense(seed: u64) -> Vec<f32> {
    let (codes, scales) = dense(seed);
    let value = |i: usize| {
        let block = i / COLS / 128 * 2 + i % COLS / 128;
        E4m3::from_bits(codes[i]).to_f32() * E8m0::from_bits(scales[block]).to_f32()
    };
    (0..ROWS * COLS).map(value).collect()
}

const EXPERTS: [(&str, u64); 3] =
    [("layers.1.ffn.experts.0.w1", 1), ("layers.1.ffn.experts.0.w3", 2), ("layers.1.ffn.experts.5.w2", 3)];
const DENSE: (&str, u64) = ("layers.1.attn.wq_a", 4);

/// Writes a model in DeepSeek-V4's format, in two shards.
fn deepseek(scratch: &Scratch) -> PathBuf {
    let mut shards: [Vec<TensorData>; 2] = [Vec::new(), Vec::new()];
    for (shard, (layer, seed)) in EXPERTS.into_iter().enumerate() {
        let (codes, scales) = expert(seed);
        let [weight, scale] = ["weight", "scale"].map(|end| &*format!("{layer}.{end}").leak());
        shards[shard % 2].push((weight, Dtype::I8, vec![ROWS, COLS / 2], codes));
        shards[(shard + 1) % 2].push((scale, Dtype::F8_E8M0, vec![ROWS, COLS / 32], scales));
    }
    let (codes, scales) = dense(DENSE.1);
    shards[0].push(("layers.1.attn.wq_a.weight", Dtype::F8_E4M3, vec![ROWS, COLS], codes));
    shards[1].push(("layers.1.attn.wq_a.scale", Dtype::F8_E8M0, vec![2, 2], scales));
    let halves = noise(64 * COLS).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes());
    shards[0].push(("head.weight", Dtype::BF16, vec![64, COLS], halves.collect()));
    shards[1].push(("layers.1.hc_attn_scale", Dtype::F32, vec![3], floats(&[1.0, 2.0, 3.0])));
    let mut entries = Vec::new();
    for (name, shard) in ["a.safetensors", "b.safetensors"].into_iter().zip(&shards) {
        scratch.write_tensors(format!("IN/{name}"), shard);
        entries.extend(shard.iter().map(|(tensor, ..)| (*tensor, name)));
    }
    scratch.write_index("IN", &entries);
    let config = json!({
        "architectures": ["DeepseekV4ForCausalLM"],
        "expert_dtype": "fp4",
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    });
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

/// Returns a layer's weight by the name of its module.
fn weight(layer: &str) -> String {
    format!("{layer}.weight")
}

#[test]
fn deepseeks_experts_are_read() {
    let scratch = Scratch::new();
    let input = deepseek(&scratch);
    let text = run(&[&"inspect", &input]).ok();
    assert!(text.contains("6 tensors in 2 files, 4 of them quantized"), "{text}");
    assert!(text.contains("mxfp4 192×256") && text.contains("F8_E8M0 for 128×128"), "{text}");
    run(&[&"doctor", &input]).ok();
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("F32")]).ok();
    let back = tensors(&scratch.path("F32"));
    assert_eq!(back.len(), 6, "{:?}", back.keys());
    for (layer, seed) in EXPERTS {
        assert_eq!(back[&weight(layer)].2, floats(&values_of_expert(seed)), "{layer}");
        assert_eq!(back[&weight(layer)].1, [ROWS, COLS]);
    }
    assert_eq!(back[&weight(DENSE.0)].2, floats(&values_of_dense(DENSE.1)));
    let text = run(&[&"compare", &input, &scratch.path("F32")]).ok();
    let total = text.lines().find(|line| line.starts_with("total")).unwrap_or_default();
    assert!(total.split_whitespace().eq(["total", "0", "∞", "0", "1.000000"]), "{text}");
}

#[test]
fn quantizing_is_that_of_the_values() {
    let scratch = Scratch::new();
    let input = deepseek(&scratch);
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("F32")]).ok();
    for (options, files) in [
        (&["--format", "nvfp4"][..], "compressed-tensors"),
        (&["--format", "mxfp4"], "compressed-tensors"),
        (&["--format", "nvfp4", "--to", "modelopt", "--exclude", "*.wq_a.*"], "modelopt"),
    ] {
        let (out, other) = (format!("Q{}", options.concat()), format!("F{}", options.concat()));
        quantize(&scratch, &input, &out, options).ok();
        quantize(&scratch, &scratch.path("F32"), &other, options).ok();
        let (ours, expected) = (tensors(&scratch.path(&out)), tensors(&scratch.path(&other)));
        assert!(ours.keys().eq(expected.keys()), "{:?} and {:?}", ours.keys(), expected.keys());
        for (name, (dtype, shape, data, _)) in &ours {
            // Unquantized tensors become bf16. The expected ones are f32.
            if *dtype != Dtype::BF16 {
                assert_eq!((shape, data), (&expected[name].1, &expected[name].2), "{options:?}: {name}");
            }
        }
        let config = read_json(scratch.path(&out).join("config.json"));
        assert_eq!(config["quantization_config"]["quant_method"], files);
        let doctor = run(&[&"doctor", &scratch.path(&out), &"--against", &input]);
        assert!(!doctor.stdout.contains("other-values"), "{}", doctor.stdout);
    }
    // Quantizing MXFP4 to MXFP4 keeps all values: a block's amax of 4 or 6 gives the same scale, a
    // smaller amax at most half of it.
    run(&[
        &"dequantize",
        &scratch.path("Q--formatmxfp4"),
        &"--dtype",
        &"f32",
        &"--out",
        &scratch.path("AGAIN"),
    ])
    .ok();
    let again = tensors(&scratch.path("AGAIN"));
    for (layer, seed) in EXPERTS {
        let back: Vec<f32> = bytemuck::pod_collect_to_vec(&again[&weight(layer)].2);
        assert_eq!(back, values_of_expert(seed), "{layer}");
    }
    for part in ["1/2", "2/2"] {
        quantize(&scratch, &input, "OUT", &["--format", "nvfp4", "--part", part]).ok();
    }
    run(&[&"merge", &input, &"--out", &scratch.path("OUT")]).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("Q--formatnvfp4")));
}

#[test]
fn converting_is_exact() {
    let scratch = Scratch::new();
    let input = deepseek(&scratch);
    for (to, format) in
        [("compressed-tensors", None), ("compressed-tensors", Some("nvfp4")), ("modelopt", Some("nvfp4"))]
    {
        let out = scratch.path(format!("{to}{}", format.unwrap_or_default()));
        let more = format.map(|format| ["--format", format]).into_iter().flatten();
        let mut arguments =
            vec!["convert", input.to_str().unwrap(), "--to", to, "--out", out.to_str().unwrap()];
        arguments.extend(more);
        let text = run(&arguments.iter().map(|word| word as _).collect::<Vec<_>>()).ok();
        assert!(
            text.contains("3 tensors have the same values to the bit") && text.contains("in bf16"),
            "{text}"
        );
        let stored = tensors(&out);
        assert_eq!(stored[&weight(DENSE.0)].0, Dtype::BF16);
        assert!(stored.keys().all(|name| !name.ends_with(".scale")), "{:?}", stored.keys());
        if format.is_none() {
            for (layer, seed) in EXPERTS {
                let (codes, scales) = expert(seed);
                assert_eq!(stored[&format!("{layer}.weight_packed")].2, codes);
                assert_eq!(stored[&format!("{layer}.weight_scale")].2, scales);
                assert_eq!(stored[&format!("{layer}.weight_scale")].0, Dtype::U8);
            }
        }
        let back = scratch.path("BACK");
        run(&[&"dequantize", &out, &"--dtype", &"f32", &"--out", &back]).ok();
        let values = tensors(&back);
        for (layer, seed) in EXPERTS {
            assert_eq!(values[&weight(layer)].2, floats(&values_of_expert(seed)), "{to} {format:?} {layer}");
        }
        let exact: Vec<u8> =
            values_of_dense(DENSE.1).iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        assert_eq!(stored[&weight(DENSE.0)].2, exact);
        std::fs::remove_dir_all(&back).unwrap();
        let config = read_json(out.join("config.json"));
        let quantization = &config["quantization_config"];
        assert_eq!(quantization["quant_method"], to);
        // Names of the file, and of transformers' modules.
        let modules = ["head", "layers.1.attn.wq_a", "lm_head", "model.layers.1.self_attn.q_a_proj"];
        assert_eq!(quantization["ignore"], json!(modules), "{config}");
        // The only finding is that transformers loads NVFP4 experts wrong.
        let doctor = run(&[&"doctor", &out, &"--against", &input]);
        let known = to == "compressed-tensors" && format.is_some();
        assert_eq!(doctor.code, Some(i32::from(known)), "{}", doctor.stdout);
    }
    for to in ["deepseek", "quark"] {
        run(&[&"convert", &input, &"--to", &to, &"--out", &scratch.path("NO")]).fails_with(&[
            to,
            "read and not written",
            "compressed-tensors",
        ]);
        let refused = quantize(&scratch, &input, "NO", &["--to", to]);
        assert!(refused.code == Some(2) && refused.stderr.contains("read and not written"), "{refused:?}");
    }
    run(&[&"convert", &input, &"--to", &"gpt-oss", &"--out", &scratch.path("NO")]).fails_with(&[
        "layers.1.ffn.experts.0.w1",
        "transpose",
        "--to gpt-oss",
    ]);
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let codes: TensorData = ("a.weight", Dtype::I8, vec![4, 32], vec![0x21; 128]);
    for (dtype, shape) in [(Dtype::F8_E8M0, vec![4, 1]), (Dtype::F8_E8M0, vec![2, 2]), (Dtype::U8, vec![8])] {
        let scratch = Scratch::new();
        let data = vec![127; shape.iter().product()];
        let file = scratch.write_tensors("x.safetensors", &[codes.clone(), ("a.scale", dtype, shape, data)]);
        quantize(&scratch, &file, "OUT", &[]).fails_with(&[
            "x.safetensors",
            "a.weight",
            "[4, 32]",
            "mxfp4 blocks of 32",
        ]);
    }
    // FP8 with scales other than powers of two has values that bf16 cannot represent.
    let scratch = Scratch::new();
    let scale: TensorData = ("b.weight_scale_inv", Dtype::F32, vec![1, 1], floats(&[0.3]));
    let fp8: TensorData = ("b.weight", Dtype::F8_E4M3, vec![32, 64], vec![0x31; 2048]);
    let experts: TensorData = ("a.scale", Dtype::F8_E8M0, vec![4, 2], vec![127; 8]);
    let file = scratch.write_tensors("x.safetensors", &[codes, experts, fp8, scale]);
    run(&[&"convert", &file, &"--to", &"compressed-tensors", &"--out", &scratch.path("OUT")]).fails_with(&[
        "x.safetensors",
        "b.weight",
        "no powers of two",
    ]);
}

/// Writes a file of one layer, with a config that names its method.
fn layer(scratch: &Scratch, method: &str, stored: &[TensorData]) -> PathBuf {
    scratch.write_tensors("IN/model.safetensors", stored);
    let config: Value = json!({ "quantization_config": { "quant_method": method } });
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

#[test]
fn quarks_is_read_and_converted() {
    let scratch = Scratch::new();
    let (codes, scales) = expert(9);
    let stored: [TensorData; 2] = [
        ("model.layers.0.mlp.experts.3.up_proj.weight", Dtype::U8, vec![ROWS, COLS / 2], codes.clone()),
        (
            "model.layers.0.mlp.experts.3.up_proj.weight_scale",
            Dtype::U8,
            vec![ROWS, COLS / 32],
            scales.clone(),
        ),
    ];
    let input = layer(&scratch, "quark", &stored);
    run(&[&"doctor", &input]).ok();
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("F32")]).ok();
    let name = "model.layers.0.mlp.experts.3.up_proj.weight";
    assert_eq!(tensors(&scratch.path("F32"))[name].2, floats(&values_of_expert(9)));
    run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &scratch.path("CT")]).ok();
    let converted = tensors(&scratch.path("CT"));
    assert_eq!(converted[&format!("{name}_packed")].2, codes);
    assert_eq!(converted[&format!("{name}_scale")].2, scales);
    quantize(&scratch, &input, "Q", &["--format", "nvfp4"]).ok();
    quantize(&scratch, &scratch.path("F32"), "F", &["--format", "nvfp4"]).ok();
    let (ours, expected) = (tensors(&scratch.path("Q")), tensors(&scratch.path("F")));
    assert!(!ours.is_empty() && ours == expected, "{:?}", ours.keys());
}

#[test]
fn kimis_is_quantized_again_if_that_is_wanted() {
    let scratch = Scratch::new();
    let (codes, scales) = expert(9);
    let stored: [TensorData; 2] = [
        ("model.layers.0.mlp.experts.3.up_proj.weight_packed", Dtype::U8, vec![ROWS, COLS / 2], codes),
        ("model.layers.0.mlp.experts.3.up_proj.weight_scale", Dtype::U8, vec![ROWS, COLS / 32], scales),
    ];
    let input = layer(&scratch, "compressed-tensors", &stored);
    quantize(&scratch, &input, "Q", &["--format", "nvfp4"]).fails_with(&[
        "quantized already",
        "convert --format nvfp4",
        "--requantize",
    ]);
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &scratch.path("F32")]).ok();
    quantize(&scratch, &input, "Q", &["--format", "nvfp4", "--requantize"]).ok();
    quantize(&scratch, &scratch.path("F32"), "F", &["--format", "nvfp4"]).ok();
    let (ours, expected) = (tensors(&scratch.path("Q")), tensors(&scratch.path("F")));
    assert!(!ours.is_empty() && ours == expected, "{:?}", ours.keys());
    let text = quantize(&scratch, &input, "KEPT", &["--requantize", "--exclude", "*"]);
    text.fails_with(&["no tensor to quantize"]);
    quantize(&scratch, &input, "OUT", &["--format", "nvfp4", "--requantize", "--part", "1/1"]).ok();
    run(&[&"merge", &input, &"--out", &scratch.path("OUT")]).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("Q")));
    // NVFP4 cannot represent it.
    quantize(&scratch, &scratch.path("Q"), "AGAIN", &["--requantize"]).fails_with(&["quantized already"]);
}

#[test]
fn integers_of_four_bits_are_refused_by_name() {
    let scratch = Scratch::new();
    let stored: [TensorData; 3] = [
        ("a.experts.0.up_proj.weight_packed", Dtype::I32, vec![8, 4], vec![0x88; 128]),
        ("a.experts.0.up_proj.weight_scale", Dtype::BF16, vec![8, 1], vec![0; 16]),
        ("a.experts.0.up_proj.weight_shape", Dtype::I32, vec![2], vec![8, 0, 0, 0, 32, 0, 0, 0]),
    ];
    let input = layer(&scratch, "compressed-tensors", &stored);
    let parts = ["model.safetensors", "a.experts.0.up_proj.weight_packed", "INT4", "Kimi-K2-Thinking"];
    quantize(&scratch, &input, "OUT", &[]).fails_with(&parts);
    run(&[&"dequantize", &input, &"--out", &scratch.path("OUT")]).fails_with(&parts);
    let text = run(&[&"inspect", &input]).ok();
    assert!(text.contains("cannot be read") && text.contains("pack-quantized"), "{text}");
}

#[test]
fn experts_become_block_fp8_beside_layers_that_are() {
    let scratch = Scratch::new();
    let (input, out, back) = (deepseek(&scratch), scratch.path("FP8"), scratch.path("BACK"));
    let text = run(&[&"convert", &input, &"--to", &"fp8-block", &"--out", &out]).ok();
    assert!(text.contains("3 of them were cast to fp8-block"), "{text}");
    let stored = tensors(&out);
    assert_eq!(stored.len(), 2 * 4 + 2, "{:?}", stored.keys());
    let layers = EXPERTS.map(|(layer, seed)| (layer, values_of_expert(seed)));
    for (layer, values) in layers.into_iter().chain([(DENSE.0, values_of_dense(DENSE.1))]) {
        let (dtype, shape, codes, _) = &stored[&weight(layer)];
        let (scale_dtype, scale_shape, scales, _) = &stored[&format!("{layer}.weight_scale_inv")];
        assert_eq!((*dtype, &shape[..]), (Dtype::F8_E4M3, &[ROWS, COLS][..]));
        assert_eq!((*scale_dtype, &scale_shape[..]), (Dtype::F32, &[2, 2][..]));
        for (i, value) in values.iter().enumerate() {
            let block = i / COLS / 128 * 2 + i % COLS / 128;
            let scale = f32::from_le_bytes(scales[4 * block..][..4].try_into().unwrap());
            let read = E4m3::from_bits(codes[i]).to_f32() * scale;
            assert_eq!(read.to_bits(), value.to_bits(), "{layer} {i}");
        }
    }
    assert_eq!(stored[&weight(DENSE.0)].2, dense(DENSE.1).0);
    let config = read_json(out.join("config.json"));
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], "fp8");
    assert_eq!(quantization["weight_block_size"], json!([128, 128]));
    assert_eq!(quantization["modules_to_not_convert"], json!(["head", "lm_head"]), "{config}");
    run(&[&"doctor", &out]).ok();
    run(&[&"dequantize", &out, &"--dtype", &"f32", &"--out", &back]).ok();
    for (layer, seed) in EXPERTS {
        assert_eq!(tensors(&back)[&weight(layer)].2, floats(&values_of_expert(seed)), "{layer}");
    }
    let no = scratch.path("NO");
    run(&[&"convert", &input, &"--to", &"fp8-block", &"--format", &"nvfp4", &"--out", &no]).fails_with(&[
        "fp8-block",
        "no nvfp4",
        "leave the format out",
    ]);
    let refused = quantize(&scratch, &input, "NO", &["--to", "fp8-block"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("convert alone writes it"), "{refused:?}");
    // 128x128 blocks with the extremes of E2M1, and scales that are 2^14 and 2^15 apart.
    for (apart, exact) in [(14, true), (15, false)] {
        let scales: Vec<u8> = (0..256 * 6).map(|i| 100 + if i == 3 { apart } else { 0 }).collect();
        let codes = ("a.weight_packed", Dtype::U8, vec![256, 96], vec![0x71; 256 * 96]);
        let scales = ("a.weight_scale", Dtype::U8, vec![256, 6], scales);
        let input = scratch.write_tensors("ct.safetensors", &[codes, scales]);
        let ran = run(&[
            &"convert",
            &input,
            &"--to",
            &"fp8-block",
            &"--out",
            &scratch.path(format!("{apart}.safetensors")),
        ]);
        if exact {
            ran.ok();
        } else {
            ran.fails_with(&["ct.safetensors", "a.weight", "1 of 4 blocks of 128×128", "--requantize"]);
        }
    }
}
