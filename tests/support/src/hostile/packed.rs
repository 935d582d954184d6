//! Valid files with arbitrary values, and a recipe to quantize them by.
//!
//! The values include NaN scales, signed scales, and codes and floats of every bit pattern.

use microscale::{Device, NonFinite, Words};
use microscale_checkpoint::{Checkpoint, Quantize, Settings};

use super::checkpoints::{Template, encode};
use super::draw::Draw;
use super::everything::{HELD, Watched, Ways, everything, go_on};
use crate::cases::SEARCHES;
use crate::{Scratch, raw_file};

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let (files, format, numerics) = draw.one_of(&HELD);
    let search = draw.one_of(&SEARCHES);
    let policies: Vec<NonFinite> = NonFinite::WORDS.iter().map(|(_, policy)| *policy).collect();
    let (non_finite, choices) = (draw.one_of(&policies), draw.byte());

    let tensors = Template::draw(&mut draw).tensors(&mut draw);
    let header = encode(&mut draw, &tensors);
    let data: Vec<u8> = tensors.into_iter().flat_map(|tensor| tensor.bytes).collect();
    let scratch = Scratch::new();
    let path = scratch.write("x.safetensors", raw_file(header, &data));
    everything(&scratch, &path, ways);

    // Opening never fails, because header and parts are valid. Later errors are about the values.
    let checkpoint = Checkpoint::open(&path).unwrap();
    let settings = Settings {
        format: Some(format),
        numerics: Some(numerics),
        search: Some(search),
        search_global: (choices & 1 != 0).then_some(true),
        non_finite: Some(non_finite),
        ..Settings::default()
    };
    let quantize = Quantize {
        format: Some(files),
        check_search: choices & 2 != 0,
        worst_blocks: (choices & 4 != 0).then_some(3),
        global_scales: (choices & 8 != 0).then(|| path.clone()),
        importance: (choices & 16 != 0).then(|| path.clone()),
        ..Quantize::new(settings)
    };
    let Ok(plan) = quantize.plan(&checkpoint) else { return };
    let summary =
        Watched::new(&scratch, "OUT.safetensors").write(|out| plan.run(out, &Device::Cpu, &mut go_on));
    let _ = summary.map(|summary| summary.to_json().to_string());
}
