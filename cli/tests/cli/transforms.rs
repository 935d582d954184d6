//! Checkpoints with rotated weights and activations, in compressed-tensors' and Quark's formats.

use std::path::PathBuf;

use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{floats, noise, quantize, read_json, tensors};

/// Returns a group of transforms with modules at each of these locations.
fn group(locations: &[&str]) -> Value {
    let apply = locations.iter().map(|location| json!({ "targets": ["Linear"], "location": location }));
    json!({ "type": "hadamard", "head_dim": 64, "apply": apply.collect::<Vec<_>>() })
}

fn config_of(groups: Value) -> Value {
    json!({ "config_groups": groups })
}

/// Writes the sample in MXFP4 or NVFP4, with an entry of transforms in its config.
fn transformed(scratch: &Scratch, format: &str, transforms: &Value) -> PathBuf {
    quantize(scratch, &sample(), "IN", &["--format", format]).ok();
    let mut config = read_json(scratch.path("IN/config.json"));
    config["quantization_config"]["transform_config"] = transforms.clone();
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

/// Returns llm-compressor's transforms, with the words that errors use.
fn transforms() -> Vec<(Value, &'static str)> {
    let spinquant =
        json!({ "R1": group(&["weight_output", "weight_input"]), "R4": group(&["input", "weight_input"]) });
    vec![
        (config_of(spinquant), "transform_config (input, weight_input, weight_output)"),
        (config_of(json!({ "u": group(&["output"]) })), "transform_config (output)"),
        (config_of(json!({ "R3": group(&["q_attn", "k_cache"]) })), "transform_config (k_cache, q_attn)"),
        (config_of(json!({ "R2": group(&["weight_output"]) })), "remove transform_config from the file"),
        // compressed-tensors before 0.11, and entries unknown to every version.
        (json!({ "transform_groups": { "v": group(&["input"]) } }), "transform_config (input)"),
        (config_of(json!({ "v": { "type": "hadamard" } })), "transform_config says"),
        (json!(["hadamard"]), "transform_config says"),
    ]
}

#[test]
fn transforms_are_kept_or_refused_by_name() {
    for (config, words) in transforms() {
        let scratch = Scratch::new();
        let input = transformed(&scratch, "mxfp4", &config);
        let out = scratch.path("OUT");
        let parts = ["config.json", words, "start from the checkpoint before the transform"];
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        for more in [&[][..], &["--requantize"]] {
            quantize(&scratch, &input, "OUT", more).fails_with(&parts);
        }
        for to in ["modelopt", "fp8-block", "comfyui", "gpt-oss"] {
            run(&[&"convert", &input, &"--to", &to, &"--out", &out]).fails_with(&[words, to]);
        }
        run(&[&"compare", &input, &sample()])
            .fails_with(&["transform_config", "compare checkpoints with the same"]);
        run(&[&"doctor", &input, &"--against", &sample()]).fails_with(&["transform_config"]);
        assert!(!out.exists());
        for more in [&[][..], &["--format", "nvfp4"]] {
            let mut command = microscale_test_support::command(&[
                &"convert",
                &input,
                &"--to",
                &"compressed-tensors",
                &"--out",
                &out,
            ]);
            command.args(more);
            microscale_test_support::Run::new(command).ok();
            assert_eq!(read_json(out.join("config.json"))["quantization_config"]["transform_config"], config);
            run(&[&"compare", &input, &out]).ok();
            std::fs::remove_dir_all(&out).unwrap();
        }
        run(&[&"inspect", &input]).ok();
    }
}

#[test]
fn empty_transforms_are_none() {
    let nothing = json!({ "type": "hadamard", "apply": [] });
    for config in [
        Value::Null,
        json!({}),
        config_of(Value::Null),
        config_of(json!({})),
        config_of(json!({ "u": nothing })),
    ] {
        let scratch = Scratch::new();
        let input = transformed(&scratch, "nvfp4", &config);
        run(&[&"doctor", &input, &"--against", &sample()]).ok();
        run(&[&"dequantize", &input, &"--out", &scratch.path("BACK")]).ok();
        run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &scratch.path("OUT")]).ok();
    }
}

