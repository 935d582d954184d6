//! Calibrations of the sample that was trained, and of random mixtures of experts.

mod story;

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Module, Tensor};
use microscale::{Format, Numerics, Search};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, FileProblem, InputScales, Quantize, Settings, Warning,
};
use microscale_models::{
    CalibrateOptions, Error, Identity, Layer, LayerName, Model, PlainLinear, Statistics, Window, Wrapped,
    calibrate,
};
use serde_json::{Map, json};
use story::{Story, sample};

const OPTIONS: CalibrateOptions = CalibrateOptions { dtype: DType::F32, hessians: true };

fn identity(text: &str) -> Identity {
    Identity(Map::from_iter([("text".to_string(), json!(text))]))
}

fn calibrated(story: &Story, windows: &[Window], directory: &Path) -> Statistics {
    let go_on = &mut |_| ControlFlow::Continue(());
    calibrate(&story.source, &story.config, windows, OPTIONS, &identity("text"), directory, go_on).unwrap()
}

fn tensors(file: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(file, &Device::Cpu).unwrap()
}

fn largest(x: &Tensor) -> f64 {
    x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

type Inputs = Arc<Mutex<HashMap<String, Vec<Tensor>>>>;

/// Keeps the inputs of a layer.
struct Kept(Layer, String, Inputs);

impl Module for Kept {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut all = self.2.lock().unwrap();
        all.entry(self.1.clone()).or_default().push(x.to_dtype(DType::F64)?);
        drop(all);
        self.0.forward(x)
    }
}

/// The inputs of every linear layer, window by window, from the whole model in memory.
fn inputs(story: &Story, windows: &[Window]) -> HashMap<String, Tensor> {
    let all = Inputs::default();
    let kept = Wrapped {
        source: &story.source,
        layers: |name: &LayerName, layers: Vec<Layer>| {
            let (stack, weight) = (name.stack.is_some(), name.weight());
            let each = layers.into_iter().enumerate().map(|(expert, layer)| {
                let name = if stack { format!("{weight}.{expert}") } else { weight.clone() };
                Box::new(Kept(layer, name, all.clone())) as Layer
            });
            Ok(each.collect())
        },
        cache: |_: &str| None,
    };
    let mut model = Model::load(&kept, &story.config, DType::F32).unwrap();
    for window in windows {
        model.reset();
        model.forward(&window.inputs, false).unwrap();
    }
    let all = std::mem::take(&mut *all.lock().unwrap());
    all.into_iter().map(|(name, parts)| (name, Tensor::cat(&parts, 0).unwrap())).collect()
}

#[test]
fn statistics_are_those_of_the_inputs() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let windows = story.windows(Some(3));
    calibrated(&story, &windows, directory.path());
    let importance = tensors(&directory.path().join("importance.safetensors"));
    let amax: HashMap<String, f64> =
        serde_json::from_str(&fs::read_to_string(directory.path().join("input_amax.json")).unwrap()).unwrap();
    let inputs = inputs(&story, &windows);
    let layers = inputs.iter().filter(|(weight, _)| *weight != "lm_head.weight");
    let mut seen = 0;
    for (weight, x) in layers {
        let tokens = x.dim(0).unwrap() as f64;
        let hessian = (x.t().unwrap().matmul(x).unwrap() / tokens).unwrap();
        let module = weight.strip_suffix(".weight").unwrap();
        let near = |found: &Tensor, expected: &Tensor| {
            let off = largest(&(found.to_dtype(DType::F64).unwrap() - expected).unwrap());
            assert!(off < 1e-5 * largest(expected), "{weight}: off by {off}");
        };
        let found = &importance[&format!("{weight}.importance")];
        near(found, &(x.sqr().unwrap().sum(0).unwrap() / tokens).unwrap());
        assert!((amax[module] - largest(x)).abs() < 1e-4 * largest(x), "{weight}");
        // Layers with one input share its Hessian.
        let (parent, end) = module.rsplit_once('.').unwrap();
        let input = match end {
            "q_proj" | "k_proj" | "v_proj" => "qkv",
            "gate_proj" | "up_proj" => "gate_up",
            other => other.strip_suffix("_proj").unwrap(),
        };
        let layer: usize = module.split('.').nth(2).unwrap().parse().unwrap();
        let file = tensors(&directory.path().join(format!("layer-{layer}.safetensors")));
        near(&file[&format!("{parent}.{input}.hessian")], &hessian);
        seen += 1;
    }
    assert_eq!(seen, 4 * 7);
    let kv = fs::read_to_string(directory.path().join("kv_amax.json")).unwrap();
    let kv: HashMap<String, f64> = serde_json::from_str(&kv).unwrap();
    assert_eq!(kv.len(), 4 * 2);
    assert!(kv.values().all(|amax| *amax > 0.0), "{kv:?}");
}

