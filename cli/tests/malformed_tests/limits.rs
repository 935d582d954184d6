//! False sizes and counts that would cost memory or time.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use microscale_checkpoint::Part;
use microscale_test_support::hostile::note_text;
use microscale_test_support::{Scratch, header, raw_file, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{refused, refused_file, sharded};

#[test]
fn tensors_beyond_everything_that_can_be_addressed() {
    // Each size is valid, but the end of the data overflows.
    let size = (1u64 << 61) - 1;
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let mut tensors: Vec<_> = (0..8u64).map(|i| (size, i * size, (i + 1) * size)).collect();
    tensors.push((7, 8 * size, 8 * size + 7));
    assert_eq!(tensors[8].2, u64::MAX);
    let text: Vec<_> = tensors
        .iter()
        .map(|(size, start, end)| (format!("[{size}]"), start.to_string(), end.to_string()))
        .collect();
    let described: Vec<_> = names
        .iter()
        .zip(&text)
        .map(|(name, (shape, start, end))| (*name, "U8", shape.as_str(), start.as_str(), end.as_str()))
        .collect();
    refused_file(raw_file(header(&described), &[0; 64]), &["tensor a", "the file has only 64 bytes of data"]);
}

#[test]
fn entries_that_are_no_tensors_are_not_kept() {
    let zeros = format!("[{}0]", "0,".repeat(1 << 20));
    refused_file(raw_file(format!(r#"{{"a": {zeros}}}"#), &[]), &["tensor a"]);
    refused_file(raw_file(format!(r#"{{"__metadata__": {{"a": {zeros}}}}}"#), &[]), &["invalid type"]);
    refused_file(raw_file(r#"{"__metadata__": {}, "__metadata__": {}}"#, &[]), &["__metadata__ twice"]);
}

#[test]
fn entries_of_metadata_are_counted() {
    let metadata = |entries: usize| {
        let entries: Vec<_> = (0..entries).map(|number| format!("\"{number}\":\"\"")).collect();
        raw_file(format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(",")), &[])
    };
    refused_file(metadata((1 << 20) + 1), &["__metadata__ has more than the 1048576 entries allowed"]);
    let scratch = Scratch::new();
    run(&[&"inspect", &scratch.write("in.safetensors", metadata(1 << 12))]).ok();
}

#[test]
fn json_files_of_any_size_are_not_read() {
    for name in ["model.safetensors.index.json", "config.json", "hf_quant_config.json"] {
        let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
        // A sparse file, which takes no disk space.
        let file = File::create(scratch.path("in").join(name)).unwrap();
        file.set_len(1 << 40).unwrap();
        // `refused` would read the whole file to compare it.
        for command in ["inspect", "doctor"] {
            run(&[&command, &scratch.path("in")]).fails_with(&[name, "100 MB"]);
        }
        run(&[&"quantize", &scratch.path("in"), &"--out", &scratch.path("OUT")])
            .fails_with(&[name, "100 MB"]);
        assert!(!scratch.path("OUT").exists());
    }
}

/// Compiled patterns take much more memory than their text, and the pattern library panics at its
/// limit.
#[test]
fn patterns_of_any_length_are_not_compiled() {
    let scratch = Scratch::new();
    let bytes = |cols: usize| vec![0x33; cols];
    let plain = ("b.weight", Dtype::F32, vec![2, 32], bytes(256));
    let tensors = [
        ("a.weight_packed", Dtype::U8, vec![2, 16], bytes(32)),
        ("a.weight_scale", Dtype::U8, vec![2, 1], bytes(2)),
        plain,
    ];
    scratch.write_tensors("in/model.safetensors", &tensors);
    for pattern in ["?".repeat(2 << 20), "{a,b}".repeat(1 << 18), "[!a]".repeat(1 << 18)] {
        let group = json!({ "weights": { "num_bits": 4 } });
        let quantization = json!({
            "quant_method": "compressed-tensors", "config_groups": { "group_0": group }, "ignore": [pattern],
        });
        scratch.write("in/config.json", json!({ "quantization_config": quantization }).to_string());
        let doctor = run(&[&"doctor", &scratch.path("in"), &"--json", &"-"]);
        let findings: Value = serde_json::from_str(&doctor.stdout).unwrap();
        // A pattern beyond the limit is a finding, and matches nothing.
        let found = findings["findings"].as_array().unwrap();
        assert!(found.iter().any(|finding| finding["defect"] == "config"), "{doctor:#?}");
        assert!(found.iter().all(|finding| finding["tensor"] != "b.weight"), "{doctor:#?}");
    }
}

/// Writes a checkpoint in two shards and its `OUT.parts`.
fn in_parts() -> (Scratch, PathBuf) {
    let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
    quantize_part(&scratch, "1/1");
    let parts = scratch.path("OUT.parts");
    (scratch, parts)
}

fn quantize_part(scratch: &Scratch, part: &str) {
    run(&[&"quantize", &scratch.path("in"), &"--out", &scratch.path("OUT"), &"--part", &part]).ok();
}

#[test]
fn one_part_of_very_many() {
    let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
    let most = usize::MAX;
    assert_eq!(format!("{most}/{most}").parse(), Ok(Part { index: most, of: most }));
    for part in [format!("1/{most}"), format!("2/{most}"), format!("{most}/{most}")] {
        quantize_part(&scratch, &part);
    }
    run(&[&"merge", &scratch.path("in"), &"--out", &scratch.path("OUT")]).ok();
}

/// Changes a note.
fn change(note: &Path, field: &str, value: Value) {
    let mut json: Value = serde_json::from_slice(&fs::read(note).unwrap()).unwrap();
    json[field] = value;
    fs::write(note, note_text(json)).unwrap();
}

#[test]
fn false_notes_are_not_trusted() {
    let (scratch, parts) = in_parts();
    let notes = ["one", "two"].map(|shard| parts.join(format!("{shard}.safetensors.note.json")));
    notes.iter().for_each(|note| change(note, "tensor_bytes", u64::MAX.into()));
    let merge = || run(&[&"merge", &scratch.path("in"), &"--out", &scratch.path("OUT")]);
    merge().fails_with(&["of 2 shards", "OUT.parts"]);
    assert!(!scratch.path("OUT").exists());
    // The parts are made again.
    quantize_part(&scratch, "1/1");
    merge().ok();
}

#[cfg(target_os = "linux")]
#[test]
fn pipes_and_links_among_parts() {
    use microscale_test_support::make_pipe;
    let (scratch, parts) = in_parts();
    let merge = || run(&[&"merge", &scratch.path("in"), &"--out", &scratch.path("OUT")]);
    let (shard, note) = (parts.join("one.safetensors"), parts.join("one.safetensors.note.json"));
    fs::remove_file(&note).unwrap();
    make_pipe(&note);
    merge().fails_with(&["1 of 2 shards", "one.safetensors"]);
    fs::remove_file(&note).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &note).unwrap();
    merge().fails_with(&["1 of 2 shards", "one.safetensors"]);
    quantize_part(&scratch, "1/1");
    // A shard that is a pipe has no bytes, and a note may claim that.
    fs::remove_file(&shard).unwrap();
    make_pipe(&shard);
    change(&note, "bytes", 0.into());
    change(&note, "tensor_bytes", 0.into());
    merge().fails_with(&["1 of 2 shards", "one.safetensors"]);
    quantize_part(&scratch, "1/1");
    // A link to a shard in another directory is accepted, and the output has a file in its place.
    fs::rename(&shard, scratch.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink("../elsewhere", &shard).unwrap();
    merge().ok();
    assert!(scratch.path("OUT/one.safetensors").symlink_metadata().unwrap().is_file());
    run(&[&"inspect", &scratch.path("OUT")]).ok();
}

/// Sizes in a header are checked against the file before memory is allocated.
#[test]
fn headers_of_sparse_files_are_refused() {
    let scratch = Scratch::new();
    let path = scratch.write("x.safetensors", 99_999_999u64.to_le_bytes());
    File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    run(&[&"inspect", &path]).fails_with(&["x.safetensors", "not JSON"]);
    let gguf = scratch
        .write("x.gguf", [&b"GGUF\x03\0\0\0"[..], &[0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0, 0].repeat(2)].concat());
    File::options().write(true).open(&gguf).unwrap().set_len(1 << 40).unwrap();
    run(&[&"inspect", &gguf]).fails_with(&["x.gguf", "more than the 1048576 tensors allowed"]);
    let small = sharded(&[]);
    small.write("in/model.safetensors.index.json", "{}");
    refused(&small, &small.path("in"), &["weight_map"]);
}

/// Each limit in docs/limits.md, with a file within it and a file beyond it.
#[test]
fn names_dimensions_and_tensors_have_limits() {
    let inspect = |header: &str| {
        let scratch = Scratch::new();
        run(&[&"inspect", &scratch.write("x.safetensors", raw_file(header, &[]))])
    };
    let empty = |name: &str, shape: &str| {
        format!(r#"{{"{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}}}"#)
    };
    let printed = inspect(&empty(&"n".repeat(1024), "[0]")).ok();
    assert!(printed.len() < 2000, "a long name is not printed whole: {printed}");
    for length in [1025, 20 << 20] {
        let refused = inspect(&empty(&"n".repeat(length), "[0]"));
        let bytes = format!("has {length} bytes, more than the 1024 allowed");
        refused.fails_with(&["x.safetensors", &bytes]);
        assert!(refused.stderr.len() < 1000);
    }
    let zeros = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
    inspect(&empty("a", &zeros(64))).ok();
    for count in [65, 10 << 20] {
        let dimensions = format!("it has {count} dimensions, more than the 64 allowed");
        inspect(&empty("a", &zeros(count))).fails_with(&["x.safetensors", "tensor a", &dimensions]);
    }
    let tensors = |count: usize| {
        let entries: Vec<_> = (0..count).map(|i| empty(&i.to_string(), "[0]")).collect();
        let entries: Vec<_> = entries.iter().map(|entry| &entry[1..entry.len() - 1]).collect();
        inspect(&format!("{{{}}}", entries.join(",")))
    };
    tensors((1 << 20) + 1).fails_with(&["x.safetensors", "more than the 1048576 tensors allowed"]);
}

#[test]
fn indexes_have_the_limits_of_headers() {
    let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
    let index = |name: String| {
        let index = json!({ "weight_map": { name: "one.safetensors" } });
        scratch.write("in/model.safetensors.index.json", index.to_string());
        run(&[&"inspect", &scratch.path("in")])
    };
    index("n".repeat(1025)).fails_with(&["model.safetensors.index.json", "1025 bytes, more than the 1024"]);
}

#[test]
fn gguf_has_limits_on_what_it_counts() {
    let scratch = Scratch::new();
    for (tensors, entries, what) in [
        ((1u64 << 20) + 1, 0u64, "more than the 1048576 tensors"),
        (0, (1 << 20) + 1, "more than the 1048576 allowed"),
    ] {
        let counts = [tensors.to_le_bytes(), entries.to_le_bytes()].concat();
        let path = scratch.write("x.gguf", [&b"GGUF\x03\0\0\0"[..], &counts].concat());
        // A sparse file that is long enough for all of them.
        File::options().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
        run(&[&"inspect", &path]).fails_with(&["x.gguf", what]);
    }
}

#[cfg(unix)]
#[test]
fn recipes_without_an_end_are_not_read() {
    let scratch = sharded(&[]);
    let out = scratch.path("OUT");
    let refused = run(&[&"quantize", &scratch.path("in"), &"--out", &out, &"--recipe", &"/dev/zero"]);
    refused.fails_with(&["/dev/zero", "more than the 1048576 bytes allowed of a recipe"]);
}
