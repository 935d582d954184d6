//! GPTQ of checkpoints, with the Hessians of a calibration.

mod story;

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use microscale::{
    Format, Global, GptqFactor, GptqOptions, GptqScales, HadamardWidth, Numerics, Recipe, Search, Shape,
    dequantize, hadamard_hessian, hadamard_rows, quantize, quantize_gptq,
};
use microscale_candle::Weights;
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Gptq, Logical, Quantize, Settings, Summary, calibration, logical,
};
use microscale_models::{
    CalibrateOptions, EvaluateOptions, Evaluated, Identity, InputFormat, QuantizedInputs, Window, calibrate,
    evaluate,
};
use serde_json::{Map, json};
use story::{Story, quantized, sample};

fn calibrated(story: &Story, windows: &[Window], hessians: bool, directory: &Path) {
    let options = CalibrateOptions { dtype: DType::F32, hessians };
    let (identity, go_on) = (Identity(Map::new()), &mut |_| ControlFlow::Continue(()));
    calibrate(&story.source, &story.config, windows, options, &identity, directory, go_on).unwrap();
}

/// Quantizes a checkpoint by GPTQ with a full search.
fn by_gptq(
    input: &Path,
    format: Format,
    statistics: &Path,
    out: &Path,
) -> microscale_checkpoint::Result<Summary> {
    transformed_by_gptq(input, (format, None), statistics, out)
}

/// The same under a transform of layers' inputs.
fn transformed_by_gptq(
    input: &Path,
    (format, hadamard): (Format, Option<HadamardWidth>),
    statistics: &Path,
    out: &Path,
) -> microscale_checkpoint::Result<Summary> {
    let checkpoint = Checkpoint::open(input)?;
    let settings = Settings {
        format: Some(format),
        numerics: Some(Numerics::CompressedTensors),
        search: Some(Search::Full),
        hadamard: Some(hadamard),
        ..Settings::default()
    };
    let quantize = Quantize {
        format: Some(CheckpointFormat::CompressedTensors),
        gptq: Some(Gptq::new(statistics)),
        ..Quantize::new(settings)
    };
    quantize.plan(&checkpoint)?.run(out, &microscale::Device::Cpu, &mut |_| ControlFlow::Continue(()))
}

fn hessian(statistics: &Path, layer: usize, name: &str) -> Vec<f32> {
    let file = statistics.join(format!("layer-{layer}.safetensors"));
    let tensors: HashMap<String, Tensor> = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    tensors[name].flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn checkpoints_have_the_bytes_of_the_library() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let (statistics, out) = (directory.path().join("stats"), directory.path().join("out"));
    calibrated(&story, &story.windows(Some(4)), true, &statistics);
    let summary = by_gptq(&sample(), Format::Nvfp4, &statistics, &out).unwrap();
    let outputs = summary.totals().outputs.unwrap();
    assert!(outputs[0].relative() < 0.7 * outputs[1].relative(), "{outputs:?}");

    let checkpoint = Checkpoint::open(&out).unwrap();
    let name = "model.layers.1.self_attn.q_proj.weight";
    let tensors = logical(&checkpoint).unwrap();
    let Some(Logical::Packed(packed)) = tensors.iter().find(|tensor| tensor.name() == name) else {
        panic!("{name} is not quantized")
    };
    let stored = packed.read().unwrap();
    let (rows, columns) = (stored.rows(), stored.cols());
    let entries = hessian(&statistics, 1, "model.layers.1.self_attn.qkv.hessian");
    let factor = GptqFactor::new(&entries, columns, Format::Nvfp4, GptqOptions::new()).unwrap();
    let weights: Tensor = story.source.weights().stored((rows, columns), name).unwrap();
    let weights: Vec<half::bf16> = weights.flatten_all().unwrap().to_vec1().unwrap();
    // q, k and v share their global scale.
    let recipe = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap();
    let recipe = recipe.with_global(Global::Given(stored.global_scale().unwrap()));
    let recipe = Recipe { search: Search::Full, ..recipe };
    let expected =
        quantize_gptq(&weights, Shape::new(rows, columns), &recipe, &factor, GptqScales::InLoop).unwrap();
    assert!(stored.codes() == expected.tensor.codes(), "other codes");
    assert!(stored.scales() == expected.tensor.scales(), "other scales");
}

