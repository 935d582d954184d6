//! Codes without scales, scales without codes, and codes of unsupported libraries.

use std::path::{Path, PathBuf};

use microscale_test_support::{Arg, Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{bf16s, floats, noise, quantize, read_json, tensors};

const LAYER: &str = "model.layers.0.mlp.up_proj";

/// Elements of [`LAYER`]'s weight: 16 rows, 64 columns.
const COUNT: usize = 16 * 64;

/// Returns a tensor of [`LAYER`], with bytes that are finite in every float dtype.
fn part(name: &str, dtype: Dtype, shape: &[usize]) -> TensorData {
    let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    let name: &'static str = name.replace('X', LAYER).leak();
    (name, dtype, shape.to_vec(), vec![0x38; bytes])
}

/// Writes a model as a directory, or as a file without a config.
fn model(scratch: &Scratch, stored: &[TensorData], config: Option<Value>) -> PathBuf {
    let values = noise(4 * 64).into_iter().flat_map(|value| half::bf16::from_f32(value).to_le_bytes());
    let head: TensorData = ("lm_head.weight", Dtype::BF16, vec![4, 64], values.collect());
    let stored = [&[head], stored].concat();
    let Some(quantization) = config else { return scratch.write_tensors("IN.safetensors", &stored) };
    scratch.write_tensors("IN/model.safetensors", &stored);
    let config = json!({
        "hidden_size": 64,
        "intermediate_size": 16,
        "model_type": "qwen3",
        "quantization_config": quantization,
    });
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

/// Asserts that every command that needs values refuses a checkpoint with these words, and that
/// `inspect` and `doctor` name the tensor.
#[track_caller]
fn refused(input: &Path, scratch: &Scratch, parts: &[&str]) {
    let out = scratch.path("OUT");
    let to: [Arg<'_>; 2] = [&"--out", &out];
    for command in [
        &[&"quantize" as Arg<'_>, &input, &to[0], &to[1]][..],
        &[&"dequantize", &input, &to[0], &to[1]],
        &[&"convert", &input, &"--to", &"compressed-tensors", &to[0], &to[1]],
        &[&"compare", &input, &input],
    ] {
        run(command).fails_with(parts);
    }
    assert!(!out.exists());
    let text = run(&[&"inspect", &input]).ok();
    assert!(text.contains("cannot be read") && parts.iter().all(|part| text.contains(part)), "{text}");
    let found = run(&[&"doctor", &input, &"--json", &"-"]);
    let json: Value = serde_json::from_str(&found.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert!(found.code == Some(1) && findings.len() == 1, "{found:#?}");
    let what = findings[0]["what"].as_str().unwrap();
    assert!(findings[0]["defect"] == "unreadable" && parts.iter().all(|part| what.contains(part)), "{what}");
}

#[test]
fn codes_without_scales_are_refused_by_name() {
    let fp8 = |dtype| vec![part("X.weight", dtype, &[16, 64])];
    let method = |method: &str| Some(json!({ "quant_method": method }));
    let missing = |scales: &'static str| format!("its scales, {LAYER}{scales}, are missing");
    for (stored, config, scales) in [
        (fp8(Dtype::F8_E4M3), method("quark"), ".weight_scale"),
        (fp8(Dtype::F8_E5M2), method("quark"), ".weight_scale"),
        (fp8(Dtype::F8_E4M3FNUZ), method("quark"), ".weight_scale"),
        (fp8(Dtype::F8_E4M3), Some(json!({ "bits": 8 })), ".weight_scale"),
        (fp8(Dtype::F8_E4M3), method("fbgemm_fp8"), ".weight_scale"),
        (fp8(Dtype::F8_E5M2), method("modelopt"), ".weight_scale"),
        (fp8(Dtype::F8_E5M2), method("fp8"), ".weight_scale_inv"),
        (vec![part("X.weight", Dtype::I8, &[16, 64])], method("compressed-tensors"), ".weight_scale"),
        (vec![part("X.weight", Dtype::U8, &[16, 32])], method("modelopt"), ".weight_scale"),
        // The weight has another part, or another weight of the dtype has scales.
        (
            vec![part("X.weight", Dtype::U8, &[16, 32]), part("X.weight_scale_2", Dtype::F32, &[])],
            None,
            ".weight_scale",
        ),
        (
            vec![
                part("X.weight", Dtype::F8_E4M3, &[16, 64]),
                part("other.weight", Dtype::F8_E4M3, &[16, 64]),
                part("other.weight_scale", Dtype::F32, &[]),
            ],
            None,
            ".weight_scale",
        ),
        (vec![part("X.weight", Dtype::F4, &[16, 64])], None, ".weight_scale"),
        (vec![part("X.weight_packed", Dtype::U8, &[16, 32])], None, ".weight_scale"),
        (vec![part("X.weight_packed", Dtype::I32, &[16, 8])], None, ".weight_scale"),
        (
            vec![part("X.experts.down_proj_blocks", Dtype::U8, &[2, 16, 2, 16])],
            None,
            ".experts.down_proj_scales",
        ),
        // ComfyUI's files declare it with a tensor, or with a word for the layer.
        (
            [fp8(Dtype::F8_E4M3), vec![part("scaled_fp8", Dtype::F8_E4M3, &[0])]].concat(),
            None,
            ".scale_weight",
        ),
        (
            [
                fp8(Dtype::F8_E4M3),
                vec![(
                    "model.layers.0.mlp.up_proj.comfy_quant",
                    Dtype::U8,
                    vec![27],
                    br#"{"format": "float8_e4m3fn"}"#.to_vec(),
                )],
            ]
            .concat(),
            None,
            ".weight_scale",
        ),
    ] {
        let scratch = Scratch::new();
        let input = model(&scratch, &stored, config);
        refused(&input, &scratch, &[LAYER, &missing(scales), "complete the checkpoint"]);
    }
}

#[test]
fn scales_without_codes_are_refused_by_name() {
    let codes = [".weight", ".weight_packed", ".weight_blocks"].map(|end| format!("{LAYER}{end}"));
    for (name, dtype, shape) in [
        ("X.weight_scale", Dtype::F8_E4M3, &[16, 4][..]),
        ("X.weight_scale", Dtype::U8, &[16, 2]),
        ("X.weight_scale", Dtype::F32, &[]),
        ("X.weight_scale_inv", Dtype::F32, &[1, 1]),
        ("X.weight_global_scale", Dtype::F32, &[1]),
        ("X.weight_scale_2", Dtype::F32, &[]),
        ("X.scale", Dtype::F8_E8M0, &[16, 2]),
        ("X.scale_weight", Dtype::F32, &[]),
    ] {
        let scratch = Scratch::new();
        let input = model(&scratch, &[part(name, dtype, shape)], None);
        let codes = format!("neither {} nor {} nor {} is there", codes[0], codes[1], codes[2]);
        refused(&input, &scratch, &[&name.replace('X', LAYER), &codes, "complete the checkpoint"]);
    }
    let scratch = Scratch::new();
    let scales = part("X.experts.down_proj_scales", Dtype::U8, &[2, 16, 2]);
    let input = model(&scratch, &[scales], None);
    refused(&input, &scratch, &["experts.down_proj_scales", "experts.down_proj_blocks is there"]);
    // If several parts exist, the error names the scales.
    let scratch = Scratch::new();
    let stored =
        [part("X.weight_scale", Dtype::F8_E4M3, &[16, 4]), part("X.weight_global_scale", Dtype::F32, &[1])];
    refused(&model(&scratch, &stored, None), &scratch, &["up_proj.weight_scale: it is scales (F8_E4M3)"]);
}

#[test]
fn codes_that_are_not_understood_are_refused_by_name() {
    let gptq = vec![
        part("X.qweight", Dtype::I32, &[8, 16]),
        part("X.qzeros", Dtype::I32, &[1, 2]),
        part("X.scales", Dtype::F16, &[1, 16]),
    ];
    let nf4 = vec![
        part("X.weight", Dtype::U8, &[COUNT / 2, 1]),
        part("X.weight.absmax", Dtype::U8, &[16]),
        part("X.weight.quant_map", Dtype::F32, &[16]),
        part("X.weight.quant_state.bitsandbytes__nf4", Dtype::U8, &[80]),
    ];
    let int8 = vec![part("X.weight", Dtype::I8, &[16, 64]), part("X.SCB", Dtype::F32, &[16])];
    let mlx = vec![
        part("X.weight", Dtype::U32, &[16, 8]),
        part("X.scales", Dtype::BF16, &[16, 1]),
        part("X.biases", Dtype::BF16, &[16, 1]),
    ];
    let of = |weight: TensorData, scales: TensorData| vec![weight, scales];
    let f4 = of(part("X.weight", Dtype::F4, &[16, 64]), part("X.weight_scale", Dtype::F8_E8M0, &[16, 2]));
    let int4 = of(part("X.weight", Dtype::U8, &[8, 64]), part("X.weight_scale", Dtype::F32, &[16, 1]));
    let packed = of(part("X.weight", Dtype::I32, &[64, 2]), part("X.weight_scale", Dtype::BF16, &[1, 16]));
    let fnuz = of(part("X.weight", Dtype::F8_E4M3FNUZ, &[16, 64]), part("X.weight_scale", Dtype::F32, &[]));
    for (stored, method, words) in [
        (gptq.clone(), "gptq", "integers of GPTQ or AWQ"),
        (gptq, "awq", "qweight"),
        (nf4, "bitsandbytes", "bitsandbytes' 4-bit codes"),
        (int8, "bitsandbytes", "bitsandbytes' INT8"),
        (mlx, "mlx", "codes of MLX"),
        (vec![part("X.W_q", Dtype::U8, &[16, 32])], "hqq", "HQQ's integers"),
        (f4, "compressed-tensors", "F4 under model.layers.0.mlp.up_proj.weight_scale, scales of F8_E8M0"),
        (int4, "modelopt", "U8 under model.layers.0.mlp.up_proj.weight_scale, scales of F32"),
        (packed, "quark", "I32 under model.layers.0.mlp.up_proj.weight_scale, scales of BF16"),
        (fnuz, "quark", "F8_E4M3FNUZ under"),
    ] {
        for config in [None, Some(json!({ "quant_method": method }))] {
            let scratch = Scratch::new();
            let input = model(&scratch, &stored, config);
            let instead = "take the checkpoint that was quantized, or dequantize this one with the library";
            refused(&input, &scratch, &[stored[0].0, words, instead]);
        }
    }
}

/// Tensors whose names resemble parts, and values that are FP8 or integers.
#[test]
fn tensors_of_the_model_are_copied() {
    let stored = [
        part("X.weight", Dtype::BF16, &[16, 64]),
        // compressed-tensors leaves the scales of dequantized weights in the file.
        part("model.layers.1.mlp.up_proj.weight", Dtype::BF16, &[16, 64]),
        part("model.layers.1.mlp.up_proj.weight_scale", Dtype::F32, &[1]),
        part("model.layers.0.self_attn.k_proj.k_scale", Dtype::F32, &[]),
        part("model.layers.0.self_attn.attn.k_scale", Dtype::F32, &[]),
        part("model.layers.0.norm.scale", Dtype::BF16, &[64]),
        part("model.layers.0.layer_scale", Dtype::F32, &[64]),
        part("logit_scale", Dtype::F32, &[]),
        part("model.layers.0.hc_attn_scale", Dtype::F32, &[3]),
        part("four", Dtype::F4, &[2, 2]),
        part("table", Dtype::U8, &[4, 4]),
        part("ids.weight", Dtype::I64, &[4, 4]),
        part("cache", Dtype::F8_E5M2, &[4, 4]),
        part("model.layers.0.mlp.up_proj.bias", Dtype::F8_E4M3, &[16]),
    ];
    let scratch = Scratch::new();
    let input = model(&scratch, &stored, None);
    quantize(&scratch, &input, "Q.safetensors", &["--exclude", "*.layers.1.*"]).ok();
    let (before, after) = (tensors(&input), tensors(&scratch.path("Q.safetensors")));
    for (name, (dtype, shape, bytes, _)) in
        before.iter().filter(|(name, _)| !name.contains("0.mlp.up_proj.w"))
    {
        let found = &after[name];
        assert!((dtype, shape, bytes) == (&found.0, &found.1, &found.2), "{name}");
    }
    run(&[&"compare", &input, &input]).ok();
    let text = run(&[&"inspect", &input]).ok();
    assert!(!text.contains("cannot be read"), "{text}");
    run(&[&"doctor", &input]).fails_with(&["is unquantized"]);
}

#[test]
fn plain_fp8_layers_are_copied_and_ignored() {
    let stored = [
        part("X.weight", Dtype::BF16, &[16, 64]),
        part("model.layers.1.mlp.up_proj.weight", Dtype::F8_E4M3, &[16, 64]),
        part("model.layers.1.mlp.down_proj.weight", Dtype::F8_E5M2, &[16, 64]),
        part("model.embed_tokens.weight", Dtype::F8_E4M3, &[16, 64]),
    ];
    let scratch = Scratch::new();
    scratch.write_tensors("IN/model.safetensors", &stored);
    scratch.write("IN/config.json", json!({ "model_type": "qwen3" }).to_string());
    for format in ["nvfp4", "mxfp4"] {
        quantize(&scratch, &scratch.path("IN"), format, &["--format", format]).ok();
        let after = tensors(&scratch.path(format));
        assert_eq!(after["model.layers.1.mlp.up_proj.weight"].0, Dtype::F8_E4M3);
        let config = read_json(scratch.path(format).join("config.json"));
        // The head of Qwen3 may be tied to the embedding.
        let ignore = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"];
        assert_eq!(config["quantization_config"]["ignore"], json!(ignore));
    }
}

/// An embedding that is cast without scales is not a linear layer.
#[test]
fn plain_fp8_beside_scaled_layers_is_allowed_for_other_roles() {
    let stored = [
        part("X.weight", Dtype::F8_E4M3, &[16, 64]),
        part("X.weight_scale", Dtype::F32, &[]),
        part("model.embed_tokens.weight", Dtype::F8_E4M3, &[16, 64]),
        part("model.norm.weight", Dtype::F8_E4M3, &[64]),
    ];
    let scratch = Scratch::new();
    let input = model(&scratch, &stored, None);
    let out = scratch.path("OUT.safetensors");
    run(&[&"dequantize", &input, &"--out", &out]).ok();
    assert_eq!(tensors(&out)["model.embed_tokens.weight"].0, Dtype::F8_E4M3);
}

#[test]
fn comfyuis_fp8_with_scale_weight_is_read() {
    for (dtype, number) in [(Dtype::F8_E4M3, 1.0), (Dtype::F8_E5M2, 0.5)] {
        let scale = |name: &'static str| -> TensorData { (name, Dtype::F32, vec![], floats(&[0.25])) };
        let layer = "model.diffusion_model.double_blocks.0.img_attn.qkv";
        let weight = |name: &str| part(&format!("{name}.weight"), dtype, &[16, 64]);
        let stored = [
            weight(layer),
            scale("model.diffusion_model.double_blocks.0.img_attn.qkv.scale_weight"),
            scale("model.diffusion_model.double_blocks.0.img_attn.qkv.scale_input"),
            part("model.diffusion_model.scaled_fp8", dtype, &[2]),
            part("model.diffusion_model.img_in.weight", Dtype::BF16, &[16, 64]),
            // Its name shows that it belongs to another model in the file.
            weight("text_encoders.t5.layer.0.wi"),
            scale("text_encoders.t5.layer.0.wi.scale_weight"),
            part("text_encoders.t5.scaled_fp8", dtype, &[0]),
        ];
        let scratch = Scratch::new();
        let input = scratch.write_tensors("IN.safetensors", &stored);
        let out = scratch.path("OUT.safetensors");
        run(&[&"dequantize", &input, &"--dtype", &"bf16", &"--out", &out]).ok();
        let back = tensors(&out);
        let names = [
            &format!("{layer}.weight"),
            "model.diffusion_model.img_in.weight",
            "text_encoders.t5.layer.0.wi.weight",
        ];
        assert!(back.keys().eq(names), "{:?}", back.keys());
        for name in [names[0], names[2]] {
            let values = bf16s(&back[name].2);
            assert!(
                values.len() == COUNT && values.iter().all(|value| value.to_f32() == number * 0.25),
                "{name}"
            );
        }
        run(&[&"doctor", &input]).ok();
    }
}

#[test]
fn e5m2_under_scales_has_values() {
    let scratch = Scratch::new();
    let stored = [
        part("a.weight", Dtype::F8_E5M2, &[4, 32]),
        ("a.weight_scale", Dtype::F32, vec![4, 1], floats(&[1.0, 3.0, 0.5, 0.0])),
        part("b.weight", Dtype::F8_E5M2, &[4, 32]),
        ("b.weight_scale", Dtype::U8, vec![4, 1], vec![127, 128, 126, 0]),
    ];
    let input = scratch.write_tensors("x.safetensors", &stored);
    let out = scratch.path("OUT.safetensors");
    run(&[&"dequantize", &input, &"--dtype", &"f32", &"--out", &out]).ok();
    let back = tensors(&out);
    // The code 0x38 is 0.5.
    let expected = |scales: [f32; 4]| floats(&scales.map(|scale| [0.5 * scale; 32]).concat());
    assert_eq!(back["a.weight"].2, expected([1.0, 3.0, 0.5, 0.0]));
    assert_eq!(back["b.weight"].2, expected([1.0, 2.0, 0.5, 2f32.powi(-127)]));
    assert_eq!(back.len(), 2);
}
