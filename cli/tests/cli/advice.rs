//! Advice in errors and findings: every command and option in it works, and solves the problem.

use std::path::Path;

use microscale_test_support::{Run, Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::gguf::{F32, entry, file, text};
use super::{floats, noise, quantize, read_json, tensors};

const UP: &str = "model.layers.0.mlp.up_proj.weight";

fn weight(name: &'static str) -> (&'static str, Dtype, Vec<usize>, Vec<u8>) {
    (name, Dtype::F32, vec![64, 64], floats(&noise(64 * 64)))
}

/// Writes a changed copy of a checkpoint with one file.
fn changed(from: &Path, scratch: &Scratch, change: impl Fn(&str, &mut Dtype, &mut Vec<usize>, &mut Vec<u8>)) {
    let all: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> = tensors(from)
        .into_iter()
        .map(|(name, (mut dtype, mut shape, mut data, _))| {
            change(&name, &mut dtype, &mut shape, &mut data);
            (&*name.leak(), dtype, shape, data)
        })
        .collect();
    scratch.write_tensors("BAD/model.safetensors", &all);
    scratch.write("BAD/config.json", read_json(from.join("config.json")).to_string());
}

/// The kinds of defects in the doctor's findings.
fn defects(path: &Path) -> Vec<String> {
    let found: Run = run(&[&"doctor", &path, &"--json", &"-"]);
    let json: Value =
        serde_json::from_str(&found.stdout).unwrap_or_else(|error| panic!("{error}: {found:#?}"));
    let all = json["findings"].as_array().unwrap().iter();
    let mut kinds: Vec<_> = all.map(|finding| finding["defect"].as_str().unwrap().to_string()).collect();
    kinds.dedup();
    kinds
}

#[test]
fn errors_propose_include_if_it_selects_a_tensor() {
    let scratch = Scratch::new();
    let input = scratch.write_tensors("norm.safetensors", &[weight("model.embed_tokens.weight")]);
    let refused = quantize(&scratch, &input, "out.safetensors", &[]);
    refused.fails_with(&["`quantize --include` selects some", "`quantize --dry-run`"]);
    run(&[&"quantize", &input, &"--dry-run"]).ok();
    quantize(&scratch, &input, "out.safetensors", &["--include", "*embed*"]).ok();

    let fp8 = [(UP, Dtype::F8_E4M3, vec![64, 64], vec![0x30; 64 * 64])];
    let input = scratch.write_tensors("fp8.safetensors", &fp8);
    let refused = quantize(&scratch, &input, "none.safetensors", &[]);
    assert!(refused.code == Some(1) && !refused.stderr.contains("--include"), "{refused:#?}");
    let refused = run(&[&"compare", &input, &"--format", &"nvfp4"]);
    assert!(refused.code == Some(1) && !refused.stderr.contains("--include"), "{refused:#?}");
}

#[test]
fn architectures_without_global_scales_are_quantized_without_one() {
    let scratch = Scratch::new();
    let mut qwen2 = Vec::new();
    text(&mut qwen2, "qwen2");
    let up = ("blk.0.ffn_up.weight".to_string(), vec![4, 64], F32, floats(&noise(256)));
    let input = scratch.write("in.gguf", file(&[entry("general.architecture", 8, &qwen2)], &[up]));
    let refused = quantize(&scratch, &input, "out.gguf", &["--format", "nvfp4"]);
    refused.fails_with(&["--global-scale none"]);
    assert!(!refused.stderr.contains("--include"), "{refused:#?}");
    quantize(&scratch, &input, "out.gguf", &["--format", "nvfp4", "--global-scale", "none"]).ok();
}

#[test]
fn weights_of_other_software_are_not_dequantized_here() {
    let scratch = Scratch::new();
    let mlx = json!({ "group_size": 64, "bits": 4, "mode": "affine" });
    let config = json!({ "model_type": "llama", "quantization": mlx, "quantization_config": mlx });
    scratch.write("MLX/config.json", config.to_string());
    scratch.write_tensors(
        "MLX/model.safetensors",
        &[
            (UP, Dtype::U32, vec![64, 8], vec![7; 64 * 8 * 4]),
            ("model.layers.0.mlp.up_proj.scales", Dtype::F32, vec![64, 1], floats(&noise(64))),
            ("model.layers.0.mlp.up_proj.biases", Dtype::F32, vec![64, 1], floats(&noise(64))),
        ],
    );
    let (input, out) = (scratch.path("MLX"), scratch.path("OUT"));
    for command in [
        run(&[&"quantize", &input, &"--out", &out]),
        run(&[&"dequantize", &input, &"--out", &out]),
        run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &out]),
    ] {
        command.fails_with(&["mlx_lm.convert --dequantize", "start from the original"]);
        assert!(!command.stderr.contains("dequantize it first"), "{command:#?}");
    }
    let found = run(&[&"doctor", &input]);
    assert!(found.code == Some(1) && found.stdout.contains("mlx_lm.convert --dequantize"), "{found:#?}");
}

