//! Effects of config.json's `model_type`: the quantized weights, and the names of exempt layers.

use std::path::PathBuf;

use half::bf16;
use microscale_test_support::{Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{noise, quantize, read_json, tensors};

/// Writes a checkpoint of weights with these names and shapes.
fn checkpoint(scratch: &Scratch, config: &Value, weights: &[(&'static str, &[usize])]) -> PathBuf {
    let data = |shape: &[usize]| {
        noise(shape.iter().product())
            .into_iter()
            .flat_map(|value| bf16::from_f32(value).to_le_bytes())
            .collect()
    };
    let tensors: Vec<TensorData> =
        weights.iter().map(|(name, shape)| (*name, Dtype::BF16, shape.to_vec(), data(shape))).collect();
    scratch.write("IN/config.json", config.to_string());
    scratch.write_tensors("IN/model.safetensors", &tensors);
    scratch.path("IN")
}

fn config(model_type: &str, class: &str) -> Value {
    json!({ "architectures": [class], "model_type": model_type })
}

/// Returns the layers that an output's config exempts.
fn ignored(scratch: &Scratch, out: &str) -> Value {
    read_json(scratch.path(format!("{out}/config.json")))["quantization_config"]["ignore"].clone()
}

/// Returns the names of an output's quantized tensors.
fn quantized(scratch: &Scratch, out: &str) -> Vec<String> {
    let packed = tensors(&scratch.path(out)).into_keys();
    packed.filter_map(|name| Some(name.strip_suffix(".weight_packed")?.to_string())).collect()
}

/// Returns the doctor's findings: defect, tensor and text.
fn findings(scratch: &Scratch, out: &str) -> Vec<(String, String, String)> {
    let found = run(&[&"doctor", &scratch.path(out), &"--json", &"-"]);
    let json: Value = serde_json::from_str(&found.stdout).unwrap();
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_string();
    let all = json["findings"].as_array().unwrap().iter();
    all.map(|finding| (text(finding, "defect"), text(finding, "tensor"), text(finding, "what"))).collect()
}

/// Changes the list of exempted layers of an output.
fn ignore(scratch: &Scratch, out: &str, layers: Value) {
    let file = format!("{out}/config.json");
    let mut config = read_json(scratch.path(&file));
    config["quantization_config"]["ignore"] = layers;
    scratch.write(&file, config.to_string());
}

const LLAVA: &[(&str, &[usize])] = &[
    ("language_model.lm_head.weight", &[32, 64]),
    ("language_model.model.embed_tokens.weight", &[32, 64]),
    ("language_model.model.layers.0.mlp.up_proj.weight", &[32, 64]),
    ("vision_tower.patch_conv.weight", &[8, 3, 16, 16]),
    ("vision_tower.transformer.layers.0.attention.q_proj.weight", &[32, 64]),
];

#[test]
fn layers_are_exempted_by_the_names_that_loaders_have_for_them() {
    let scratch = Scratch::new();
    let input = checkpoint(&scratch, &config("llava", "LlavaForConditionalGeneration"), LLAVA);
    let exclude = ["--format", "nvfp4", "--exclude", "*vision_tower*"];
    let run = quantize(&scratch, &input, "OUT", &exclude);
    assert!(!run.stderr.contains("warning"), "{run:#?}");
    run.ok();
    assert_eq!(quantized(&scratch, "OUT"), ["language_model.model.layers.0.mlp.up_proj"]);
    let names = json!([
        "language_model.lm_head",
        "lm_head",
        "model.vision_tower.transformer.layers.0.attention.q_proj",
        "vision_tower.transformer.layers.0.attention.q_proj"
    ]);
    assert_eq!(ignored(&scratch, "OUT"), names);
    assert_eq!(findings(&scratch, "OUT"), []);

    // Other software may list names of the file, which transformers does not look for.
    ignore(&scratch, "OUT", json!(["language_model.lm_head", "re:.*vision_tower.*"]));
    let found = findings(&scratch, "OUT");
    let [(defect, tensor, what)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((defect.as_str(), tensor.as_str()), ("config", "language_model.lm_head.weight"));
    assert!(what.contains("does not list lm_head as ignored, which transformers goes by"), "{what}");
    ignore(
        &scratch,
        "OUT",
        json!(["lm_head", "re:.*vision_tower.*", "model.language_model.layers.0.mlp.up_proj"]),
    );
    let found = findings(&scratch, "OUT");
    assert!(found.len() == 1 && found[0].2.contains("it is quantized, but"), "{found:?}");
}

#[test]
fn groups_of_several_formats_are_named_in_both_ways() {
    let scratch = Scratch::new();
    let names: &[(&str, &[usize])] =
        &[("visual.blocks.0.attn.qkv.weight", &[32, 64]), ("model.layers.0.mlp.down_proj.weight", &[32, 64])];
    let input = checkpoint(&scratch, &config("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"), names);
    scratch.write("r.toml", "format = \"nvfp4\"\n[[tensors]]\nmatch = \"visual*\"\nformat = \"mxfp4\"\n");
    let recipe = scratch.path("r.toml");
    quantize(&scratch, &input, "OUT", &["--recipe", recipe.to_str().unwrap()]).ok();
    let groups = &read_json(scratch.path("OUT/config.json"))["quantization_config"]["config_groups"];
    let targets: Vec<_> =
        groups.as_object().unwrap().values().map(|group| group["targets"].clone()).collect();
    assert!(
        targets.contains(&json!(["model.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"])),
        "{groups}"
    );
    let text = json!(["model.language_model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj"]);
    assert!(targets.contains(&text), "{groups}");
    assert_eq!(findings(&scratch, "OUT"), []);
}

#[test]
fn tensors_other_than_linear_layers_are_copied() {
    let scratch = Scratch::new();
    let bart: &[(&str, &[usize])] = &[
        ("model.shared.weight", &[32, 64]),
        ("model.decoder.layers.0.fc1.weight", &[32, 64]),
        ("model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", &[32, 64]),
        ("model.encoder.conv1.weight", &[32, 3, 32]),
        ("model.patch_conv.weight", &[8, 3, 32, 32]),
    ];
    let input = checkpoint(&scratch, &config("bart", "BartForConditionalGeneration"), bart);
    let text = quantize(&scratch, &input, "OUT", &[]).ok();
    assert!(text.contains("convolution") && text.contains("embedding"), "{text}");
    assert_eq!(quantized(&scratch, "OUT"), ["model.decoder.layers.0.fc1"]);
    assert_eq!(ignored(&scratch, "OUT"), json!(["lm_head"]));

    // --include overrides it, and the doctor reports it in files of other software.
    quantize(&scratch, &input, "ALL", &["--include", "*shared*", "--include", "*patch_conv*"]).ok();
    let found = findings(&scratch, "ALL");
    let names: Vec<_> = found.iter().map(|(_, tensor, _)| tensor.as_str()).collect();
    assert_eq!(names, ["model.patch_conv.weight", "model.shared.weight"], "{found:?}");
    assert!(found[0].2.contains("a convolution") && found[1].2.contains("an embedding"), "{found:?}");
}

#[test]
fn linear_layers_with_names_of_others_are_exempted() {
    let scratch = Scratch::new();
    let llama4: &[(&str, &[usize])] = &[
        ("language_model.lm_head.weight", &[32, 64]),
        ("language_model.model.layers.0.feed_forward.up_proj.weight", &[32, 64]),
        ("vision_model.patch_embedding.linear.weight", &[32, 64]),
    ];
    let input = checkpoint(&scratch, &config("llama4", "Llama4ForConditionalGeneration"), llama4);
    quantize(&scratch, &input, "OUT", &[]).ok();
    assert_eq!(
        ignored(&scratch, "OUT"),
        json!(["language_model.lm_head", "vision_model.patch_embedding.linear"])
    );
    ignore(&scratch, "OUT", json!(["language_model.lm_head"]));
    let found = findings(&scratch, "OUT");
    assert!(found.len() == 1 && found[0].1 == "vision_model.patch_embedding.linear.weight", "{found:?}");
}

#[test]
fn tied_heads_are_exempted_by_their_own_names() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] =
        &[("model.decoder.embed_tokens.weight", &[32, 64]), ("model.decoder.layers.0.fc1.weight", &[32, 64])];
    let input = checkpoint(&scratch, &config("whisper", "WhisperForConditionalGeneration"), weights);
    quantize(&scratch, &input, "OUT", &[]).ok();
    assert_eq!(ignored(&scratch, "OUT"), json!(["proj_out"]));
    assert_eq!(findings(&scratch, "OUT"), []);
    ignore(&scratch, "OUT", json!(["lm_head"]));
    let found = findings(&scratch, "OUT");
    assert!(found.len() == 1 && found[0].1 == "proj_out" && found[0].2.contains("tied"), "{found:?}");
}

#[test]
fn transposed_layers_are_left_to_loaders_as_they_are() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("wte.weight", &[32, 64]),
        ("h.0.attn.c_attn.weight", &[64, 96]),
        ("h.0.mlp.c_fc.weight", &[64, 96]),
    ];
    let gpt2 = checkpoint(&scratch, &config("gpt2", "GPT2LMHeadModel"), weights);
    let refused = quantize(&scratch, &gpt2, "OUT", &[]);
    assert!(refused.code == Some(1) && refused.stderr.contains("no tensor to quantize"), "{refused:#?}");
    let plan = run(&[&"quantize", &gpt2, &"--dry-run"]).ok();
    assert!(plan.contains("copy: Conv1D"), "{plan}");
    quantize(&scratch, &gpt2, "ALL", &["--include", "*c_attn*"]).ok();
    let found = findings(&scratch, "ALL");
    assert!(found.len() == 1 && found[0].2.contains("Conv1D"), "{found:?}");
    assert_eq!(ignored(&scratch, "ALL"), json!(["lm_head"]));
}

