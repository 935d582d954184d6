//! Malformed inputs and unwritable outputs: an error that names file and tensor, exit code 1, no
//! leftovers, and never a panic.

mod malformed_tests {
    #[cfg(unix)]
    mod entries;
    mod limits;

    use super::{refused, refused_file, sharded};
}

use std::path::Path;

use microscale_checkpoint::{self as checkpoint, Checkpoint, CheckpointFormat, Convert, Quantize};
use microscale_test_support::hostile::HEADER_WORDS;
use microscale_test_support::{Run, Scratch, command, header, raw_file, run, sample};
use proptest::prelude::*;
use safetensors::tensor::Dtype;

/// Asserts that every reading subcommand refuses the input with these words, and changes nothing.
#[track_caller]
fn refused(scratch: &Scratch, input: &Path, parts: &[&str]) {
    let before = scratch.contents();
    let out = scratch.path("OUT");
    run(&[&"quantize", &input, &"--out", &out]).fails_with(parts);
    run(&[&"dequantize", &input, &"--out", &out]).fails_with(parts);
    run(&[&"inspect", &input]).fails_with(parts);
    run(&[&"compare", &input, &sample()]).fails_with(parts);
    assert_eq!(before, scratch.contents());
}

/// Asserts that a single file with these bytes is refused.
#[track_caller]
fn refused_file(bytes: Vec<u8>, parts: &[&str]) {
    let scratch = Scratch::new();
    let input = scratch.write("bad.safetensors", bytes);
    refused(&scratch, &input, &[&["bad.safetensors"], parts].concat());
}

/// Returns one valid tensor of 4 × 32 floats.
fn good() -> (String, Vec<u8>) {
    (header(&[("fc.weight", "F32", "[4,32]", "0", "512")]), vec![0; 512])
}

#[test]
fn truncated_files_are_refused() {
    let (header, data) = good();
    let whole = raw_file(&header, &data);
    refused_file(vec![], &["0 bytes"]);
    refused_file(whole[..5].to_vec(), &["5 bytes"]);
    refused_file(whole[..40].to_vec(), &["header claims", "the file has 40"]);
    refused_file(whole[..whole.len() - 1].to_vec(), &["fc.weight", "ends at offset 512", "only 511 bytes"]);
    refused_file([&whole[..], &[0]].concat(), &["not fully covered"]);
}

#[test]
fn false_header_lengths_are_refused() {
    let (header, data) = good();
    for claimed in [0, 2, header.len() as u64 - 1, header.len() as u64 + 1] {
        let mut bytes = raw_file(&header, &data);
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        refused_file(bytes, &["its header is not"]);
    }
    for claimed in [u64::MAX, u64::MAX - 7, i64::MAX as u64, 1 << 32, 100_000_001] {
        let mut bytes = raw_file(&header, &data);
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        refused_file(bytes, &["header claims", "more than the 100 MB"]);
    }
}

