//! What config.json's `model_type` decides: which weights are quantized, and what the config calls the others.

use std::path::PathBuf;

use half::bf16;
use microscale_test_support::{Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{noise, quantize, read_json, tensors};

/// A checkpoint of weights with these names and shapes.
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

/// The layers that an output's config exempts.
fn ignored(scratch: &Scratch, out: &str) -> Value {
    read_json(scratch.path(format!("{out}/config.json")))["quantization_config"]["ignore"].clone()
}

/// The names of the tensors that are quantized in an output.
fn quantized(scratch: &Scratch, out: &str) -> Vec<String> {
    let packed = tensors(&scratch.path(out)).into_keys();
    packed.filter_map(|name| Some(name.strip_suffix(".weight_packed")?.to_string())).collect()
}

/// The findings of the doctor: defect, tensor and words.
fn findings(scratch: &Scratch, out: &str) -> Vec<(String, String, String)> {
    let found = run(&[&"doctor", &scratch.path(out), &"--json"]);
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

    // Files that others wrote have the names of the file alone: transformers looks for none of them.
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
fn what_is_no_linear_layer_is_copied() {
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

    // The user has the last word, and the doctor finds it in the files of others.
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
fn an_architecture_that_is_not_known_is_said() {
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
    // Which may be linear is exempted, and the doctor leaves it open.
    assert_eq!(ignored(&scratch, "OUT"), json!(["x.time_embedder"]));
    ignore(&scratch, "OUT", json!([]));
    assert_eq!(findings(&scratch, "OUT"), []);
}
