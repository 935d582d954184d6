//! Hostile files of input scales, and plans with them.
//!
//! The file consists of arbitrary bytes, or of an object of layer names and numbers that may be
//! damaged.

use microscale::Format;
use microscale_checkpoint::{Checkpoint, CheckpointFormat, InputScales, Quantize, Settings};
use safetensors::tensor::Dtype;

use super::draw::Draw;
use crate::Scratch;

/// Names that the file may have: of layers of the model, in each form, and of others.
const NAMES: [&str; 8] = [
    "a.q_proj",
    "a.q_proj.weight",
    "a.k_proj.input_scale",
    "a.v_proj.input_global_scale",
    "b",
    "b.weight.input_scale",
    "",
    "\\u0061.q_proj",
];

/// Numbers as JSON has them, and values that are none.
const NUMBERS: [&str; 10] = ["1", "0", "-0.0", "2688", "1e-45", "3.5e38", "1e400", "-1", "null", "\"1\""];

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let text = if draw.below(4) == 0 { draw.rest().to_vec() } else { drafted(&mut draw) };
    let scratch = Scratch::new();
    let path = scratch.write("scales.json", text);
    let weight = |name| {
        let values = (0..64).map(|i| (i as f32).sin());
        (name, Dtype::F32, vec![2, 32], values.flat_map(f32::to_le_bytes).collect())
    };
    let tensors = ["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "b.weight"].map(weight);
    let model = scratch.write_tensors("model.safetensors", &tensors);
    let Ok(scales) = InputScales::read(&path) else { return };
    let Ok(model) = Checkpoint::open(&model) else { unreachable!("the model is sound") };
    let settings = Settings { format: Some(Format::Nvfp4), ..Settings::default() };
    let quantize = Quantize { format: Some(CheckpointFormat::Modelopt), ..Quantize::new(settings) };
    assert!(quantize.plan(&model).is_ok(), "the model is sound");
    // Unused names are listed; anything else is a scale in range or an error.
    let _ = Quantize { input_scales: Some(scales), ..quantize }.plan(&model);
}

/// An object of names and numbers.
fn drafted(draw: &mut Draw<'_>) -> Vec<u8> {
    let members = (0..draw.below(6))
        .map(|_| format!("\"{}\": {}", draw.one_of(&NAMES), draw.one_of(&NUMBERS)))
        .collect::<Vec<_>>();
    let mut text = format!("{{{}}}", members.join(", ")).into_bytes();
    if draw.below(3) == 0 {
        draw.damage(&mut text, &["{", "}", "\"", ":", "[", "1e99999", "\\ud800", "NaN"]);
    }
    text
}