#[test]
fn unknown_architectures_get_a_warning() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("x.fc.weight", &[32, 64]),
        ("x.time_embedder.weight", &[32, 64]),
        ("x.word_embeddings.weight", &[32, 64]),
    ];
    let input = checkpoint(&scratch, &config("not-yet", "NotYetModel"), weights);
    let run = quantize(&scratch, &input, "OUT", &[]);
    assert!(run.stderr.contains("the architecture not-yet is not among those that are known"), "{run:#?}");
    run.ok();
    // Possibly linear layers are exempt, and the doctor reports nothing about them.
    assert_eq!(ignored(&scratch, "OUT"), json!(["x.time_embedder"]));
    ignore(&scratch, "OUT", json!([]));
    assert_eq!(findings(&scratch, "OUT"), []);
}

/// Returns the global scales of an output by layer.
fn global_scale(scratch: &Scratch, out: &str, layer: &str) -> f32 {
    let stored = &tensors(&scratch.path(out))[&format!("{layer}.weight_global_scale")];
    f32::from_le_bytes(stored.2[..].try_into().unwrap())
}

#[test]
fn tied_heads_of_every_architecture_are_exempted() {
    let weight: &[usize] = &[32, 64];
    for (model_type, class, weights, exempted) in [
        (
            "bert",
            "BertForMaskedLM",
            &["bert.encoder.layer.0.output.dense.weight", "cls.predictions.transform.dense.weight"][..],
            json!(["cls.predictions.decoder", "cls.predictions.transform.dense"]),
        ),
        (
            "roberta",
            "RobertaForMaskedLM",
            &["roberta.encoder.layer.0.output.dense.weight", "lm_head.dense.weight"],
            json!(["lm_head.decoder", "lm_head.dense"]),
        ),
        (
            "electra",
            "ElectraForMaskedLM",
            &["electra.encoder.layer.0.output.dense.weight"],
            json!(["generator_lm_head"]),
        ),
        ("distilbert", "DistilBertForMaskedLM", &["distilbert.x.lin1.weight"], json!(["vocab_projector"])),
        ("marian", "MarianMTModel", &["model.decoder.layers.0.fc1.weight"], json!(["lm_head"])),
        ("xlm", "XLMWithLMHeadModel", &["transformer.ffns.0.lin1.weight"], json!(["pred_layer.proj"])),
        ("llama", "LlamaForCausalLM", &["model.layers.0.mlp.up_proj.weight"], json!(["lm_head"])),
        ("llama", "LlamaModel", &["layers.0.mlp.up_proj.weight"], json!([])),
        ("llama", "LlamaForCausalLM", &["lm_head.weight", "a.up_proj.weight"], json!(["lm_head"])),
    ] {
        let scratch = Scratch::new();
        let mut weights: Vec<_> = weights.iter().map(|name| (*name, weight)).collect();
        // Tied heads have stored biases, too.
        weights.extend([
            ("cls.predictions.bias", &[32][..]),
            ("lm_head.bias", &[32]),
            ("final_logits_bias", &[1, 32]),
        ]);
        let input = checkpoint(&scratch, &config(model_type, class), &weights);
        quantize(&scratch, &input, "OUT", &["--format", "mxfp4"]).ok();
        assert_eq!(ignored(&scratch, "OUT"), exempted, "{class}");
        assert_eq!(findings(&scratch, "OUT"), [], "{class}");
    }
}

