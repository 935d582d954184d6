//! The example's model and its generated tokens.

use std::path::Path;

use candle_core::{DType, Device, Result};
use microscale_candle::Weights;

#[path = "../../examples/generate/layers.rs"]
mod layers;
#[path = "../../examples/generate/llama.rs"]
#[expect(dead_code, reason = "the example's")]
mod llama;

pub(crate) use layers::Held;
use layers::Stored;
use llama::Config;
pub(crate) use llama::Llama;

/// The start token, and "It was a truth universally".
pub(crate) const PROMPT: &[u32] = &[0, 1020, 305, 259, 1899, 468, 73, 1178, 557];

/// Loads the model in a directory.
pub(crate) fn model(directory: &Path, held: Held, device: &Device) -> Result<Llama> {
    let config = std::fs::read_to_string(directory.join("config.json"))?;
    Llama::of(&Stored(Weights::open(directory, DType::F32, device)?, held), &Config::parse(&config)?)
}

/// Generates tokens after the prompt, always the one with the largest logit.
pub(crate) fn greedy(mut model: Llama, count: usize) -> Result<Vec<u32>> {
    let mut tokens = vec![model.next(PROMPT)?];
    while tokens.len() < count {
        tokens.push(model.next(&tokens[tokens.len() - 1..])?);
    }
    Ok(tokens)
}