#[test]
fn the_model_diverges_less() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let statistics = directory.path().join("stats");
    let windows = story.windows(Some(24));
    // Calibrated on some windows and measured on others.
    calibrated(&story, &windows[..16], true, &statistics);
    for format in [Format::Nvfp4, Format::Mxfp4] {
        let [plain, gptq] = ["plain", "gptq"].map(|name| directory.path().join(format!("{name}-{format}")));
        quantized(&plain, format, Numerics::CompressedTensors);
        by_gptq(&sample(), format, &statistics, &gptq).unwrap();
        let models = [plain, gptq].map(|directory| Story::open(&directory));
        let options = EvaluateOptions { dtype: DType::F32, layers: false };
        let found = evaluate(
            story.model(),
            &models.each_ref().map(Story::model),
            &windows[16..],
            options,
            &mut |_| ControlFlow::Continue(()),
        );
        let [plain, gptq] = [0, 1].map(|i| found.as_ref().unwrap().others[i].divergence);
        assert!(gptq.mean + gptq.margin < 0.8 * plain.mean, "{format}: {gptq:?}, plain {plain:?}");
    }
}

/// Weights and Hessians are transformed, and `calibrate` has the importance of transformed inputs.
#[test]
fn transformed_checkpoints_have_the_bytes_of_the_library_and_run() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let (statistics, out) = (directory.path().join("stats"), directory.path().join("out"));
    let windows = story.windows(Some(12));
    calibrated(&story, &windows[..4], true, &statistics);
    let width = HadamardWidth::W64;
    transformed_by_gptq(&sample(), (Format::Mxfp4, Some(width)), &statistics, &out).unwrap();

    let name = "model.layers.1.self_attn.q_proj.weight";
    let checkpoint = Checkpoint::open(&out).unwrap();
    let packed = checkpoint.quantized(name).unwrap();
    assert_eq!(packed.hadamard, Some(width));
    let stored = packed.read().unwrap();
    let (rows, columns) = (stored.rows(), stored.cols());
    let mut entries = hessian(&statistics, 1, "model.layers.1.self_attn.qkv.hessian");
    hadamard_hessian(&mut entries, columns, width);
    let importance = hessian(&statistics, 1, &format!("{name}.hadamard_64.importance"));
    for (column, mean) in importance.iter().enumerate() {
        let diagonal = entries[column * columns + column];
        assert!((mean - diagonal).abs() <= 1e-3 * diagonal, "{column}: {mean} {diagonal}");
    }
    let factor = GptqFactor::new(&entries, columns, Format::Mxfp4, GptqOptions::new()).unwrap();
    let weights: Tensor = story.source.weights().stored((rows, columns), name).unwrap();
    let mut weights: Vec<f32> =
        weights.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    hadamard_rows(&mut weights, width);
    let recipe = Recipe::of(Format::Mxfp4, Numerics::CompressedTensors).unwrap();
    let recipe = Recipe { search: Search::Full, ..recipe };
    let expected =
        quantize_gptq(&weights, Shape::new(rows, columns), &recipe, &factor, GptqScales::InLoop).unwrap();
    assert!(stored.codes() == expected.tensor.codes(), "other codes");
    assert!(stored.scales() == expected.tensor.scales(), "other scales");

    // Its model runs the transform, before inputs are quantized too.
    let plain = directory.path().join("plain");
    by_gptq(&sample(), Format::Mxfp4, &statistics, &plain).unwrap();
    let models = [plain, out].map(|directory| Story::open(&directory));
    let inputs =
        models.each_ref().map(|model| QuantizedInputs::new(model.source.clone(), InputFormat::Mxfp4));
    let others = [
        models[1].model(),
        Evaluated { source: &inputs[0], ..models[0].model() },
        Evaluated { source: &inputs[1], ..models[1].model() },
    ];
    let options = EvaluateOptions { dtype: DType::F32, layers: true };
    let go_on = &mut |_| ControlFlow::Continue(());
    let found = evaluate(story.model(), &others, &windows[4..], options, go_on).unwrap();
    let [weights, plain, transformed] = [0, 1, 2].map(|i| found.others[i].divergence.mean);
    assert!(weights < 0.5 * transformed && transformed < 0.95 * plain, "{weights} {plain} {transformed}");
    assert!(found.others[0].sqnr_db() > 17.0, "{}", found.others[0].sqnr_db());
}