#[test]
fn including_a_tied_head_or_an_embedding_warns() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("lm_head.weight", &[32, 64]),
        ("model.embed_tokens.weight", &[32, 64]),
        ("model.layers.0.mlp.up_proj.weight", &[32, 64]),
    ];
    let mut tied = config("qwen2", "Qwen2ForCausalLM");
    tied["tie_word_embeddings"] = true.into();
    let input = checkpoint(&scratch, &tied, weights);
    let head = quantize(&scratch, &input, "HEAD", &["--include", "lm_head.weight"]);
    assert!(head.stderr.contains("tie_word_embeddings in config.json ties it to the embedding"), "{head:#?}");
    let embedding = quantize(&scratch, &input, "EMBEDDING", &["--include", "*embed_tokens*"]);
    assert!(embedding.stderr.contains("load them unquantized"), "{embedding:#?}");
    let untied = checkpoint(&scratch, &config("qwen2", "Qwen2ForCausalLM"), weights);
    let untied = quantize(&scratch, &untied, "UNTIED", &["--include", "lm_head.weight"]);
    assert!(!untied.stderr.contains("warning"), "{untied:#?}");
    // A tied head without a tensor cannot be included.
    let input = checkpoint(&scratch, &tied, &weights[1..]);
    let none = quantize(&scratch, &input, "NONE", &["--include", "lm_head.weight"]);
    assert!(none.stderr.contains("lm_head is tied to the embedding"), "{none:#?}");
}

