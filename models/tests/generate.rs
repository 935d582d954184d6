//! The example's model on the sample checkpoints.

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use microscale::{Format, Numerics};
use microscale_candle::Weights;
use microscale_checkpoint::CheckpointFormat;
use microscale_models::{Config, Model};

#[path = "../examples/generate/layers.rs"]
mod layers;
mod story;

use layers::{Held, Stored};
use story::{quantized_to, sample};

/// The start token, and "It was a truth universally".
const PROMPT: &[u32] = &[0, 1020, 305, 259, 1899, 468, 73, 1178, 557];

/// Loads the model in a directory.
fn model_on(directory: &Path, held: Held, device: &Device) -> Model {
    let weights = Weights::open(directory, DType::F32, device).unwrap();
    Model::load(&Stored(weights, held), &Config::read(directory).unwrap(), DType::F32).unwrap()
}

fn model(directory: &Path, held: Held) -> Model {
    model_on(directory, held, &Device::Cpu)
}

/// Generates tokens after the prompt, always the one with the largest logit.
fn greedy(mut model: Model, count: usize) -> Result<Vec<u32>> {
    let mut tokens = vec![model.next(PROMPT)?];
    while tokens.len() < count {
        tokens.push(model.next(&tokens[tokens.len() - 1..])?);
    }
    Ok(tokens)
}

fn largest(x: &Tensor) -> f32 {
    x.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

/// The tokens that transformers 5.23.0 with torch 2.15.0 generates after the prompt.
///
/// Computed in f32 with the weights as stored.
const EXPECTED: &[u32] = &[
    1379, 430, 267, 670, 12, 283, 267, 1220, 649, 643, 267, 1220, 649, 12, 531, 267, 694, 692, 1479, 418,
    1142, 12, 267, 1220, 649, 602, 267, 649, 12, 267, 1220, 649,
];

#[test]
fn the_model_is_that_of_transformers() -> Result<()> {
    let tokenizer = tokenizers::Tokenizer::from_file(sample().join("tokenizer.json")).unwrap();
    let prompt = tokenizer.encode("It was a truth universally", false).unwrap();
    assert_eq!(prompt.get_ids(), &PROMPT[1..]);
    assert_eq!(greedy(model(&sample(), Held::Plain), EXPECTED.len())?, EXPECTED);
    Ok(())
}

#[test]
fn quantized_checkpoints_generate_what_their_dequantized_weights_do() -> Result<()> {
    let cases = [
        (Format::Mxfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::Modelopt, CheckpointFormat::Modelopt),
    ];
    let original = model(&sample(), Held::Plain).forward(PROMPT, false)?;
    for (format, numerics, files) in cases {
        let directory = tempfile::tempdir()?;
        let out = directory.path().join("out");
        quantized_to(&out, format, numerics, files);
        let (mut stored, mut plain) = (model(&out, Held::Stored(None)), model(&out, Held::Plain));
        // Many tokens at a time, then one by one.
        let (found, expected) = (stored.forward(PROMPT, false)?, plain.forward(PROMPT, false)?);
        let off = largest(&(&found - &expected)?);
        assert!(off < 1e-4 * largest(&expected), "{files}: {off}");
        let lost = largest(&(&original - &expected)?);
        assert!(
            lost > 100.0 * off,
            "{files}: quantizing changed logits by {lost} alone, and products by {off}"
        );
        stored.reset();
        plain.reset();
        assert_eq!(greedy(stored, 24)?, greedy(plain, 24)?, "{files}");
    }
    Ok(())
}

#[test]
fn layers_quantized_in_memory_are_those_of_the_file() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let out = directory.path().join("out");
    let files = CheckpointFormat::CompressedTensors;
    quantized_to(&out, Format::Mxfp4, Numerics::Ocp, files);
    let from_file = model(&out, Held::Stored(None)).forward(PROMPT, false)?.to_vec2::<f32>()?;
    let in_memory = model(&sample(), "mxfp4".parse().unwrap()).forward(PROMPT, false)?.to_vec2::<f32>()?;
    assert_eq!(from_file, in_memory);
    Ok(())
}

/// With `MICROSCALE_REQUIRE_GPU=1` the test fails on a machine without a GPU.
#[cfg(feature = "cuda")]
#[test]
fn a_gpu_generates_what_the_cpu_does() {
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) if std::env::var("MICROSCALE_REQUIRE_GPU").is_ok() => panic!("{error}"),
        Err(_) => return,
    };
    let directory = tempfile::tempdir().unwrap();
    let quantized = directory.path().join("quantized");
    let files = CheckpointFormat::CompressedTensors;
    quantized_to(&quantized, Format::Nvfp4, Numerics::CompressedTensors, files);
    for (directory, held) in
        [(&sample(), "plain"), (&sample(), "nvfp4"), (&sample(), "mxfp4"), (&quantized, "stored")]
    {
        let [here, there] = [&Device::Cpu, &device].map(|device| {
            let mut model = model_on(directory, held.parse().unwrap(), device);
            let logits = model.forward(PROMPT, false).unwrap().to_device(&Device::Cpu).unwrap();
            model.reset();
            (logits, greedy(model, 32).unwrap())
        });
        let off = largest(&(&there.0 - &here.0).unwrap());
        assert!(off < 1e-4 * largest(&here.0), "{held}: {off}");
        assert_eq!(there.1, here.1, "{held}");
    }
}
