//! Warnings and findings about loaders that refuse an output or load it wrong.

use std::path::PathBuf;

use half::bf16;
use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{floats, noise, quantize};

/// Writes a mixture of experts.
fn mixture(scratch: &Scratch) -> PathBuf {
    let data: Vec<u8> =
        noise(32 * 64).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
    let tensors: [TensorData; 2] = [
        ("model.layers.0.mlp.experts.0.down_proj.weight", Dtype::BF16, vec![32, 64], data.clone()),
        ("model.layers.0.self_attn.o_proj.weight", Dtype::BF16, vec![32, 64], data),
    ];
    let config =
        json!({ "architectures": ["Qwen3MoeModel"], "model_type": "qwen3_moe", "dtype": "bfloat16" });
    scratch.write("IN/config.json", config.to_string());
    scratch.write_tensors("IN/model.safetensors", &tensors);
    scratch.path("IN")
}

#[test]
fn global_scales_of_experts_get_a_warning() {
    let scratch = Scratch::new();
    let input = mixture(&scratch);
    let nvfp4 = |out: &str, more: &[&str]| {
        let run = quantize(&scratch, &input, out, &[&["--format", "nvfp4"], more].concat());
        (
            run.stderr.contains("leaves out the global scales of experts")
                && run.stderr.contains("--global-scale none"),
            run,
        )
    };
    let (warned, run_) = nvfp4("OUT", &[]);
    assert!(warned, "{run_:#?}");
    run_.ok();
    let found = run(&[&"doctor", &scratch.path("OUT"), &"--json", &"-"]);
    let json: Value = serde_json::from_str(&found.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{found:#?}");
    assert_eq!(findings[0]["defect"], "expert-global-scale");
    assert_eq!(findings[0]["tensor"], "model.layers.0.mlp.experts.0.down_proj.weight");

    scratch.write(
        "r.toml",
        "format = \"nvfp4\"\n[[tensors]]\nmatch = \"*.experts.*\"\nglobal_scale = \"none\"\n",
    );
    let recipe = scratch.path("r.toml");
    for (out, more) in
        [("NONE", &["--global-scale", "none"][..]), ("RULE", &["--recipe", recipe.to_str().unwrap()])]
    {
        let (warned, run_) = nvfp4(out, more);
        assert!(!warned, "{run_:#?}");
        run_.ok();
        run(&[&"doctor", &scratch.path(out), &"--against", &input]).ok();
    }
    // Loaders of ModelOpt's files apply these global scales.
    assert!(!nvfp4("MO", &["--to", "modelopt"]).0);
    let convert = |from: &str, out: &str| {
        let run = run(&[
            &"convert",
            &scratch.path(from),
            &"--to",
            &"compressed-tensors",
            &"--out",
            &scratch.path(out),
        ]);
        run.stderr.contains("leaves out the global scales of experts")
    };
    assert!(convert("MO", "CT") && !convert("NONE", "CTNONE"));
}

#[test]
fn loaders_that_need_something_are_named_at_the_end() {
    let scratch = Scratch::new();
    let note = |out: &str, input: &PathBuf, more: &[&str]| {
        let text = quantize(&scratch, input, out, more).ok();
        text.lines().filter(|line| line.starts_with("note    ")).map(String::from).collect::<Vec<_>>()
    };
    let dense = note("A", &sample(), &["--format", "mxfp4"]);
    assert!(
        dense.len() == 1 && dense[0].contains("SGLang 0.5.23 has no mxfp4 for layers that are not experts"),
        "{dense:?}"
    );
    assert_eq!(note("B", &sample(), &["--format", "nvfp4"]), [""; 0]);
    assert_eq!(note("C", &mixture(&scratch), &["--recipe", "nvfp4-mxfp4-experts"]), [""; 0]);

    let tensors: [TensorData; 1] = [("a.weight", Dtype::F32, vec![32, 64], floats(&noise(32 * 64)))];
    for (config, dtype) in [
        (json!({ "dtype": "float32" }), Some("the model is float32")),
        (json!({ "torch_dtype": "float16" }), Some("the model is float16")),
        (json!({}), Some("the model is F32")),
        (json!({ "text_config": { "dtype": "bfloat16" } }), None),
    ] {
        let scratch = Scratch::new();
        scratch.write("IN/config.json", config.to_string());
        scratch.write_tensors("IN/model.safetensors", &tensors);
        let text = quantize(&scratch, &scratch.path("IN"), "OUT", &["--format", "nvfp4"]).ok();
        assert_eq!(text.contains("dtype=torch.bfloat16"), dtype.is_some(), "{text}");
        assert!(dtype.is_none_or(|dtype| text.contains(dtype)), "{text}");
    }
}

#[test]
fn a_preset_does_not_warn_of_its_own_patterns() {
    let scratch = Scratch::new();
    let run = quantize(&scratch, &mixture(&scratch), "OUT", &["--recipe", "nvfp4-mxfp4-experts"]);
    assert!(!run.stderr.contains("warning"), "{run:#?}");
    run.ok();
    // For a model without experts, the recipe is probably a mistake.
    let dense = quantize(&scratch, &sample(), "DENSE", &["--recipe", "nvfp4-mxfp4-experts"]);
    assert!(dense.stderr.contains("no tensor is called \"*.experts.*\""), "{dense:#?}");
}

#[test]
fn an_adapter_gets_a_warning() {
    let scratch = Scratch::new();
    let data = || floats(&noise(32 * 64));
    let tensors: [TensorData; 2] = [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", Dtype::F32, vec![32, 64], data()),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", Dtype::F32, vec![64, 32], data()),
    ];
    let input =
        scratch.write_tensors("IN/adapter_model.safetensors", &tensors).parent().unwrap().to_path_buf();
    let run = quantize(&scratch, &input, "OUT", &[]);
    assert!(
        run.stderr.contains("2 tensors are a LoRA adapter's") && run.stderr.contains("merge it"),
        "{run:#?}"
    );
    let excluded = quantize(&scratch, &input, "NONE", &["--exclude", "*.lora_*"]);
    assert!(!excluded.stderr.contains("LoRA"), "{excluded:#?}");
}

#[test]
fn other_weights_get_a_warning_and_may_be_left_out() {
    let scratch = Scratch::new();
    let input = mixture(&scratch);
    for file in
        ["PYTORCH_MODEL.BIN", "original/consolidated.00.pth", "onnx/model.onnx", "consolidated.safetensors"]
    {
        scratch.write(format!("IN/{file}"), "weights");
    }
    for file in ["training_args.bin", "tokenizer.model"] {
        scratch.write(format!("IN/{file}"), "no weights");
    }
    let warned = quantize(&scratch, &input, "ALL", &[]);
    let warning = "other files with weights are copied unchanged (28 B): PYTORCH_MODEL.BIN, consolidated.safetensors, \
                   onnx/model.onnx and 1 more; --skip-others";
    assert!(warned.stderr.contains(warning), "{warned:#?}");
    warned.ok();
    assert!(scratch.path("ALL/original/consolidated.00.pth").exists());

    let skipped = quantize(&scratch, &input, "FEW", &["--skip-others"]);
    assert!(!skipped.stderr.contains("other files"), "{skipped:#?}");
    let text = skipped.ok();
    assert!(text.contains("left out PYTORCH_MODEL.BIN: it holds other weights"), "{text}");
    let there = |file: &str| scratch.path(format!("FEW/{file}")).exists();
    assert!(there("training_args.bin") && there("tokenizer.model") && there("model.safetensors"));
    assert!(
        !there("PYTORCH_MODEL.BIN")
            && !there("original")
            && !there("onnx")
            && !there("consolidated.safetensors")
    );
    run(&[&"dequantize", &scratch.path("ALL"), &"--out", &scratch.path("BACK"), &"--skip-others"]).ok();
    assert!(!scratch.path("BACK/pytorch_model.bin").exists());
}
