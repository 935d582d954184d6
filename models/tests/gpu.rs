//! Models on an NVIDIA GPU, compared with transformers' golden values and with the CPU.
//!
//!     cargo test -p microscale-models --features cuda --test gpu -- --ignored
//!
//! Without `--ignored` the tests are listed as ignored. With it they fail without a GPU.

#![cfg(feature = "cuda")]

mod story;

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use microscale::{Format, Numerics};
use microscale_models::{
    CalibrateOptions, Error, EvaluateOptions, Evaluated, Evaluation, Identity, InputFormat, Model, Progress,
    QuantizedInputs, Source, Window, calibrate, evaluate,
};
use serde_json::{Map, json};
use story::{Story, golden, quantized, sample};

const MODELS: [&str; 8] =
    ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"];

fn gpu() -> Device {
    Device::new_cuda(0).unwrap()
}

fn largest(x: &Tensor) -> f32 {
    x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// Asserts that two tensors differ by less than a part of the largest magnitude.
fn near(found: &Tensor, expected: &Tensor, part: f32, what: &str) {
    let found = found.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let off = largest(&(found - expected).unwrap()) / largest(expected).max(f32::MIN_POSITIVE);
    assert!(off < part, "{what}: off by {off}");
}

fn tensors(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn logits_are_those_of_transformers() {
    let gpu = gpu();
    for name in MODELS {
        let story = Story::golden_on(name, &gpu);
        let expected = tensors(&golden(name).join("logits.safetensors"));
        let tokens: Vec<u32> = expected["tokens"].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
        let mut model = Model::load(&story.source, &story.config, DType::F32).unwrap();
        near(&model.forward(&tokens, false).unwrap(), &expected["logits_f32"], 2e-5, name);
        // transformers' own bf16 logits are this far from its f32 logits.
        let rounding = largest(&(&expected["logits_bf16"] - &expected["logits_f32"]).unwrap());
        let mut model = Model::load(&story.source, &story.config, DType::BF16).unwrap();
        let part = 2.0 * rounding / largest(&expected["logits_f32"]);
        near(&model.forward(&tokens, false).unwrap(), &expected["logits_f32"], part, name);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn evaluations_are_those_of_the_cpu() {
    let directory = tempfile::tempdir().unwrap();
    for (format, numerics, inputs) in [
        (Format::Nvfp4, Numerics::CompressedTensors, InputFormat::Nvfp4),
        (Format::Mxfp4, Numerics::Ocp, InputFormat::Mxfp4),
    ] {
        let out = directory.path().join(format!("{inputs:?}"));
        quantized(&out, format, numerics);
        let [there, here] = [gpu(), Device::Cpu].map(|device| evaluated(&out, inputs, &device));
        let near = |a: f64, b: f64, part: f64| assert!((a - b).abs() <= part * b.abs(), "{format}: {a}, {b}");
        near(there.perplexity.mean, here.perplexity.mean, 1e-5);
        for (number, (there, here)) in there.others.iter().zip(&here.others).enumerate() {
            // A last bit of an input may round it to another code.
            let part = if number == 0 { 1e-4 } else { 1e-2 };
            near(there.perplexity.mean, here.perplexity.mean, part);
            near(there.divergence.mean, here.divergence.mean, 10.0 * part);
            assert_eq!(there.layers.len(), here.layers.len());
            for (there, here) in there.layers.iter().zip(&here.layers) {
                near(there.squares, here.squares, part);
                near(there.errors, here.errors, 10.0 * part);
            }
        }
    }
}

/// Evaluates a quantized sample, without and with quantized inputs.
fn evaluated(out: &Path, inputs: InputFormat, device: &Device) -> Evaluation {
    let (story, other) = (Story::open_on(&sample(), device), Story::open_on(out, device));
    let quantized_inputs = QuantizedInputs::new(other.source.clone(), inputs);
    let of = |source| Evaluated { name: "other", source, config: &other.config };
    let sources: [&dyn Source; 2] = [&other.source, &quantized_inputs];
    let options = EvaluateOptions { dtype: DType::F32, layers: true };
    let go_on = &mut |_| ControlFlow::Continue(());
    evaluate(story.model(), &sources.map(of), &story.windows(Some(3)), options, go_on).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn calibrations_are_those_of_the_cpu_and_repeatable() {
    let gpu = gpu();
    for name in ["story", "qwen3_moe", "gpt_oss"] {
        let open = |device| match name {
            "story" => Story::open_on(&sample(), device),
            model => Story::golden_on(model, device),
        };
        let [here, there, again] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        calibrated(&open(&Device::Cpu), here.path(), None).unwrap();
        calibrated(&open(&gpu), there.path(), None).unwrap();
        // Interrupted before its second layer.
        let stopped = calibrated(&open(&gpu), again.path(), Some(1));
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        calibrated(&open(&gpu), again.path(), None).unwrap();
        for file in fs::read_dir(here.path()).unwrap().map(|file| file.unwrap().file_name()) {
            let [here, there, again] = [&here, &there, &again].map(|directory| directory.path().join(&file));
            let bytes = |file: &Path| fs::read(file).unwrap();
            if file.to_string_lossy().ends_with(".safetensors") {
                let [here, there, again] = [here, there, again].map(|file| tensors(&file));
                assert_eq!((there.len(), again.len()), (here.len(), here.len()));
                for (tensor, here) in here {
                    let part = if tensor.ends_with("hessian") { 1e-4 } else { 2e-5 };
                    near(&there[&tensor], &here, part, &format!("{name}: {tensor}"));
                    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert!(values(&there[&tensor]) == values(&again[&tensor]), "{name}: {tensor} varies");
                }
            } else {
                assert!(bytes(&there) == bytes(&again), "{name}: {} varies", there.display());
            }
        }
    }
}

/// Calibrates a model, and stops before a layer.
fn calibrated(story: &Story, directory: &Path, stop: Option<usize>) -> microscale_models::Result<()> {
    let tokens: Vec<u32> = (0..64).map(|i| (i * i + 37 * i) % story.config.vocabulary as u32).collect();
    let windows = tokens.windows(33).step_by(31);
    let windows: Vec<_> =
        windows.map(|part| Window { inputs: part[..32].to_vec(), targets: part[1..].to_vec() }).collect();
    let identity = Identity(Map::from_iter([("text".to_string(), json!("text"))]));
    let options = CalibrateOptions { dtype: DType::F32, hessians: true };
    let go_on = &mut |at: Progress| {
        if stop == Some(at.layer) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    calibrate(&story.source, &story.config, &windows, options, &identity, directory, go_on).map(|_| ())
}