#[test]
fn tensors_of_three_dimensions_are_copied_whatever_their_names() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("model.layers.0.block_sparse_moe.input_linear.weight", &[2, 64, 64]),
        ("model.layers.0.mlp.experts.fc1.weight", &[2, 64, 64]),
        ("model.layers.0.mlp.experts.gate_up_proj", &[2, 64, 64]),
        ("model.layers.0.self_attn.q_proj.weight", &[64, 64]),
    ];
    let input = checkpoint(&scratch, &config("granitemoe", "GraniteMoeForCausalLM"), weights);
    let run = quantize(&scratch, &input, "OUT", &[]);
    assert!(run.stderr.contains("2 tensors such as") && run.stderr.contains("two dimensions"), "{run:#?}");
    assert_eq!(quantized(&scratch, "OUT"), ["model.layers.0.self_attn.q_proj"]);
    assert_eq!(findings(&scratch, "OUT"), []);

    quantize(&scratch, &input, "ALL", &["--include", "*fc1*"]).ok();
    let found = findings(&scratch, "ALL");
    let [(defect, tensor, what)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((defect.as_str(), tensor.as_str()), ("selection", "model.layers.0.mlp.experts.fc1.weight"));
    assert!(what.contains("more than two dimensions"), "{what}");
}

#[test]
fn layers_that_engines_build_unquantized_are_copied_and_findings_otherwise() {
    let scratch = Scratch::new();
    let names = [
        "model.layers.0.mlp.gate.wg.weight",
        "model.layers.0.self_attn.indexer.wq_b.weight",
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.0.self_attn.compressor.wkv.weight",
        "model.layers.3.eh_proj.weight",
    ];
    let heads = ["model.layers.3.shared_head.head.weight", "mtp.0.head.weight"];
    let mut weights: Vec<(&str, &[usize])> =
        names.iter().chain(&heads).map(|name| (*name, &[64, 64][..])).collect();
    weights.push(("model.layers.0.self_attn.o_proj.weight", &[64, 64]));
    let input = checkpoint(&scratch, &config("deepseek_v32", "DeepseekV32ForCausalLM"), &weights);
    quantize(&scratch, &input, "OUT", &[]).ok();
    assert_eq!(quantized(&scratch, "OUT"), ["model.layers.0.self_attn.o_proj"]);
    assert_eq!(findings(&scratch, "OUT"), []);
    let listed = ignored(&scratch, "OUT");
    let listed: Vec<_> = listed.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for name in names.iter().chain(&heads) {
        assert!(listed.contains(&name.trim_end_matches(".weight")), "{name}: {listed:?}");
    }
    quantize(&scratch, &input, "ALL", &["--include", "*.weight"]).ok();
    let found = findings(&scratch, "ALL");
    let tensors: Vec<_> =
        found.iter().map(|(defect, tensor, _)| (defect.as_str(), tensor.as_str())).collect();
    let mut expected = names.map(|name| ("selection", name));
    expected.sort();
    assert_eq!(tensors, expected, "{found:?}");
}

