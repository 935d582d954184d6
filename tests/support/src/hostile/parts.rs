//! Hostile `OUT.parts` folders: wrong notes, and other file types in place of shards.
//!
//! Only the user writes there. But leftovers of a killed run or a full disk must not cause a crash.

use std::fs;
use std::path::Path;

use microscale::Device;
use microscale_checkpoint::{Checkpoint, Part, Quantize, merge};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::checkpoints::{HEADER_WORDS, names};
use super::draw::Draw;
use super::everything::go_on;
use crate::Scratch;

/// Fragments of notes.
const WORDS: &[&str] = &[
    "\"fingerprint\":",
    "\"bytes\":",
    "\"checksum\":",
    "\"names\":",
    "\"tensor_bytes\":18446744073709551615",
    "\"tensors\":",
    "\"config\":null",
    "\"config\":{}",
    "18446744073709551615",
    "[[\"a\",[\"b\"]]]",
    "null",
];

const SHARDS: [&str; 2] = ["one.safetensors", "sub/two.safetensors"];

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let scratch = Scratch::new();
    let tensor = |name| (name, Dtype::F32, vec![2, 32], vec![0x3F; 256]);
    scratch.write_tensors("in/one.safetensors", &[tensor("a.q_proj.weight")]);
    scratch.write_tensors("in/sub/two.safetensors", &[tensor("b.weight")]);
    scratch.write_index("in", &[("a.q_proj.weight", SHARDS[0]), ("b.weight", SHARDS[1])]);
    scratch.write("in/config.json", "{}");
    let before = scratch.contents();

    let (out, parts) = (scratch.path("OUT"), scratch.path("OUT.parts"));
    let (input, device, go_on) = (Checkpoint::open(&scratch.path("in")).unwrap(), &Device::Cpu, &mut go_on);
    let quantize = |part| Quantize { part: Some(part), ..Quantize::default() }.plan(&input).unwrap();
    quantize(Part { index: 1, of: 1 }).run(&out, device, go_on).unwrap();

    for shard in SHARDS {
        let note = format!("{shard}.note.json");
        if !draw.once_in(3) {
            damage_note(&mut draw, &parts.join(&note));
        }
        if draw.once_in(6) {
            let what = if draw.once_in(2) { &note } else { shard };
            replace(&mut draw, &parts.join(what));
        }
    }
    let part = Part { index: 1, of: 1 + draw.below(3) };
    if draw.once_in(2) {
        let _ = quantize(part).run(&out, device, go_on);
    }
    let merged = merge(&input, &out, go_on);
    assert_eq!(merged.is_ok(), out.exists(), "{merged:?}");
    if merged.is_ok() {
        for shard in SHARDS {
            assert!(out.join(shard).symlink_metadata().unwrap().is_file(), "{shard} is a link");
        }
    } else {
        let _ = quantize(part).run(&out, device, go_on);
        let _ = merge(&input, &out, go_on);
    }
    let mut after = scratch.contents();
    after.retain(|path, _| !path.starts_with(&out) && !path.starts_with(&parts));
    assert_eq!(before, after, "something else was written");
}

fn damage_note(draw: &mut Draw<'_>, path: &Path) {
    let honest = fs::read(path).unwrap();
    let note = match draw.below(3) {
        0 => {
            let mut note = honest;
            let words = if draw.once_in(2) { HEADER_WORDS } else { WORDS };
            draw.damage(&mut note, words);
            note
        }
        1 => {
            let mut note: Value = serde_json::from_slice(&honest).unwrap();
            for _ in 0..1 + draw.below(3) {
                let (field, value) = field(draw);
                note[field] = value;
            }
            note_text(note)
        }
        _ => draw.bytes().to_vec(),
    };
    fs::write(path, note).unwrap();
}

/// The text of a note whose own checksum fits, whatever it says.
pub fn note_text(mut note: Value) -> Vec<u8> {
    if let Some(note) = note.as_object_mut() {
        note.shift_remove("note_checksum");
    }
    let text = note.to_string();
    let members = text.trim_start_matches('{');
    format!(r#"{{"note_checksum":"{:032x}",{members}"#, xxh3_128(members.as_bytes())).into()
}

/// Returns a field of a note with a value of the right type.
fn field(draw: &mut Draw<'_>) -> (&'static str, Value) {
    match draw.below(7) {
        0 => ("tensor_bytes", draw.size().into()),
        1 => ("bytes", draw.size().into()),
        2 => ("fingerprint", draw.text().into()),
        3 => ("checksum", draw.text().into()),
        4 => {
            let renamed: Vec<_> =
                (0..draw.below(3)).map(|_| json!([names(draw), [names(draw), names(draw)]])).collect();
            ("names", renamed.into())
        }
        5 => ("config", json!({ draw.text(): draw.text(), "quantization_config": draw.size() })),
        _ => ("tensors", json!([draw.text(), draw.size(), { draw.text(): null }])),
    }
}

/// Replaces a file with something that is not a regular file.
fn replace(draw: &mut Draw<'_>, path: &Path) {
    fs::remove_file(path).unwrap();
    match draw.below(5) {
        0 => fs::create_dir(path).unwrap(),
        1 => crate::make_pipe(path),
        #[cfg(unix)]
        2 | 3 => {
            let target =
                draw.one_of(&["one.safetensors", "..", "/dev/zero", "../in/one.safetensors", "nowhere"]);
            std::os::unix::fs::symlink(target, path).unwrap();
        }
        _ => {}
    }
}