#[test]
fn experts_without_tokens_are_quantized_without_gptq() {
    let (story, directory) = (Story::golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let (statistics, out, input) =
        (directory.path().join("stats"), directory.path().join("out"), directory.path().join("in"));
    let windows = [Window { inputs: vec![3, 50, 7], targets: vec![50, 7, 4] }];
    calibrated(&story, &windows, true, &statistics);
    // The model without its golden values.
    fs::create_dir(&input).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/qwen3_moe");
        fs::copy(golden.join(file), input.join(file)).unwrap();
    }
    // In MXFP4, where experts share no global scale.
    by_gptq(&input, Format::Mxfp4, &statistics, &out).unwrap();
    let [before, after] = [&input, &out].map(|path| Weights::open(path, DType::F32, &Device::Cpu).unwrap());
    let index = fs::read_to_string(statistics.join("calibration.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let unseen = index["unseen_experts"].as_object().unwrap();
    assert!(!unseen.is_empty());
    let recipe = Recipe::of(Format::Mxfp4, Numerics::CompressedTensors).unwrap();
    for name in unseen.keys().filter(|name| name.ends_with("down_proj.weight")) {
        let (before, after) = (values(&before, name), values(&after, name));
        let values: Vec<f32> = before.flatten_all().unwrap().to_vec1().unwrap();
        let (rows, columns) = before.dims2().unwrap();
        let recipe = Recipe { search: Search::Full, ..recipe };
        let plain = quantize(&values, Shape::new(rows, columns), &recipe).unwrap().tensor;
        assert_eq!(
            dequantize::<f32>(&plain),
            after.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            "{name}"
        );
    }
}

fn values(weights: &Weights, name: &str) -> Tensor {
    weights.get((64, 32), name).unwrap()
}

#[test]
fn other_calibrations_are_refused() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let out = directory.path().join("out");
    let refused = |statistics: &Path, words: &str| {
        let error = by_gptq(&sample(), Format::Nvfp4, statistics, &out).unwrap_err();
        let text = format!(
            "{error}: {}",
            std::error::Error::source(&error).map_or(String::new(), ToString::to_string)
        );
        assert!(text.contains(words), "{text}");
        assert!(!out.exists());
    };
    let without = directory.path().join("without");
    calibrated(&story, &story.windows(Some(1)), false, &without);
    refused(&without, "--skip-hessians");
    let moe = Story::golden("llama");
    let other = directory.path().join("other");
    let windows = [Window { inputs: vec![3, 50, 7], targets: vec![50, 7, 4] }];
    calibrated(&moe, &windows, true, &other);
    refused(&other, "calibrate this model");
    refused(&directory.path().join("missing"), "calibration.json");
}

#[test]
fn an_interrupted_calibration_is_refused_with_the_command_that_continues_it() {
    let (story, directory) = (Story::open(&sample()), tempfile::tempdir().unwrap());
    let [statistics, out] = ["stats", "out"].map(|name| directory.path().join(name));
    let run = [("model", json!("/models/story")), ("text", json!("/texts/a.txt"))];
    let identity = Identity(run.map(|(name, fact)| (name.to_string(), fact)).into_iter().collect());
    let options = CalibrateOptions { dtype: DType::F32, hessians: true };
    let windows = story.windows(Some(1));
    let calibrated = |last: usize| {
        calibrate(&story.source, &story.config, &windows, options, &identity, &statistics, &mut |at| {
            if at.layer > last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    };
    // Layer 0 has its statistics, and the others have none.
    calibrated(0).unwrap_err();
    let command = format!("microscale calibrate /models/story {} --text /texts/a.txt", statistics.display());
    let by_gptq = || by_gptq(&sample(), Format::Nvfp4, &statistics, &out);
    for refused in [by_gptq().unwrap_err(), calibration::importance(&statistics).unwrap_err()] {
        assert!(refused.to_string().contains(&command), "{refused}");
    }
    assert!(!out.exists());
    calibrated(usize::MAX).unwrap();
    assert!(calibration::importance(&statistics).unwrap().is_file());
    by_gptq().unwrap();
}