#[test]
fn layers_that_an_fp8_source_exempts_are_copied() {
    let scratch = Scratch::new();
    let config = json!({
        "model_type": "not-yet",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [64, 64],
            "modules_to_not_convert": ["visual", "model.layers.0.mlp.fc"],
        },
    });
    scratch.write("IN/config.json", config.to_string());
    let half = |name: &'static str| -> TensorData { (name, Dtype::BF16, vec![64, 64], vec![0; 8192]) };
    let tensors = [
        half("visual.blocks.0.attn.qkv.weight"),
        half("model.layers.0.mlp.fc.weight"),
        half("model.layers.0.mlp.fc2.weight"),
        ("model.layers.0.mlp.up_proj.weight", Dtype::F8_E4M3, vec![64, 64], vec![0x38; 4096]),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", Dtype::F32, vec![1, 1], 1f32.to_le_bytes().to_vec()),
    ];
    scratch.write_tensors("IN/model.safetensors", &tensors);
    let plan = run(&[&"quantize", &scratch.path("IN"), &"--dry-run"]).ok();
    assert_eq!(plan.matches("unquantized by the input's own config").count(), 2, "{plan}");
    quantize(&scratch, &scratch.path("IN"), "OUT", &[]).ok();
    assert_eq!(quantized(&scratch, "OUT"), ["model.layers.0.mlp.fc2", "model.layers.0.mlp.up_proj"]);
}

