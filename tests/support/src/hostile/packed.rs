//! Valid files with arbitrary values, and a recipe to quantize them by.
//!
//! The values include NaN scales, signed scales, and codes and floats of every bit pattern.

use microscale::{Device, NonFinite, Recipe, Search, Words};
use microscale_checkpoint::{Checkpoint, Plan, Selection, quantize};

use super::checkpoints::{Template, encode};
use super::draw::Draw;
use super::everything::{HELD, Watched, Ways, everything, go_on};
use crate::{Scratch, raw_file};

const SEARCHES: &[Search] = &[Search::None, Search::FourSix, Search::Window, Search::Full];

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let (files, format, convention) = draw.one_of(&HELD);
    let search = draw.one_of(SEARCHES);
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
    let Ok(recipe) = Recipe::of(format, convention) else { return };
    let recipe = Recipe { search, non_finite, ..recipe };
    let Ok(mut plan) = Plan::new(&checkpoint, &Selection::default(), recipe, files) else { return };
    if choices & 1 != 0 {
        let _ = plan.search_global_scales();
    }
    if choices & 2 != 0 {
        let _ = plan.check_searches();
    }
    if choices & 4 != 0 {
        plan.collect_details(3);
    }
    if choices & 8 != 0 {
        let _ = plan.take_global_scales(&checkpoint).map(drop);
    }
    if choices & 16 != 0 {
        let _ = plan.take_importance(&checkpoint).map(drop);
    }
    let summary =
        Watched::new(&scratch, "OUT.safetensors").write(|out| quantize(&plan, out, &Device::Cpu, &mut go_on));
    let _ = summary.map(|summary| summary.to_json().to_string());
}
