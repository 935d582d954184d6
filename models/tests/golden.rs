//! Logits and hidden states of models that transformers made and ran.
//!
//! `tests/golden/make_models.py` writes them: one tiny random model per architecture, with the
//! hidden states before every layer and the logits, computed in f32 and in bf16.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use microscale_candle::Weights;
use microscale_models::{Config, DecoderLayer, Ends, Model, Rotations, Rows, Stored, prefix};

const MODELS: [&str; 8] =
    ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"];

fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(model)
}

struct Golden {
    config: Config,
    source: Stored,
    tokens: Vec<u32>,
    expected: std::collections::HashMap<String, Tensor>,
}

impl Golden {
    fn read(model: &str) -> Self {
        let directory = golden(model);
        let expected =
            candle_core::safetensors::load(directory.join("logits.safetensors"), &Device::Cpu).unwrap();
        let tokens = expected["tokens"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
        // Only the weights: the golden values next to them are no tensors of the model.
        let file = directory.join("model.safetensors");
        let weights = Weights::open(&file, DType::F32, &Device::Cpu).unwrap();
        Self { config: Config::read(&directory).unwrap(), source: Stored::new(weights), tokens, expected }
    }
}

/// The largest difference, relative to the largest magnitude.
fn difference(found: &Tensor, expected: &Tensor) -> f32 {
    let largest =
        |x: &Tensor| -> f32 { x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap() };
    let found = found.to_dtype(DType::F32).unwrap();
    largest(&(&found - expected).unwrap()) / largest(expected)
}

#[test]
fn logits_in_f32_are_those_of_transformers() {
    for name in MODELS {
        let golden = Golden::read(name);
        let mut model = Model::load(&golden.source, &golden.config, DType::F32).unwrap();
        let logits = model.forward(&golden.tokens, false).unwrap();
        let off = difference(&logits, &golden.expected["logits_f32"]);
        assert!(off < 1e-5, "{name}: logits differ by {off}");
    }
}

#[test]
fn logits_in_bf16_are_those_of_transformers_within_rounding() {
    for name in MODELS {
        let golden = Golden::read(name);
        let mut model = Model::load(&golden.source, &golden.config, DType::BF16).unwrap();
        let logits = model.forward(&golden.tokens, false).unwrap();
        // transformers' own bf16 logits are this far from its f32 logits.
        let (exact, rounded) = (&golden.expected["logits_f32"], &golden.expected["logits_bf16"]);
        let rounding = difference(rounded, exact);
        let off = difference(&logits, exact);
        assert!(off < 1.5 * rounding, "{name}: logits differ by {off}, those of transformers by {rounding}");
    }
}

#[test]
fn hidden_states_are_those_of_transformers_layer_by_layer() {
    for name in MODELS {
        let golden = Golden::read(name);
        let ends = Ends::load(&golden.source, &golden.config, DType::F32).unwrap();
        let rotations = Rotations::new(&golden.config, golden.tokens.len(), &Device::Cpu).unwrap();
        let hidden = &golden.expected["hidden_f32"];
        let mut x = ends.embed(&golden.tokens).unwrap();
        // Twice the same sequence in one batch.
        let lengths = [golden.tokens.len(); 2];
        let rows = Rows::new(&lengths, &rotations);
        for layer in 0..golden.config.layers {
            let expected = hidden.get(layer).unwrap();
            let off = difference(&x, &expected);
            assert!(off < 1e-5, "{name}: hidden states before layer {layer} differ by {off}");
            let prefix = prefix(&golden.source).unwrap();
            let layer = DecoderLayer::load(&golden.source, prefix, layer, &golden.config).unwrap();
            let y = layer.forward(&Tensor::cat(&[&x, &x], 0).unwrap(), &rows, None).unwrap();
            let [first, second] =
                [0, 1].map(|i| y.narrow(0, i * lengths[0], lengths[0]).unwrap().contiguous().unwrap());
            assert_eq!(first.to_vec2::<f32>().unwrap(), second.to_vec2::<f32>().unwrap(), "{name}");
            x = first;
        }
        let off = difference(&x, &hidden.get(golden.config.layers).unwrap());
        assert!(off < 1e-5, "{name}: hidden states after the last layer differ by {off}");
    }
}

#[test]
fn tokens_one_by_one_give_the_logits_of_all_at_once() {
    for name in MODELS {
        let golden = Golden::read(name);
        let mut model = Model::load(&golden.source, &golden.config, DType::F32).unwrap();
        let all = model.forward(&golden.tokens, false).unwrap();
        model.reset();
        for (position, token) in golden.tokens.iter().enumerate() {
            let one = model.forward(&[*token], false).unwrap();
            let off = difference(&one.get(0).unwrap(), &all.get(position).unwrap());
            assert!(off < 1e-5, "{name}: token {position} differs by {off}");
        }
    }
}

#[test]
fn models_that_the_crate_does_not_run_are_refused() {
    let text = fs::read_to_string(golden("llama").join("config.json")).unwrap();
    let refused = |from: &str, to: &str| {
        let directory = tempfile::tempdir().unwrap();
        assert!(text.contains(from), "{from}");
        fs::write(directory.path().join("config.json"), text.replace(from, to)).unwrap();
        Config::read(directory.path()).unwrap_err().to_string()
    };
    let message = refused("\"model_type\": \"llama\"", "\"model_type\": \"mamba\"");
    assert!(message.contains("mamba") && message.contains("gpt_oss"), "{message}");
    let message = refused("\"rope_type\": \"default\"", "\"rope_type\": \"longrope\"");
    assert!(message.contains("longrope"), "{message}");
    let message = refused("\"num_attention_heads\": 4", "\"num_attention_heads\": 0");
    assert!(message.contains("num_attention_heads"), "{message}");
}