#[test]
fn layers_fused_by_engines_share_their_global_scale_under_any_name() {
    for parts in [
        &["a.attn.wq_a", "a.attn.wkv"][..],
        &["a.attn.compressor2.wkv", "a.attn.compressor2.wgate"],
        &["a.attention.wq", "a.attention.wk", "a.attention.wv"],
        &["a.attention.wq_a", "a.attention.wkv_a_with_mqa"],
        &["a.attention.self.query", "a.attention.self.key", "a.attention.self.value"],
        &["a.attn1.to_q", "a.attn1.to_k", "a.attn1.to_v"],
        &["a.self_attn.index_q_proj", "a.self_attn.index_k_proj"],
        &["a.mlp.gate_proj", "a.mlp.up_proj"],
    ] {
        let scratch = Scratch::new();
        let tensors: Vec<TensorData> = (1..)
            .zip(parts)
            .map(|(factor, part)| {
                let values = noise(64 * 64).into_iter().map(|value| bf16::from_f32(value * factor as f32));
                let name: &str = format!("{part}.weight").leak();
                (name, Dtype::BF16, vec![64, 64], values.flat_map(bf16::to_le_bytes).collect())
            })
            .collect();
        scratch.write_tensors("IN/model.safetensors", &tensors);
        quantize(&scratch, &scratch.path("IN"), "OUT", &["--format", "nvfp4"]).ok();
        let scales: Vec<_> = parts.iter().map(|part| global_scale(&scratch, "OUT", part)).collect();
        assert!(scales.iter().all(|scale| *scale == scales[0]), "{parts:?}: {scales:?}");
        assert_eq!(findings(&scratch, "OUT"), [], "{parts:?}");
    }
}

#[test]
fn siblings_of_unknown_architectures_that_look_fused_are_named() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("a.0.mixer.in_left.weight", &[64, 64]),
        ("a.0.mixer.in_right.weight", &[64, 64]),
        ("a.0.mixer.out_proj.weight", &[64, 64]),
    ];
    let input = checkpoint(&scratch, &config("not-yet", "NotYetModel"), weights);
    let warned = |format: &str| {
        let run = quantize(&scratch, &input, format, &["--format", format]);
        run.stderr.contains("a.0.mixer.{in_left,in_right}.weight have the same inputs")
    };
    assert!(warned("nvfp4") && !warned("mxfp4"));
    let known = checkpoint(&scratch, &config("llama", "LlamaForCausalLM"), weights);
    let run = quantize(&scratch, &known, "KNOWN", &["--format", "nvfp4"]);
    assert!(!run.stderr.contains("have the same inputs"), "{run:#?}");
}

#[test]
fn architectures_that_transformers_does_not_load_packed_are_named() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[("transformer.h.0.mlp.dense_h_to_4h.weight", &[64, 64])];
    let input = checkpoint(&scratch, &config("falcon", "FalconForCausalLM"), weights);
    let run = quantize(&scratch, &input, "OUT", &[]);
    assert!(run.stderr.contains("CompressedTensorsConfig(dequantize=True)"), "{run:#?}");
    let found = findings(&scratch, "OUT");
    assert!(found.len() == 1 && found[0].0 == "loading", "{found:?}");
    let run = quantize(&scratch, &input, "MODELOPT", &["--format", "nvfp4", "--to", "modelopt"]);
    assert!(!run.stderr.contains("warning"), "{run:#?}");
    assert_eq!(findings(&scratch, "MODELOPT"), []);
}

#[test]
fn unquantized_experts_next_to_quantized_layers_are_named() {
    let scratch = Scratch::new();
    let weights: &[(&str, &[usize])] = &[
        ("model.layers.0.mlp.experts.0.up_proj.weight", &[64, 64]),
        ("model.layers.0.mlp.experts.0.down_proj.weight", &[64, 64]),
        ("model.layers.0.self_attn.o_proj.weight", &[64, 64]),
    ];
    let input = checkpoint(&scratch, &config("qwen3_moe", "Qwen3MoeForCausalLM"), weights);
    let run = quantize(&scratch, &input, "OUT", &["--format", "mxfp4", "--exclude", "*.experts.*"]);
    assert!(run.stderr.contains("2 weights of experts are copied: transformers 5.24 loses"), "{run:#?}");
    let found = findings(&scratch, "OUT");
    assert!(found.len() == 1 && found[0].0 == "loading", "{found:?}");
    quantize(&scratch, &input, "ALL", &["--format", "mxfp4"]).ok();
    assert_eq!(findings(&scratch, "ALL"), []);
}