#[test]
fn an_interrupted_calibration_continues_with_the_same_result() {
    let story = Story::open(&sample());
    let windows = story.windows(Some(2));
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    calibrated(&story, &windows, whole.path());
    // Interrupted in its second layer, and then in its fourth.
    for layer in [1, 3] {
        let stopped = calibrate(
            &story.source,
            &story.config,
            &windows,
            OPTIONS,
            &identity("text"),
            parts.path(),
            &mut |at| {
                if at.layer == layer { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        let index = fs::read_to_string(parts.path().join("calibration.json")).unwrap();
        assert!(index.contains("\"complete\": false"), "{index}");
        // As if the run had ended after it wrote the next hidden states, before it wrote the index.
        let hidden = |layer| parts.path().join(format!("hidden-{layer}.safetensors"));
        if layer == 3 {
            fs::copy(hidden(3), hidden(4)).unwrap();
        }
    }
    let go_on = &mut |_| ControlFlow::Continue(());
    let other =
        calibrate(&story.source, &story.config, &windows, OPTIONS, &identity("other"), parts.path(), go_on);
    let message = other.unwrap_err().to_string();
    assert!(message.contains("another model, text or options"), "{message}");

    calibrated(&story, &windows, parts.path());
    let files = |directory: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|file| file.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(files(whole.path()), files(parts.path()));
    for file in files(whole.path()) {
        let [a, b] = [&whole, &parts].map(|directory| directory.path().join(&file));
        if a.extension().is_some_and(|extension| extension == "json") {
            assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap(), "{} differs", a.display());
            continue;
        }
        let [a, b] = [tensors(&a), tensors(&b)];
        assert_eq!(a.len(), b.len());
        for (name, tensor) in a {
            let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(values(&tensor) == values(&b[&name]), "{name} differs");
        }
    }
}

#[test]
fn inputs_that_are_not_finite_are_refused() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let broken = Wrapped {
        source: &story.source,
        layers: |name: &LayerName, layers: Vec<Layer>| {
            let is_broken = name.module == "model.layers.1.mlp.gate_proj";
            let weight = Tensor::full(f32::NAN, (name.outputs, name.inputs), &Device::Cpu)?;
            Ok(if is_broken { vec![Box::new(PlainLinear::new(weight, None)) as Layer] } else { layers })
        },
        cache: |_: &str| None,
    };
    let (windows, go_on) = (story.windows(Some(1)), &mut |_| ControlFlow::Continue(()));
    let found =
        calibrate(&broken, &story.config, &windows, OPTIONS, &identity("text"), directory.path(), go_on);
    let message = found.unwrap_err().to_string();
    assert!(message.contains("model.layers.1.mlp.down has NaN"), "{message}");
}

#[test]
fn quantizing_takes_the_statistics_of_every_layer() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    calibrated(&story, &story.windows(Some(1)), directory.path());
    let settings = Settings {
        format: Some(Format::Nvfp4),
        numerics: Some(Numerics::CompressedTensors),
        search: Some(Search::Full),
        ..Settings::default()
    };
    let quantize = Quantize {
        format: Some(CheckpointFormat::CompressedTensors),
        importance: Some(directory.path().join("importance.safetensors")),
        input_scales: Some(InputScales::read(&directory.path().join("input_amax.json")).unwrap()),
        ..Quantize::new(settings)
    };
    let checkpoint = Checkpoint::open(&sample()).unwrap();
    let plan = quantize.plan(&checkpoint).unwrap();
    assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
}