/// Older configs nest the entry, or have it under another key or in the text model's config.
#[test]
fn transforms_are_found_wherever_loaders_look() {
    let transforms = config_of(json!({ "v": group(&["input", "weight_input"]) }));
    let quantization = json!({ "quant_method": "compressed-tensors", "transform_config": transforms });
    for config in [
        json!({ "compression_config": quantization }),
        json!({ "text_config": { "quantization_config": quantization } }),
        json!({ "quantization_config": { "quant_method": "compressed-tensors", "quantization_config": quantization } }),
    ] {
        let scratch = Scratch::new();
        transformed(&scratch, "mxfp4", &json!({}));
        scratch.write("IN/config.json", config.to_string());
        let (input, out) = (scratch.path("IN"), scratch.path("OUT"));
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&["transform_config (input, weight_input)"]);
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &out]).ok();
        assert_eq!(read_json(out.join("config.json"))["quantization_config"]["transform_config"], transforms);
    }
}

/// An unquantized transformed model, and an FP8 one, which would otherwise be quantized again.
#[test]
fn rotated_floats_and_fp8_are_not_quantized() {
    let transforms = config_of(json!({ "v": group(&["input", "weight_input"]) }));
    let config = json!({ "quantization_config": { "quant_method": "compressed-tensors", "transform_config": transforms } });
    let float: TensorData = ("a.fc.weight", Dtype::F32, vec![16, 64], floats(&noise(16 * 64)));
    let fp8: TensorData = ("a.fc.weight", Dtype::F8_E4M3, vec![16, 64], vec![0x38; 16 * 64]);
    let scale: TensorData = ("a.fc.weight_scale", Dtype::F32, vec![1], floats(&[0.5]));
    for stored in [vec![float], vec![fp8, scale]] {
        let scratch = Scratch::new();
        scratch.write_tensors("IN/model.safetensors", &stored);
        scratch.write("IN/config.json", config.to_string());
        quantize(&scratch, &scratch.path("IN"), "OUT", &[])
            .fails_with(&["transform_config", "quantizing would lose"]);
    }
}

/// A transform of activations is a finding, because transformers ignores it. Its tensor is no
/// layer.
#[test]
fn doctor_names_transforms_of_activations_and_knows_their_tensors() {
    for (locations, found) in [
        (&["input", "weight_input"][..], 1),
        (&["output", "input", "output"], 2),
        (&["weight_input", "weight_output"], 0),
        (&["q_attn", "k_cache"], 0),
    ] {
        let scratch = Scratch::new();
        quantize(&scratch, &sample(), "Q", &["--format", "nvfp4"]).ok();
        let name = format!("model.layers.0.mlp.down_proj.R4_{}.weight", locations[0]);
        let mut stored: Vec<TensorData> = tensors(&scratch.path("Q"))
            .into_iter()
            .map(|(name, (dtype, shape, data, _))| (&*name.leak(), dtype, shape, data))
            .collect();
        stored.push((name.clone().leak(), Dtype::F32, vec![64, 64], floats(&noise(64 * 64))));
        let mut config = read_json(scratch.path("Q/config.json"));
        config["quantization_config"]["transform_config"] = config_of(json!({ "R4": group(locations) }));
        scratch.write_tensors("IN/model.safetensors", &stored);
        scratch.write("IN/config.json", config.to_string());
        let input = scratch.path("IN");
        let diagnosis = run(&[&"doctor", &input, &"--json", &"-"]);
        let json: Value = serde_json::from_str(&diagnosis.stdout).unwrap();
        let findings = json["findings"].as_array().unwrap();
        assert_eq!(findings.len(), found, "{findings:#?}");
        assert!(findings.iter().all(|finding| finding["defect"] == "transform"), "{findings:#?}");
        let out = scratch.path("OUT");
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &out]).ok();
        assert_eq!(tensors(&out)[&name].2, floats(&noise(64 * 64)));
        let ignore = read_json(out.join("config.json"))["quantization_config"]["ignore"].to_string();
        assert!(!ignore.contains("R4"), "{ignore}");
    }
}

#[test]
fn quarks_rotations_of_inputs_are_refused_by_name() {
    for name in ["a.up_proj.input_rotation", "a.up_proj.input_prescale", "shared_input_rotation_64"] {
        let scratch = Scratch::new();
        let stored: [TensorData; 3] = [
            ("a.up_proj.weight", Dtype::U8, vec![16, 32], vec![0x21; 16 * 32]),
            ("a.up_proj.weight_scale", Dtype::U8, vec![16, 2], vec![120; 32]),
            (name, Dtype::I8, vec![64, 64], vec![1; 64 * 64]),
        ];
        let input = scratch.write_tensors("x.safetensors", &stored);
        let out = scratch.path("OUT.safetensors");
        let parts = [name, "start from the checkpoint before the transform"];
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        quantize(&scratch, &input, "OUT.safetensors", &[]).fails_with(&parts);
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &out]).fails_with(&parts);
        run(&[&"compare", &input, &input]).ok();
        run(&[&"doctor", &input]).ok();
    }
}
