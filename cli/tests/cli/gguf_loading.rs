//! GGUF files for llama.cpp: global scales that it applies, and models in several files.

use std::path::PathBuf;

use microscale_test_support::{Scratch, run};
use serde_json::Value;

use super::gguf::{F32, NVFP4, Stored, entry, file, parse, text};
use super::{floats, noise, quantize};

/// Returns the metadata of an architecture.
fn metadata(architecture: &str) -> Vec<Vec<u8>> {
    let mut value = Vec::new();
    text(&mut value, architecture);
    vec![entry("general.architecture", 8, &value)]
}

fn tensors(names: &[&str]) -> Vec<Stored> {
    names.iter().map(|name| (name.to_string(), vec![4, 64], F32, floats(&noise(256)))).collect()
}

/// Returns names and types of a file's tensors.
fn stored(path: PathBuf) -> Vec<(String, u32)> {
    let (_, tensors) = parse(&std::fs::read(path).unwrap());
    tensors.into_iter().map(|(name, _, kind, _)| (name, kind)).collect()
}

/// Returns the doctor's findings: defects and texts.
fn findings(path: PathBuf) -> Vec<(String, String)> {
    let found = run(&[&"doctor", &path, &"--json", &"-"]);
    let json: Value = serde_json::from_str(&found.stdout).unwrap();
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_string();
    let all = json["findings"].as_array().unwrap().iter();
    all.map(|finding| (text(finding, "defect"), text(finding, "what"))).collect()
}

const DEEPSEEK: &[&str] = &["blk.0.attn_q_a.weight", "blk.0.attn_output.weight", "token_embd.weight"];

#[test]
fn layers_without_a_global_scale_in_llama_cpp_are_copied() {
    let scratch = Scratch::new();
    let qwen2 = tensors(&["blk.0.attn_q.weight", "blk.0.ffn_up.weight", "position_embd.weight"]);
    let input = scratch.write("in.gguf", file(&metadata("qwen2"), &qwen2));
    let out = quantize(&scratch, &input, "out.gguf", &["--format", "nvfp4"]).ok();
    assert!(out.contains("llama.cpp's qwen2 takes no global scale for it"), "{out}");
    let expected = [
        ("blk.0.attn_q.weight", NVFP4),
        ("blk.0.attn_q.scale", F32),
        ("blk.0.ffn_up.weight", F32),
        ("position_embd.weight", F32),
    ];
    assert_eq!(stored(scratch.path("out.gguf")), expected.map(|(name, kind)| (name.to_string(), kind)));
    assert_eq!(findings(scratch.path("out.gguf")), []);

    // Without global scales all layers are quantized, and no global scale is stored.
    quantize(&scratch, &input, "none.gguf", &["--format", "nvfp4", "--global-scale", "none"]).ok();
    let expected =
        [("blk.0.attn_q.weight", NVFP4), ("blk.0.ffn_up.weight", NVFP4), ("position_embd.weight", F32)];
    assert_eq!(stored(scratch.path("none.gguf")), expected.map(|(name, kind)| (name.to_string(), kind)));
    run(&[&"doctor", &scratch.path("none.gguf"), &"--against", &input]).ok();
    run(&[&"convert", &scratch.path("none.gguf"), &"--to", &"gguf", &"--out", &scratch.path("again.gguf")])
        .ok();
    assert_eq!(stored(scratch.path("again.gguf")), stored(scratch.path("none.gguf")));
}

#[test]
fn the_doctor_finds_global_scales_that_llama_cpp_does_not_know() {
    let scratch = Scratch::new();
    let llama = tensors(&["blk.0.attn_output.weight", "blk.0.ffn_up.weight"]);
    let input = scratch.write("in.gguf", file(&metadata("llama"), &llama));
    quantize(&scratch, &input, "out.gguf", &["--format", "nvfp4"]).ok();
    let (_, mut all) = parse(&std::fs::read(scratch.path("out.gguf")).unwrap());
    let deepseek = scratch.write("deepseek.gguf", file(&metadata("deepseek2"), &all));
    let found = findings(deepseek);
    assert!(
        found.len() == 2
            && found
                .iter()
                .all(|(defect, what)| defect == "unread-global-scale" && what.contains("does not multiply")),
        "{found:?}"
    );
    for (name, ..) in &mut all {
        *name = name.replace("attn_output", "attn_q_a");
    }
    let found = findings(scratch.write("other.gguf", file(&metadata("llama"), &all)));
    let [(defect, what)] = &found[..] else { panic!("{found:?}") };
    assert!(
        defect == "unread-global-scale" && what.contains("llama.cpp's llama has no blk.0.attn_q_a.scale"),
        "{what}"
    );
}

