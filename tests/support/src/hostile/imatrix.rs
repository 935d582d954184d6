//! Hostile importance matrices in the old format, and quantization with them.
//!
//! The file consists of arbitrary bytes, or of entries whose counts and lengths may be wrong. The
//! old format precedes GGUF.

use microscale::{Device, Search};
use microscale_checkpoint::{Checkpoint, Quantize, Settings};
use safetensors::tensor::Dtype;

use super::draw::Draw;
use super::everything::{Watched, Ways, everything, go_on};
use crate::Scratch;

/// Columns of the layers that it applies to.
const COLS: usize = 32;

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let file = if draw.below(4) == 0 { draw.rest().to_vec() } else { drafted(&mut draw) };
    let scratch = Scratch::new();
    let path = scratch.write("x.dat", file);
    everything(&scratch, &path, ways);

    let weight = |name, shape: &[usize]| {
        let values = (0..shape.iter().product::<usize>()).map(|i| (i as f32).sin());
        (name, Dtype::F32, shape.to_vec(), values.flat_map(f32::to_le_bytes).collect())
    };
    let tensors = [weight("a.weight", &[2, COLS]), weight("e.weight", &[3, 2, COLS])];
    let model = scratch.write_tensors("model.safetensors", &tensors);
    let Ok(model) = Checkpoint::open(&model) else { unreachable!("the model is sound") };
    let settings = Settings { search: Some(Search::Full), ..Settings::default() };
    let quantize = Quantize { importance: Some(path), ..Quantize::new(settings) };
    let Ok(plan) = quantize.plan(&model) else { return };
    let summary =
        Watched::new(&scratch, "OUT.safetensors").write(|out| plan.run(out, &Device::Cpu, &mut go_on));
    assert!(summary.is_some(), "importance that was taken can be searched by");
}

fn drafted(draw: &mut Draw<'_>) -> Vec<u8> {
    let entries = 1 + draw.below(3);
    let claimed = if draw.once_in(8) { draw.size() as i32 } else { entries as i32 };
    let mut bytes = claimed.to_le_bytes().to_vec();
    for _ in 0..entries {
        let name = match draw.below(6) {
            0 => draw.text(),
            place => ["a.weight", "e.weight", "b.weight"][place % 3].into(),
        };
        let length = if draw.once_in(16) { draw.size() as i32 } else { name.len() as i32 };
        bytes.extend(length.to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(draw.one_of(&[1i32, 0, 7, -1, i32::MAX]).to_le_bytes());
        let numbers = draw.one_of(&[COLS, 3 * COLS, 1, 0]);
        let claimed = if draw.once_in(16) { draw.size() as i32 } else { numbers as i32 };
        bytes.extend(claimed.to_le_bytes());
        if draw.once_in(3) {
            bytes.extend(draw.fill(4 * numbers));
        } else {
            let number = draw.one_of(&[1f32, 0.0, -1.0, f32::NAN, f32::MAX, f32::MIN_POSITIVE]);
            bytes.extend(number.to_le_bytes().repeat(numbers));
        }
    }
    bytes
}