#[test]
fn invalid_headers_are_refused() {
    refused_file(raw_file("not JSON", &[]), &["not JSON"]);
    refused_file(raw_file(b"\xFF\xFE{}", &[]), &["not UTF-8"]);
    refused_file(raw_file("[1, 2]", &[]), &["not a valid safetensors file"]);
    refused_file(raw_file("null", &[]), &["not a valid safetensors file"]);
    refused_file(raw_file("[".repeat(100_000), &[]), &["not JSON"]);
    refused_file(raw_file(r#"{"__metadata__": 3}"#, &[]), &["not a valid safetensors file"]);
    refused_file(raw_file(r#"{"fc.weight": {"dtype": "F32"}}"#, &[]), &["fc.weight", "missing field"]);
    refused_file(raw_file(r#"{"fc.weight": 7}"#, &[]), &["fc.weight"]);
}

#[test]
fn false_offsets_are_refused() {
    let two = |a: (&str, &str), b: (&str, &str)| {
        raw_file(
            header(&[("a.weight", "F32", "[32]", a.0, a.1), ("b.weight", "F32", "[32]", b.0, b.1)]),
            &[0; 256],
        )
    };
    refused_file(two(("0", "128"), ("64", "192")), &["tensor b.weight", "inside the tensor before it"]);
    refused_file(two(("0", "128"), ("0", "128")), &["tensor b.weight", "inside the tensor before it"]);
    refused_file(two(("0", "128"), ("132", "260")), &["tensor b.weight", "4 bytes too late"]);
    refused_file(two(("8", "136"), ("136", "264")), &["tensor a.weight", "8 bytes too late"]);
    refused_file(two(("0", "128"), ("128", "64")), &["tensor b.weight", "before its start"]);
    refused_file(two(("0", "128"), ("128", "260")), &["tensor b.weight", "needs 128 bytes", "span 132"]);
    refused_file(two(("0", "128"), ("128", "-1")), &["tensor b.weight"]);
    refused_file(two(("0", "128"), ("128", "1e3")), &["tensor b.weight"]);
    refused_file(two(("0", "128"), ("18446744073709551488", "18446744073709551615")), &["tensor b.weight"]);
}

#[test]
fn false_dtypes_and_shapes_are_refused() {
    let one = |dtype, shape, end| raw_file(header(&[("fc.weight", dtype, shape, "0", end)]), &[0; 512]);
    refused_file(one("F23", "[4,32]", "512"), &["tensor fc.weight", "unknown variant `F23`"]);
    refused_file(one("F16", "[4,32]", "512"), &["tensor fc.weight", "needs 256 bytes"]);
    refused_file(one("F32", "[4,33]", "512"), &["tensor fc.weight", "needs 528 bytes"]);
    refused_file(one("F32", "[4,-32]", "512"), &["tensor fc.weight"]);
    refused_file(one("F32", "\"4,32\"", "512"), &["tensor fc.weight"]);
    refused_file(one("F4", "[1023]", "512"), &["tensor fc.weight", "whole bytes"]);
    let huge = "[4294967296,4294967296,4294967296]";
    refused_file(one("F32", huge, "512"), &["tensor fc.weight", "more elements than can be counted"]);
    refused_file(one("F32", "[4611686018427387904,4]", "512"), &["tensor fc.weight", "more elements"]);
    refused_file(one("F32", "[18446744073709551616]", "512"), &["tensor fc.weight"]);
}

#[test]
fn a_tensor_described_twice() {
    let entry = r#""a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}"#;
    refused_file(raw_file(format!("{{{entry}, {entry}}}"), &[0; 4]), &["tensor a twice"]);
}

#[test]
fn shapes_whose_elements_are_none_do_not_overflow() {
    // Valid, but the product of the other sizes overflows, or means petabytes of rows.
    let scratch = Scratch::new();
    let huge = "[4294967295,4294967295,0]";
    let file = header(&[
        ("a.weight", "F32", "[9223372036854775807,0]", "0", "0"),
        ("b.weight", "F32", huge, "0", "0"),
    ]);
    let input = scratch.write("empty.safetensors", raw_file(file, &[]));
    run(&[&"inspect", &input]).ok();
    run(&[&"quantize", &input, &"--out", &scratch.path("OUT")]).fails_with(&["no tensor to quantize"]);
}

/// Writes a directory with two shards and an index.
fn sharded(entries: &[(&str, &str)]) -> Scratch {
    let scratch = Scratch::new();
    let tensor = |name| (name, Dtype::F32, vec![4, 32], vec![0; 512]);
    scratch.write_tensors("in/one.safetensors", &[tensor("a.weight")]);
    scratch.write_tensors("in/two.safetensors", &[tensor("b.weight")]);
    scratch.write_index("in", entries);
    scratch
}

#[test]
fn an_index_that_disagrees_with_its_shards() {
    let (one, two, three) = ("one.safetensors", "two.safetensors", "three.safetensors");
    let disagrees = |entries: &[(&str, &str)], parts: &[&str]| {
        let scratch = sharded(entries);
        refused(&scratch, &scratch.path("in"), &[&["model.safetensors.index.json"], parts].concat());
    };
    disagrees(&[("a.weight", one), ("b.weight", three)], &["three.safetensors is missing", "b.weight"]);
    disagrees(&[("a.weight", one), ("c.weight", two)], &["two.safetensors lacks tensor c.weight"]);
    disagrees(&[("a.weight", two), ("b.weight", one)], &["a.weight", "it is in ", "one.safetensors"]);
    let too_many = [("a.weight", one), ("b.weight", two), ("c.weight", two)];
    disagrees(&too_many, &["two.safetensors lacks tensor c.weight"]);
}

#[test]
fn an_index_that_points_elsewhere() {
    for shard in [
        "../one.safetensors",
        "/etc/passwd",
        "in/../../one.safetensors",
        "one.safetensors/../../one.safetensors",
        "..",
        "",
        ".",
        "./",
        "./..",
        "./../one.safetensors",
        "/",
        "a\0b",
        "one.safetensors\0",
    ] {
        let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", shard)]);
        scratch.write_tensors("one.safetensors", &[("b.weight", Dtype::F32, vec![4, 32], vec![0; 512])]);
        refused(
            &scratch,
            &scratch.path("in"),
            &["index.json", "b.weight", "not a path inside the checkpoint"],
        );
    }
}

#[test]
fn a_whole_model_is_read_instead_of_an_index_without_its_shards() {
    let tensor = |name| (name, Dtype::F32, vec![4, 32], vec![0; 512]);
    for (whole, index) in [
        ("model.safetensors", "model.safetensors.index.json"),
        ("model.safetensors", "other.safetensors.index.json"),
    ] {
        let scratch = Scratch::new();
        scratch.write_tensors(format!("in/{whole}"), &[tensor("a.weight")]);
        scratch.write_tensors("in/one.safetensors", &[tensor("a.weight")]);
        let text = r#"{"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}"#;
        scratch.write(format!("in/{index}"), text);
        let done = run(&[&"quantize", &scratch.path("in"), &"--out", &scratch.path("OUT"), &"--skip-others"]);
        assert_eq!(done.code, Some(0), "{done:#?}");
        for part in [index, "two.safetensors, which is missing", "remove the index"] {
            assert!(done.stderr.contains(part), "{done:#?}");
        }
        assert!(!done.stderr.contains("download"), "{done:#?}");
        assert!(scratch.path("OUT").join(whole).exists() && !scratch.path("OUT").join(index).exists());
    }
}

#[test]
fn an_index_that_is_no_index() {
    for (text, part) in [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ("{}", "weight_map"),
        (r#"{"weight_map": []}"#, "weight_map"),
        (r#"{"weight_map": {"a.weight": 1}}"#, "weight_map"),
    ] {
        let scratch = sharded(&[]);
        scratch.write("in/model.safetensors.index.json", text);
        refused(&scratch, &scratch.path("in"), &["model.safetensors.index.json", part]);
    }
}

#[test]
fn directories_without_clear_weights() {
    let scratch = Scratch::new();
    scratch.write("in/config.json", "{}");
    refused(
        &scratch,
        &scratch.path("in"),
        &["holds no *.safetensors, *.gguf, *.bin, *.pt or *.pth file with weights"],
    );
    refused(&scratch, &scratch.path("nowhere"), &["cannot open", "nowhere"]);

    let tensor = |name| (name, Dtype::F32, vec![4, 32], vec![0; 512]);
    scratch.write_tensors("twice/x.safetensors", &[tensor("a.weight")]);
    scratch.write_tensors("twice/y.safetensors", &[tensor("a.weight")]);
    refused(&scratch, &scratch.path("twice"), &["a.weight", "x.safetensors", "y.safetensors"]);

    let both = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
    both.write_tensors("in/model.safetensors", &[tensor("a.weight")]);
    refused(&both, &both.path("in"), &["both claim to be the weights"]);

    std::fs::create_dir_all(scratch.path("odd/model.safetensors.index.json")).unwrap();
    std::fs::create_dir_all(scratch.path("odd/model.safetensors")).unwrap();
    refused(
        &scratch,
        &scratch.path("odd"),
        &["holds no *.safetensors, *.gguf, *.bin, *.pt or *.pth file with weights"],
    );
}

#[test]
fn a_config_that_is_not_json_or_says_quantized() {
    let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")]);
    scratch.write("in/config.json", "{,}");
    refused(&scratch, &scratch.path("in"), &["config.json is not valid JSON"]);
    scratch.write("in/config.json", r#"{"quantization_config": {"quant_method": "gptq"}}"#);
    let before = scratch.contents();
    let (input, out) = (scratch.path("in"), scratch.path("OUT"));
    run(&[&"quantize", &input, &"--out", &out]).fails_with(&["config.json", "gptq", "already"]);
    run(&[&"dequantize", &input, &"--out", &out])
        .fails_with(&["no quantized tensor", "remove quantization_config"]);
    assert_eq!(before, scratch.contents());
}

#[test]
fn names_that_collide() {
    let scratch = Scratch::new();
    let weight = || ("a.weight", Dtype::F32, vec![4, 32], vec![0; 512]);
    let taken = ("a.weight_scale", Dtype::F32, vec![1], vec![0; 4]);
    let input = scratch.write_tensors("x.safetensors", &[weight(), taken]);
    let out = scratch.path("OUT");
    run(&[&"quantize", &input, &"--out", &out]).fails_with(&["a.weight becomes a.weight_scale"]);
    let packed = |name, cols: usize| (name, Dtype::U8, vec![4, cols], vec![0; 4 * cols]);
    let tensors = [weight(), packed("a.weight_packed", 16), packed("a.weight_scale", 1)];
    let input = scratch.write_tensors("y.safetensors", &tensors);
    run(&[&"dequantize", &input, &"--out", &out]).fails_with(&["a.weight_packed becomes a.weight"]);
    assert!(!out.exists());
}

#[test]
fn packed_tensors_that_do_not_fit() {
    let packed = |dtype, shape: &[usize]| {
        let bytes = shape.iter().product::<usize>() * dtype_bytes(dtype);
        ("a.weight_packed", dtype, shape.to_vec(), vec![0; bytes])
    };
    let scale = |dtype, shape: &[usize]| {
        let bytes = shape.iter().product::<usize>() * dtype_bytes(dtype);
        ("a.weight_scale", dtype, shape.to_vec(), vec![0; bytes])
    };
    for (tensors, part) in [
        (vec![packed(Dtype::U8, &[4, 16])], "a.weight_scale, are missing"),
        (
            vec![packed(Dtype::U8, &[4, 16]), scale(Dtype::U8, &[4, 2])],
            "shape [4, 16] and scales of shape [4, 2]",
        ),
        (vec![packed(Dtype::U8, &[4, 16]), scale(Dtype::U8, &[4])], "are not mxfp4"),
        (vec![packed(Dtype::U8, &[4, 17]), scale(Dtype::U8, &[4, 1])], "are not mxfp4"),
        (vec![packed(Dtype::U8, &[]), scale(Dtype::U8, &[])], "are not mxfp4"),
        (
            vec![packed(Dtype::I32, &[4, 4]), scale(Dtype::BF16, &[4, 1])],
            "integers (INT4 or INT8, pack-quantized)",
        ),
        (
            vec![packed(Dtype::U8, &[4, 16]), scale(Dtype::F8_E4M3, &[4, 2])],
            "its global scale, a.weight_global_scale, is missing",
        ),
        (vec![packed(Dtype::U8, &[4, 16]), scale(Dtype::F8_E4M3, &[4, 1])], "are not nvfp4 blocks of 16"),
        (vec![packed(Dtype::U8, &[4, 12]), scale(Dtype::F8_E4M3, &[4, 1])], "are not nvfp4 blocks of 16"),
        (vec![packed(Dtype::U8, &[4, 16]), scale(Dtype::F8_E5M2, &[4, 2])], "U8 with scales of F8_E5M2"),
    ] {
        let scratch = Scratch::new();
        let input = scratch.write_tensors("x.safetensors", &tensors);
        let out = scratch.path("OUT");
        let parts = ["x.safetensors", "a.weight_packed", part];
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        run(&[&"compare", &input, &input]).fails_with(&parts);
        // `inspect` still works, to find the cause.
        let text = run(&[&"inspect", &input]).ok();
        assert!(text.contains("cannot be read") && text.contains(part), "{text}");
        assert!(!out.exists());
    }
}

fn dtype_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

#[test]
fn outputs_that_cannot_be_created() {
    let scratch = Scratch::new();
    scratch.write("file", "");
    scratch.write("full/x", "");
    let quantize = |out: &str| run(&[&"quantize", &sample(), &"--out", &scratch.path(out)]);
    let before = scratch.contents();
    quantize("nowhere/OUT").fails_with(&["no directory", "nowhere", "create it first"]);
    quantize("file/OUT").fails_with(&["no directory", "file"]);
    quantize("file").fails_with(&["file exists", "name an output that does not"]);
    quantize("full").fails_with(&["full exists", "or an empty directory"]);
    assert_eq!(before, scratch.contents());
}

#[cfg(unix)]
#[test]
fn an_output_directory_without_permission() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("locked")).unwrap();
    std::fs::set_permissions(scratch.path("locked"), PermissionsExt::from_mode(0o555)).unwrap();
    // Root may write anywhere, so the test has no effect for root.
    if std::fs::write(scratch.path("locked/probe"), "").is_err() {
        let run = run(&[&"quantize", &sample(), &"--out", &scratch.path("locked/OUT")]);
        run.fails_with(&["cannot create", "locked"]);
    }
}

/// A limit on file sizes replaces a full disk: writing fails in the middle of a tensor.
#[cfg(unix)]
#[test]
fn an_output_that_is_full() {
    let scratch = Scratch::new();
    let before = scratch.contents();
    let with_limit = |subcommand: &str, input: &Path, blocks: u32| {
        let mut shell = std::process::Command::new("sh");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        let program = command(&[&"x"]).get_program().to_os_string();
        shell
            .args(["-c", &script, "sh"])
            .arg(program)
            .arg(subcommand)
            .arg(input)
            .arg("--out")
            .arg(scratch.path("OUT"));
        Run::new(shell)
    };
    // Without any block, even the lock file cannot be written.
    for (blocks, message) in [(0, "cannot create"), (8, "cannot write"), (64, "cannot write")] {
        with_limit("quantize", &sample(), blocks).fails_with(&[message, "File too large"]);
        assert_eq!(before, scratch.contents(), "{blocks} blocks");
    }
    // The weights fit, but another file does not.
    let other = Scratch::new();
    other.write_tensors("in/model.safetensors", &[("a.weight", Dtype::F32, vec![4, 32], vec![0; 512])]);
    other.write("in/tokenizer.json", vec![b' '; 1 << 20]);
    with_limit("quantize", &other.path("in"), 16).fails_with(&["cannot write", "tokenizer.json"]);
    assert_eq!(before, scratch.contents());
}

#[test]
fn shapes_that_differ_cannot_be_compared() {
    let scratch = Scratch::new();
    let tensor = |shape: &[usize]| ("a.weight", Dtype::F32, shape.to_vec(), vec![0; 512]);
    let a = scratch.write_tensors("a.safetensors", &[tensor(&[4, 32])]);
    let b = scratch.write_tensors("b.safetensors", &[tensor(&[8, 16])]);
    run(&[&"compare", &a, &b]).fails_with(&[
        "a.weight",
        "[4, 32]",
        "a.safetensors",
        "[8, 16]",
        "b.safetensors",
    ]);
}

/// Products of sizes with a zero, which overflow in one order and not in another.
#[test]
fn sizes_next_to_a_zero_may_be_anything() {
    let scratch = Scratch::new();
    let (any, blocks) = ("[0,4294967296,4294967296]", "[0,4294967296,4294967296,16]");
    let bytes = raw_file(
        header(&[
            ("a.experts.down_proj_blocks", "U8", blocks, "0", "0"),
            ("a.experts.down_proj_scales", "U8", any, "0", "0"),
            ("b.experts.down_proj", "BF16", "[4294967296,0,4294967296]", "0", "0"),
            ("c.experts.down_proj", "BF16", any, "0", "0"),
        ]),
        &[],
    );
    let file = scratch.write("x.safetensors", bytes);
    read_everything(&file);
    run(&[&"dequantize", &file, &"--out", &scratch.path("OUT")]).ok();
    run(&[&"inspect", &scratch.path("OUT")]).ok();
}

/// The shard has only scales, which are written with their codes. If it stayed as an empty shard, it
/// would look like all weights.
#[test]
fn a_shard_of_which_nothing_is_left() {
    let scratch = Scratch::new();
    let bytes = |name, cols: usize| (name, Dtype::U8, vec![4, cols], vec![0x33; 4 * cols]);
    scratch.write_tensors("in/one.safetensors", &[bytes("a.weight_packed", 16)]);
    scratch.write_tensors("in/model.safetensors", &[bytes("a.weight_scale", 1)]);
    let entries = [("a.weight_packed", "one.safetensors"), ("a.weight_scale", "model.safetensors")];
    scratch.write_index("in", &entries);
    let out = scratch.path("OUT");
    run(&[&"dequantize", &scratch.path("in"), &"--out", &out]).ok();
    assert!(!out.join("model.safetensors").exists());
    let text = run(&[&"inspect", &out]).ok();
    assert!(text.contains("a.weight"), "{text}");
}

/// Runs all reading operations on a file, if it opens.
fn read_everything(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    for checkpoint_format in [CheckpointFormat::CompressedTensors, CheckpointFormat::GptOss] {
        let quantize = Quantize { format: Some(checkpoint_format), ..Quantize::default() };
        let _ = quantize.plan(&checkpoint).map(|plan| plan.to_json());
    }
    let _ = checkpoint::inspect(&checkpoint);
    let device = &microscale::Device::Cpu;
    let mut go_on = |_: checkpoint::Progress<'_>| std::ops::ControlFlow::Continue(());
    let _ = checkpoint::compare(&checkpoint, &checkpoint, device, &mut go_on);
    let _ = checkpoint::diagnose(&checkpoint, Some(&checkpoint), device, &mut go_on);
    let out = tempfile::tempdir().unwrap();
    for checkpoint_format in
        [CheckpointFormat::CompressedTensors, CheckpointFormat::Modelopt, CheckpointFormat::GptOss]
    {
        let out = out.path().join("out");
        let _ = Convert::new(checkpoint_format).run(&checkpoint, &out, device, &mut go_on);
    }
}

/// Yields bytes that replace a part of a file: a byte or a word.
fn scrap() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_map(|byte| vec![byte]);
    prop_oneof![byte, prop::sample::select(HEADER_WORDS).prop_map(|word| word.into())]
}

/// Changes of a file: offset, number of replaced bytes, and new bytes.
type Scraps = Vec<(prop::sample::Index, usize, Vec<u8>)>;

/// Damages the first 400 bytes. The data of tensors after them has no structure to damage.
fn damage(bytes: &mut Vec<u8>, scraps: Scraps) {
    for (at, replaced, scrap) in scraps {
        let at = at.index(bytes.len().min(400));
        bytes.splice(at..(at + replaced).min(bytes.len()), scrap);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn damage_anywhere_never_panics(
        scraps in prop::collection::vec((any::<prop::sample::Index>(), 0usize..12, scrap()), 1..4),
        what in 0..3,
    ) {
        let scratch = Scratch::new();
        let bytes = |name, dtype, cols| (name, dtype, vec![4, cols], vec![3; 4 * cols]);
        let tensors = [
            bytes("a_packed", Dtype::U8, 16),
            bytes("a_scale", Dtype::U8, 1),
            ("b.weight", Dtype::F32, vec![4, 32], vec![0; 512]),
            bytes("c_packed", Dtype::U8, 8),
            bytes("c_scale", Dtype::F8_E4M3, 1),
            ("c_global_scale", Dtype::F32, vec![1], vec![0, 0, 0, 0x40]),
            bytes("d", Dtype::F8_E4M3, 32),
            bytes("d_scale", Dtype::U8, 1),
            bytes("e.weight", Dtype::U8, 8),
            bytes("e.weight_scale", Dtype::F8_E4M3, 1),
            ("e.weight_scale_2", Dtype::F32, vec![], vec![0, 0, 0, 0x40]),
            ("f.experts.down_proj_blocks", Dtype::U8, vec![1, 2, 1, 16], vec![3; 32]),
            ("f.experts.down_proj_scales", Dtype::U8, vec![1, 2, 1], vec![3; 2]),
        ];
        let file = scratch.write_tensors("in/x.safetensors", &tensors);
        let index = scratch.write_index("in", &tensors.map(|(name, ..)| (name, "x.safetensors")));
        let damaged = if what == 0 { index } else { file.clone() };
        let mut bytes = std::fs::read(&damaged).unwrap();
        if what == 1 {
            // The stored header length stays correct. Otherwise most inputs would fail at that
            // check.
            let data = bytes.split_off(8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize);
            let mut header = bytes.split_off(8);
            damage(&mut header, scraps);
            bytes = raw_file(header, &data);
        } else {
            damage(&mut bytes, scraps);
        }
        std::fs::write(damaged, bytes).unwrap();
        read_everything(&scratch.path("in"));
        read_everything(&file);
    }
}