/// Writes a model in two files, both with the number of all its tensors.
fn split(scratch: &Scratch) -> PathBuf {
    for (part, names) in
        [&DEEPSEEK[..1], &["blk.0.attn_q.weight", "blk.0.ffn_up.weight"][..]].into_iter().enumerate()
    {
        let mut entries = if part == 0 { metadata("llama") } else { Vec::new() };
        entries.push(entry("split.no", 2, &(part as u16).to_le_bytes()));
        entries.push(entry("split.count", 2, &2u16.to_le_bytes()));
        entries.push(entry("split.tensors.count", 5, &3i32.to_le_bytes()));
        scratch.write(format!("IN/m-0000{}-of-00002.gguf", part + 1), file(&entries, &tensors(names)));
    }
    scratch.path("IN")
}

/// Returns the number of tensors in a file's header.
fn stated(path: PathBuf) -> i32 {
    let (entries, _) = parse(&std::fs::read(path).unwrap());
    let (_, raw) = entries.into_iter().find(|(key, _)| key == "split.tensors.count").unwrap();
    i32::from_le_bytes(raw[raw.len() - 4..].try_into().unwrap())
}

#[test]
fn every_file_of_a_split_model_counts_the_scales_of_all() {
    let scratch = Scratch::new();
    let input = split(&scratch);
    quantize(&scratch, &input, "OUT", &["--format", "nvfp4"]).ok();
    let files = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let out = |file: &str| scratch.path(format!("OUT/{file}"));
    assert_eq!(
        files.map(|file| stored(out(file)).len()),
        [1, 4],
        "a scale for each that llama.cpp multiplies with"
    );
    assert_eq!(files.map(|file| stated(out(file))), [5, 5]);
    assert_eq!(findings(scratch.path("OUT")), []);
    let back = scratch.path("BACK");
    run(&[&"dequantize", &scratch.path("OUT"), &"--dtype", &"f32", &"--out", &back]).ok();
    assert_eq!(files.map(|file| stated(back.join(file))), [3, 3]);
    // Parts give the same result.
    for part in ["1/2", "2/2"] {
        quantize(&scratch, &input, "PARTS", &["--format", "nvfp4", "--part", part]).ok();
    }
    run(&[&"merge", &input, &"--out", &scratch.path("PARTS")]).ok();
    for file in files {
        let bytes = |out: &str| std::fs::read(scratch.path(format!("{out}/{file}"))).unwrap();
        assert!(bytes("OUT") == bytes("PARTS"), "{file}");
    }
    // The doctor checks the counts.
    std::fs::copy(input.join(files[1]), out(files[1])).unwrap();
    let found = findings(scratch.path("OUT"));
    assert!(
        found[0].0 == "config" && found[0].1.contains("split.tensors.count is 5, but the 2 files have 3"),
        "{found:?}"
    );
}

#[test]
fn one_file_of_a_split_model_is_refused_if_its_tensors_become_more() {
    let scratch = Scratch::new();
    let second = split(&scratch).join("m-00002-of-00002.gguf");
    let refused = quantize(&scratch, &second, "out.gguf", &["--format", "nvfp4"]);
    // The second file has no architecture, so the names of global scales are unknown.
    assert_eq!(refused.code, Some(1), "{refused:#?}");
    let (mut entries, all) = parse(&std::fs::read(&second).unwrap());
    entries.splice(..0, [("general.architecture".into(), metadata("llama").remove(0))]);
    let entries: Vec<_> = entries.into_iter().map(|(_, raw)| raw).collect();
    let alone = scratch.write("alone.gguf", file(&entries, &all));
    let refused = quantize(&scratch, &alone, "out.gguf", &["--format", "nvfp4"]);
    refused.fails_with(&[
        "one of the 2 files",
        "2 tensors would become 4",
        "the directory that holds all 2",
        "--merge",
    ]);
    assert!(!scratch.path("out.gguf").exists());
    for more in [&["--format", "mxfp4"][..], &["--format", "nvfp4", "--global-scale", "none"]] {
        let out = format!("{}.gguf", more.len());
        quantize(&scratch, &alone, &out, more).ok();
        assert_eq!(stated(scratch.path(&out)), 3);
    }
}
