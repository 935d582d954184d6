//! The example's model on the sample checkpoints.

use std::path::{Path, PathBuf};

use candle_core::{Device, Result, Tensor};
use microscale::{ActivationPrecision, Format, Numerics};
use microscale_checkpoint::CheckpointFormat;

mod samples;
mod story;

use story::{Held, Llama, PROMPT, greedy};

fn sample() -> PathBuf {
    samples::sample("tiny-story")
}

fn model(directory: &Path, held: Held) -> Result<Llama> {
    story::model(directory, held, &Device::Cpu)
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
    assert_eq!(greedy(model(&sample(), Held::Plain)?, EXPECTED.len())?, EXPECTED);
    Ok(())
}

#[test]
fn quantized_checkpoints_generate_what_their_dequantized_weights_do() -> Result<()> {
    let cases = [
        (Format::Mxfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::CompressedTensors, CheckpointFormat::CompressedTensors),
        (Format::Nvfp4, Numerics::Modelopt, CheckpointFormat::Modelopt),
    ];
    let original = model(&sample(), Held::Plain)?.forward(PROMPT, false)?;
    for (format, numerics, files) in cases {
        let directory = tempfile::tempdir()?;
        let out = directory.path().join("out");
        samples::quantized("tiny-story", &out, format, numerics, files);
        let (mut stored, mut plain) =
            (model(&out, Held::Stored(ActivationPrecision::Exact))?, model(&out, Held::Plain)?);
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
    samples::quantized("tiny-story", &out, Format::Mxfp4, Numerics::Ocp, files);
    let from_file =
        model(&out, Held::Stored(ActivationPrecision::Exact))?.forward(PROMPT, false)?.to_vec2::<f32>()?;
    let in_memory = model(&sample(), "mxfp4".parse().unwrap())?.forward(PROMPT, false)?.to_vec2::<f32>()?;
    assert_eq!(from_file, in_memory);
    Ok(())
}

#[test]
fn perplexity_counts_each_token_once() -> Result<()> {
    let mut model = model(&sample(), Held::Plain)?;
    // Computed here: every token after the start token, in chunks of four.
    let tokens: Vec<u32> = PROMPT[1..].iter().chain(EXPECTED).copied().take(7).collect();
    let mut sum = 0.0;
    for stretch in tokens.chunks(4) {
        for (i, token) in stretch.iter().enumerate() {
            model.reset();
            let seen = [&[0], &stretch[..i]].concat();
            let logits = model.forward(&seen, true)?.get(0)?.to_vec1::<f32>()?;
            let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            sum += total.ln() - f64::from(logits[*token as usize]);
        }
    }
    let (found, expected) = (model.loss(0, &tokens, 5)?, sum / tokens.len() as f64);
    assert!((found - expected).abs() < 1e-4, "{found}, and not {expected}");
    Ok(())
}
