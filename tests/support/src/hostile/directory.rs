//! Hostile checkpoint directories: contradicting indexes, configs and shards, and odd file types.
//!
//! Symlinks may form cycles or lead outside. Pipes and directories may have the names of files.

use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::{HEADER_WORDS, Stored, Template, encode, names};
use super::draw::Draw;
use super::everything::{Ways, everything};
use crate::{Scratch, raw_file};

const INDEX: &str = "model.safetensors.index.json";

/// Names of entries in the directory.
const FILES: &[&str] = &[
    "config.json",
    "hf_quant_config.json",
    INDEX,
    "other.safetensors.index.json",
    "model.safetensors",
    "one.safetensors",
    "two.safetensors",
    "sub/three.safetensors",
    "tokenizer.json",
    "sub",
    "sub/notes.txt",
    ".cache",
    "x.gguf",
];

/// Shard names that an index may contain.
const PLACES: &[&str] = &[
    "one.safetensors",
    "two.safetensors",
    "sub/three.safetensors",
    "model.safetensors",
    "../canary.safetensors",
    "sub/../../canary.safetensors",
    "/dev/zero",
    "/dev/null",
    "sub//three.safetensors",
    "sub/./three.safetensors",
    "one.safetensors/",
    "one.safetensors\0",
    ".",
    "..",
    "",
    "config.json",
    INDEX,
    "nowhere.safetensors",
    "x.gguf",
];

/// Targets of symlinks.
const TARGETS: &[&str] = &[
    ".",
    "..",
    "one.safetensors",
    "two.safetensors",
    "model.safetensors",
    INDEX,
    "config.json",
    "../canary.safetensors",
    "../nowhere",
    "/dev/zero",
    "/dev/null",
    "/dev/full",
    "sub",
    "../in/sub",
];

const WORDS: &[&str] = &[
    "\"compressed-tensors\"",
    "\"modelopt\"",
    "\"mxfp4\"",
    "\"NVFP4\"",
    "\"re:.*\"",
    "\"*\"",
    "\"[a\"",
    "{a,b}",
    "\"quant_method\":",
    "\"ignore\":",
    "\"weight_map\":",
    "\"metadata\":",
    "\"config_groups\":",
    "\"kv_cache_scheme\":",
    "\"hidden_size\":",
];

pub(super) fn run(bytes: &[u8]) {
    let mut draw = Draw::new(bytes);
    let ways = Ways(draw.byte());
    let scratch = Scratch::new();
    // Reads outside the directory would find this file.
    let canary = Stored { name: "canary".into(), dtype: "U8", shape: vec![2], bytes: vec![1, 2] };
    write_shard(&mut draw, &scratch, "canary.safetensors", &[canary]);
    std::fs::create_dir(scratch.path("in")).unwrap();

    let tensors = Template::draw(&mut draw).tensors(&mut draw);
    let mut map = serde_json::Map::new();
    // Most tensors are where the index says.
    let mut shards = std::collections::BTreeMap::<&str, Vec<Stored>>::new();
    for tensor in tensors {
        let place = draw.one_of(&PLACES[..4]);
        let said = if draw.once_in(8) { draw.one_of(PLACES) } else { place };
        let name = if draw.once_in(16) { names(&mut draw) } else { tensor.name.clone() };
        map.insert(name, said.into());
        shards.entry(place).or_default().push(tensor);
    }
    for (place, tensors) in &shards {
        write_shard(&mut draw, &scratch, &format!("in/{place}"), tensors);
    }
    if !draw.once_in(4) {
        let mut index =
            json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string().into_bytes();
        if draw.once_in(4) {
            draw.damage(&mut index, HEADER_WORDS);
        }
        scratch.write(Path::new("in").join(INDEX), index);
    }
    if !draw.once_in(3) {
        let mut config = config(&mut draw).to_string().into_bytes();
        if draw.once_in(2) {
            draw.damage(&mut config, WORDS);
        }
        scratch.write("in/config.json", config);
    }
    if draw.once_in(3) {
        let mut config = json!({ "quantization": quantization(&mut draw) }).to_string().into_bytes();
        draw.damage(&mut config, WORDS);
        scratch.write("in/hf_quant_config.json", config);
    }
    for _ in 0..draw.below(4) {
        oddity(&mut draw, &scratch);
    }
    everything(&scratch, &scratch.path("in"), ways);
    // Reads a single shard, or whatever has its name.
    everything(&scratch, &scratch.path("in/one.safetensors"), ways);
}

fn write_shard(draw: &mut Draw<'_>, scratch: &Scratch, name: &str, tensors: &[Stored]) {
    let header = encode(draw, tensors);
    let data: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.bytes.iter().copied()).collect();
    scratch.write(name, raw_file(header, &data));
}

/// Replaces a file with something that is not a regular or valid file.
fn oddity(draw: &mut Draw<'_>, scratch: &Scratch) {
    let path = scratch.path("in").join(draw.one_of(FILES));
    let Some(parent) = path.parent() else { return };
    if std::fs::create_dir_all(parent).is_err() {
        return;
    }
    // A nonempty folder stays.
    let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path));
    if path.symlink_metadata().is_ok() {
        return;
    }
    match draw.below(5) {
        0 => drop(std::fs::write(&path, draw.bytes())),
        1 => drop(std::fs::create_dir(&path)),
        #[cfg(unix)]
        2 => drop(std::os::unix::fs::symlink(draw.one_of(TARGETS), &path)),
        3 => crate::make_pipe(&path),
        _ => {}
    }
}

/// Returns a model config.
fn config(draw: &mut Draw<'_>) -> Value {
    let mut config = json!({ "architectures": ["LlamaForCausalLM"], "hidden_size": 64 });
    if !draw.once_in(3) {
        config["quantization_config"] = quantization(draw);
    }
    config
}

/// Returns a quantization entry with the keys of any checkpoint format.
fn quantization(draw: &mut Draw<'_>) -> Value {
    let method = draw.one_of(&["compressed-tensors", "modelopt", "mxfp4", "gptq", ""]);
    let ignored: Vec<Value> = (0..draw.below(3))
        .map(|_| if draw.once_in(2) { draw.text().into() } else { names(draw).into() })
        .collect();
    json!({
        "quant_method": method,
        "quant_algo": draw.one_of(&["NVFP4", "W4A16_NVFP4", "FP8"]),
        draw.one_of(&["ignore", "exclude_modules"]): ignored,
        "config_groups": { "group_0": { "weights": { "num_bits": draw.size(), "group_size": draw.size() } } },
        "kv_cache_scheme": draw.one_of(&[Some("FP8"), None, Some("x")]),
    })
}
