//! Hostile recipe files, applied to a small checkpoint.

use std::fmt::Write;

use microscale::{Device, Words};
use microscale_checkpoint::{Checkpoint, Quantize, Recipes};
use safetensors::tensor::Dtype;

use super::draw::Draw;
use super::everything::{HELD, Watched, go_on};
use crate::Scratch;

/// Keys of the file and of its rules.
const KEYS: &[&str] = &[
    "format",
    "numerics",
    "search",
    "include",
    "exclude",
    "keep_first_layers",
    "keep_last_layers",
    "global_scale",
    "search_global",
    "non_finite",
    "hadamard",
    "scale_rule",
    "ties",
    "to",
    "kept",
    "tensors",
    "match",
    "keep",
];

/// Valid and invalid values of keys.
const VALUES: &[&str] = &[
    "\"nvfp4\"",
    "\"mxfp4\"",
    "\"mxfp8-e4m3\"",
    "\"full\"",
    "\"window\"",
    "\"*\"",
    "\"none\"",
    "\"floor\"",
    "\"propagate\"",
    "\"[a\"",
    "\"**/{a,[!b]}?\"",
    "[\"*q_proj*\", \"*\"]",
    "[]",
    "{}",
    "true",
    "1",
    "32",
    "-1",
    "9223372036854775807",
    "1e-40",
    "nan",
    "inf",
    "1979-05-27",
];

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let (files, ..) = draw.one_of(&HELD);
    let text =
        if draw.once_in(2) { lines(&mut draw) } else { String::from_utf8_lossy(draw.rest()).into_owned() };
    let recipes = match Recipes::parse(&text, "recipe.toml") {
        Ok(recipes) => recipes,
        Err(error) => return drop(error.to_string()),
    };
    let scratch = Scratch::new();
    let tensor = |name| (name, Dtype::F32, vec![2, 64], vec![0x3F; 512]);
    let tensors = [
        tensor("model.layers.0.self_attn.q_proj.weight"),
        tensor("model.layers.0.self_attn.k_proj.weight"),
        tensor("model.layers.1.mlp.down_proj.weight"),
        tensor("lm_head.weight"),
    ];
    let checkpoint = Checkpoint::open(&scratch.write_tensors("x.safetensors", &tensors)).unwrap();
    let _ = recipes.unmatched(&checkpoint);
    let quantize = Quantize { recipes, format: Some(files), ..Quantize::default() };
    let plan = match quantize.plan(&checkpoint) {
        Ok(plan) => plan,
        Err(error) => return drop(error.to_string()),
    };
    let _ = plan.to_json().to_string();
    Watched::new(&scratch, "OUT.safetensors").write(|out| plan.run(out, &Device::Cpu, &mut go_on));
}

/// Returns a file of a few entries and tables.
fn lines(draw: &mut Draw<'_>) -> String {
    let mut text = String::new();
    for _ in 0..draw.below(8) {
        let key = draw.one_of(KEYS);
        let value = draw.one_of(VALUES);
        let _ = match draw.below(8) {
            0 => writeln!(text, "[[{key}]]"),
            1 => writeln!(text, "[{key}]"),
            2 => writeln!(text, "{key} = {:?}", draw.text()),
            3 => writeln!(text, "{key} = \"{}\"", draw.one_of(microscale::Numerics::WORDS).0),
            _ => writeln!(text, "{key} = {value}"),
        };
    }
    text
}