#[test]
fn already_quantized_weights_are_dequantized_first() {
    let scratch = Scratch::new();
    for (format, also) in [("nvfp4", None), ("mxfp4", Some("convert --format nvfp4"))] {
        let quantized = scratch.path(format);
        quantize(&scratch, &sample(), format, &["--format", format]).ok();
        let refused = quantize(&scratch, &quantized, "AGAIN", &[]);
        refused.fails_with(&["dequantize it first", also.unwrap_or("rounds only once")]);
        assert_eq!(refused.stderr.contains("--requantize"), also.is_some(), "{refused:#?}");
        let values = scratch.path(format!("{format}-values"));
        run(&[&"dequantize", &quantized, &"--out", &values]).ok();
        quantize(&scratch, &values, &format!("{format}-again"), &["--format", format]).ok();
        run(&[&"compare", &quantized, &"--format", &"nvfp4"])
            .fails_with(&["measure the checkpoint that they were made from"]);
    }
}

#[test]
fn fp8_under_scales_is_input_of_quantize_and_dequantize() {
    let scratch = Scratch::new();
    let names = ["q", "k", "v", "o", "gate", "up", "down"];
    let mut all = Vec::new();
    for name in names {
        let name: &'static str = format!("model.layers.0.mlp.{name}.weight").leak();
        all.push((name, Dtype::F8_E4M3, vec![64, 64], vec![0x31; 64 * 64]));
        let scale: &'static str = format!("{name}_scale").leak();
        all.push((scale, Dtype::F32, vec![1], floats(&[0.1])));
    }
    let input = scratch.write_tensors("fp8.safetensors", &all);
    let doctor = run(&[&"doctor", &input]).ok();
    assert!(doctor.starts_with("no defects found in 7 quantized tensors and 0 unquantized"), "{doctor}");
    let refused = run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &scratch.path("c.safetensors")]);
    refused.fails_with(&["its 7 quantized tensors are F8_E4M3 under scales", "`quantize`", "`dequantize`"]);
    quantize(&scratch, &input, "q.safetensors", &[]).ok();
    run(&[&"dequantize", &input, &"--out", &scratch.path("d.safetensors")]).ok();
}

#[test]
fn nvfp4_possibly_from_comfyui_gets_a_warning() {
    let scratch = Scratch::new();
    let parts = |rows: usize| {
        [
            ("x.weight", Dtype::U8, vec![rows, 32], vec![0x21; rows * 32]),
            ("x.weight_scale", Dtype::F8_E4M3, vec![rows, 4], vec![0x38; rows * 4]),
            ("x.weight_scale_2", Dtype::F32, vec![], floats(&[0.01])),
        ]
    };
    let warning = "ComfyUI's without metadata cannot be told from it";
    let input = scratch.write_tensors("x.safetensors", &parts(128));
    let warned = run(&[&"dequantize", &input, &"--out", &scratch.path("d.safetensors")]);
    assert!(warned.code == Some(0) && warned.stderr.contains(warning), "{warned:#?}");
    // ComfyUI pads scales of other sizes, and a config would name the library.
    let input = scratch.write_tensors("y.safetensors", &parts(96));
    assert!(!run(&[&"inspect", &input]).stderr.contains(warning));
    scratch.write_tensors("IN/model.safetensors", &parts(128));
    scratch.write(
        "IN/config.json",
        json!({ "quantization_config": { "quant_method": "modelopt" } }).to_string(),
    );
    assert!(!run(&[&"inspect", &scratch.path("IN")]).stderr.contains(warning));
}

#[test]
fn fixes_in_findings_remove_the_defect() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "GOOD", &["--format", "nvfp4"]).ok();
    let (good, bad) = (scratch.path("GOOD"), scratch.path("BAD"));
    let convert = |out: &str| {
        run(&[&"convert", &bad, &"--to", &"compressed-tensors", &"--out", &scratch.path(out)]).ok();
        defects(&scratch.path(out))
    };
    // Convert rewrites tensors and configs for the checkpoint format.
    changed(&good, &scratch, |name, _, shape, _| {
        if name.ends_with("weight_global_scale") {
            shape.clear();
        }
    });
    assert_eq!((defects(&bad), convert("SHAPES")), (vec!["misread".to_string()], vec![]));
    changed(&good, &scratch, |_, _, _, _| ());
    let mut config = read_json(good.join("config.json"));
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["type"] = json!("int");
    scratch.write("BAD/config.json", config.to_string());
    assert_eq!((defects(&bad), convert("CONFIG")), (vec!["config".to_string()], vec![]));
    // Unequal global scales stay unequal until the values are quantized again.
    changed(&good, &scratch, |name, _, _, data| {
        if name == "model.layers.1.self_attn.q_proj.weight_global_scale" {
            *data = floats(&[1700.0]);
        }
    });
    assert_eq!(defects(&bad), ["unequal-global-scales"]);
    assert_eq!(convert("UNEQUAL"), ["unequal-global-scales"]);
    quantize(&scratch, &bad, "AGAIN", &[]).fails_with(&["quantized already"]);
    let found = run(&[&"doctor", &bad]);
    assert!(found.stdout.contains("quantize the original checkpoint again"), "{found:#?}");
    run(&[&"dequantize", &bad, &"--out", &scratch.path("VALUES")]).ok();
    quantize(&scratch, &scratch.path("VALUES"), "AGAIN", &["--format", "nvfp4"]).ok();
    assert_eq!(defects(&scratch.path("AGAIN")), [""; 0]);
}