#[test]
fn experts_have_statistics_of_their_own_tokens() {
    for name in ["qwen3_moe", "gpt_oss"] {
        let (story, directory) = (Story::golden(name), tempfile::tempdir().unwrap());
        // Two windows of few tokens, so that some experts see none.
        let window = |tokens: [u32; 3]| Window { inputs: tokens.into(), targets: tokens.into() };
        let windows = [window([3, 50, 7])];
        let statistics = calibrated(&story, &windows, directory.path());
        let inputs = inputs(&story, &windows);
        let importance = tensors(&directory.path().join("importance.safetensors"));
        let mut unseen = Vec::new();
        for (tensor, found) in &importance {
            let weight = tensor.strip_suffix(".importance").unwrap();
            if !weight.contains("experts") {
                continue;
            }
            let rows = if weight.ends_with(".weight") { 1 } else { found.dim(0).unwrap() };
            for expert in 0..rows {
                let (key, row) = match rows {
                    1 => (weight.to_string(), found.flatten_all().unwrap()),
                    _ => (format!("{weight}.{expert}"), found.get(expert).unwrap()),
                };
                let row = row.to_dtype(DType::F64).unwrap();
                match inputs.get(&key) {
                    Some(x) => {
                        let tokens = x.dim(0).unwrap() as f64;
                        let expected = (x.sqr().unwrap().sum(0).unwrap() / tokens).unwrap();
                        let off = largest(&(&row - &expected).unwrap());
                        assert!(off <= 1e-5 * largest(&expected), "{name} {key}: {off}");
                    }
                    None => {
                        assert_eq!(largest(&row), 0.0, "{name} {key}");
                        unseen.push(key);
                    }
                }
            }
        }
        assert!(!unseen.is_empty(), "{name}: each expert saw a token; choose fewer tokens");
        let listed = statistics.index()["unseen_experts"].as_object().unwrap();
        let listed: usize = listed.values().map(|experts| experts.as_array().map_or(1, Vec::len)).sum();
        assert_eq!(listed, unseen.len(), "{name}: {listed:?} and {unseen:?}");
    }
}

#[test]
fn experts_without_tokens_get_the_input_scale_of_the_other_experts() {
    let (story, directory) = (Story::golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let [input, stats, out] = ["in", "stats", "out"].map(|name| directory.path().join(name));
    let windows = [Window { inputs: vec![3, 50, 7], targets: vec![50, 7, 4] }];
    let statistics = calibrated(&story, &windows, &stats);
    // The model without its golden values.
    fs::create_dir(&input).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/qwen3_moe");
        fs::copy(golden.join(file), input.join(file)).unwrap();
    }
    let settings = Settings {
        format: Some(Format::Nvfp4),
        numerics: Some(Numerics::CompressedTensors),
        ..Settings::default()
    };
    let quantize = Quantize {
        format: Some(CheckpointFormat::CompressedTensors),
        input_scales: Some(InputScales::read(&stats.join("input_amax.json")).unwrap()),
        ..Quantize::new(settings)
    };
    let checkpoint = Checkpoint::open(&input).unwrap();
    let plan = quantize.plan(&checkpoint).unwrap();
    let unseen = statistics.index()["unseen_experts"].as_object().unwrap();
    let warned = plan.warnings.iter().find_map(|warning| match warning {
        Warning::File { names, problem: FileProblem::WithoutTokens, .. } => Some(names),
        _ => None,
    });
    let mut warned: Vec<_> = warned.unwrap().iter().map(|layer| format!("{layer}.weight")).collect();
    warned.sort();
    assert_eq!(warned, unseen.keys().cloned().collect::<Vec<_>>());
    plan.run(&out, &microscale::Device::Cpu, &mut |_| ControlFlow::Continue(())).unwrap();

    let scales = tensors(&out.join("model.safetensors"));
    let amax: HashMap<String, f32> =
        serde_json::from_str(&fs::read_to_string(stats.join("input_amax.json")).unwrap()).unwrap();
    for weight in unseen.keys() {
        let module = weight.strip_suffix(".weight").unwrap();
        let (layer, expert) = module.split_once(".experts.").unwrap();
        let (_, part) = expert.split_once('.').unwrap();
        let is_other = |name: &str| name.starts_with(layer) && name.ends_with(part);
        let others = amax.iter().filter(|(name, _)| name.contains(".experts.") && is_other(name));
        let largest = others.map(|(_, amax)| *amax).fold(0.0, f32::max);
        let scale = &scales[&format!("{module}.input_global_scale")];
        assert!(amax[module] == 0.0 && largest > 0.0, "{module}");
        assert_eq!(scale.to_vec1::<f32>().unwrap(), [2688.0 / largest], "{module}");
    }
}
