//! PyTorch's files as input: read without executing pickles, and written as safetensors.

use std::fs;
use std::path::PathBuf;

use microscale_test_support::{Scratch, TorchTensor, data_dir, run, torch_file, torch_pickle};
use serde_json::json;

use super::parts::files;
use super::{floats, noise, quantize, read_json, tensors};

/// Returns the bytes of a golden file.
fn golden(name: &str) -> Vec<u8> {
    fs::read(data_dir().join("tests/golden/pytorch").join(name)).unwrap()
}

/// Writes a model in two PyTorch files with an index, and the same in safetensors.
fn model(scratch: &Scratch) -> [PathBuf; 2] {
    for (folder, index, start, end, golden_end) in [
        ("BIN", "pytorch_model.bin.index.json", "pytorch_model", "bin", "pt"),
        ("ST", "model.safetensors.index.json", "model", "safetensors", "safetensors"),
    ] {
        let mut entries = serde_json::Map::new();
        for (number, name) in ["model", "training"].into_iter().enumerate() {
            let shard = format!("{start}-0000{}-of-00002.{end}", number + 1);
            scratch.write(format!("{folder}/{shard}"), golden(&format!("{name}.{golden_end}")));
            let all = tensors(&data_dir().join(format!("tests/golden/pytorch/{name}.safetensors")));
            entries.extend(all.into_keys().map(|tensor| (tensor, shard.clone().into())));
        }
        scratch
            .write(format!("{folder}/{index}"), json!({ "metadata": {}, "weight_map": entries }).to_string());
        scratch.write(format!("{folder}/config.json"), json!({ "model_type": "llama" }).to_string());
    }
    ["BIN", "ST"].map(|folder| scratch.path(folder))
}

#[test]
fn a_model_in_torchs_files_becomes_what_it_becomes_from_safetensors() {
    let scratch = Scratch::new();
    let [bin, st] = model(&scratch);
    // Files of the training are not part of the model.
    scratch.write("BIN/training_args.bin", "\u{80}");
    let options = ["--include", "parameter"];
    quantize(&scratch, &bin, "Q", &options).ok();
    quantize(&scratch, &st, "EXPECTED", &options).ok();
    assert_eq!(tensors(&scratch.path("Q")), tensors(&scratch.path("EXPECTED")));
    let [ours, expected] =
        ["Q", "EXPECTED"].map(|out| read_json(scratch.path(out).join("model.safetensors.index.json")));
    assert_eq!(
        ours["weight_map"].as_object().unwrap().len(),
        expected["weight_map"].as_object().unwrap().len()
    );
    for (tensor, shard) in expected["weight_map"].as_object().unwrap() {
        assert_eq!(&ours["weight_map"][tensor], shard, "{tensor}");
    }
    let written = files(&scratch.path("Q"));
    let pickles = written.keys().filter(|file| file.extension().is_some_and(|end| end == "bin"));
    assert!(pickles.eq([&PathBuf::from("training_args.bin")]), "{:?}", written.keys());
    for part in ["1/2", "2/2"] {
        quantize(&scratch, &bin, "OUT", &[&options[..], &["--part", part]].concat()).ok();
    }
    run(&[&"merge", &bin, &"--out", &scratch.path("OUT")]).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("Q")));
    let text = run(&[&"inspect", &bin]).ok();
    assert!(text.contains("transposed.weight") && text.contains("F8_E4M3 4×8"), "{text}");
    run(&[&"doctor", &scratch.path("Q"), &"--against", &bin]).ok();
    let text = run(&[&"compare", &bin, &st]).ok();
    assert!(text.contains("∞") && !text.contains("only in"), "{text}");
    // Weights in safetensors take precedence.
    scratch.write("BIN/model.safetensors", golden("training.safetensors"));
    assert!(run(&[&"inspect", &bin]).ok().contains("2 tensors in 1 file"));
}

#[test]
fn one_file_is_input_too() {
    let scratch = Scratch::new();
    scratch.write("IN/pytorch_model.bin", golden("training.pt"));
    scratch.write("IN/optimizer.pt", "whatever");
    let (input, file) = (scratch.path("IN"), scratch.write("x.pth", golden("training.pt")));
    quantize(&scratch, &input, "Q", &["--format", "nvfp4"]).ok();
    quantize(&scratch, &file, "Q.safetensors", &["--format", "nvfp4"]).ok();
    let (directory, alone) = (tensors(&scratch.path("Q")), tensors(&scratch.path("Q.safetensors")));
    assert!(directory.contains_key("fc.weight_packed") && directory.keys().eq(alone.keys()));
    assert!(directory.values().all(|(.., file)| file == "model.safetensors"));
    assert!(scratch.path("Q/optimizer.pt").exists());
    quantize(&scratch, &file, "Q.bin", &[]).fails_with(&["Q.bin", "would be safetensors", "Q.safetensors"]);
    // Two files with the same output name are refused before anything is written.
    scratch.write("TWO/a.bin", golden("training.pt"));
    scratch.write("TWO/a.pt", golden("model.pt"));
    quantize(&scratch, &scratch.path("TWO"), "NO", &[]).fails_with(&["a.bin", "a.pt"]);
}

const WHOLE: TorchTensor<'_> = TorchTensor {
    name: "a.weight",
    class: "FloatStorage",
    key: "0",
    offset: 0,
    shape: &[2, 32],
    strides: &[32, 1],
};

#[test]
fn a_transpose_is_quantized_by_its_values() {
    let scratch = Scratch::new();
    let values = noise(64 * 32);
    let transposed = TorchTensor { shape: &[32, 64], strides: &[1, 32], ..WHOLE };
    let file = torch_file(&torch_pickle(&[transposed]), &[("0", &floats(&values))]);
    let input = scratch.write("x.pt", file);
    let expected: Vec<f32> = (0..32 * 64).map(|i| values[i % 64 * 32 + i / 64]).collect();
    let twin = ("a.weight", safetensors::tensor::Dtype::F32, vec![32, 64], floats(&expected));
    let twin = scratch.write_tensors("y.safetensors", &[twin]);
    quantize(&scratch, &input, "X.safetensors", &[]).ok();
    quantize(&scratch, &twin, "Y.safetensors", &[]).ok();
    let [ours, expected] = ["X", "Y"].map(|out| tensors(&scratch.path(format!("{out}.safetensors"))));
    assert_eq!(ours["a.weight_packed"].2, expected["a.weight_packed"].2);
    assert_eq!(ours["a.weight_scale"].2, expected["a.weight_scale"].2);
}

/// Replaces the first occurrence of `part`.
fn replaced(bytes: &[u8], part: &[u8], by: &[u8]) -> Vec<u8> {
    let at = bytes.windows(part.len()).position(|found| found == part).unwrap();
    [&bytes[..at], by, &bytes[at + part.len()..]].concat()
}

#[test]
fn a_tensor_that_negates_its_storage_is_refused_by_its_name() {
    let v2 = torch_pickle(&[WHOLE]);
    let v3 = replaced(&v2, b"_v2", b"_v3");
    let v3 = replaced(&v3, b"torch\nFloatStorage", b"torch.storage\nUntypedStorage");
    let v3 = replaced(&v3, b"\x89}", b"\x89}ctorch\nfloat32\n");
    let parameter = replaced(&v2, b"ctorch._utils", b"ctorch._utils\n_rebuild_parameter\n(ctorch._utils");
    let parameter = replaced(&parameter, b"\x89}tR", b"\x89}tR\x89}tR");
    let (neg, conj) = (b"}X\x03\0\0\0neg\x88s", b"}X\x04\0\0\0conj\x88s");
    let text = b"X\x01\0\0\0x";
    // The bytes after the six or seven arguments of the tensor.
    let cases: [(&[u8], &[u8], &[&str]); 12] = [
        (&v2, b"", &[]),
        (&v2, b"N", &[]),
        (&v2, b"}", &[]),
        (&v3, b"}", &[]),
        (&parameter, b"}", &[]),
        (&v2, neg, &["a.weight", "\"neg\"", ".resolve_neg()"]),
        (&v2, conj, &["a.weight", "\"conj\""]),
        (&v3, neg, &["a.weight", "\"neg\""]),
        (&parameter, neg, &["a.weight", "\"neg\""]),
        (&v2, text, &["a.weight", "not a dictionary"]),
        (&v2, b"}N", &["Tensor is called with other arguments than torch.save gives"]),
        (&v3, b"}N", &["TensorOfBytes is called with other arguments than torch.save gives"]),
    ];
    let scratch = Scratch::new();
    for (number, (pickle, arguments, expected)) in cases.into_iter().enumerate() {
        let pickle = replaced(pickle, b"tR", &[arguments, b"tR"].concat());
        let file = scratch.write(format!("{number}.pt"), torch_file(&pickle, &[("0", &[0; 256])]));
        let inspected = run(&[&"inspect", &file]);
        match expected {
            [] => assert!(inspected.ok().contains("a.weight"), "{number}"),
            parts => inspected.fails_with(parts),
        }
    }
}

#[test]
fn repeated_pickle_values_are_shared_and_objects_are_counted() {
    let scratch = Scratch::new();
    let inspect = |pickle: &[u8]| {
        let file = scratch.write("x.pt", torch_file(pickle, &[("0", &[0; 256])]));
        run(&[&"inspect", &file])
    };
    let whole = torch_pickle(&[WHOLE]);
    let before = |first: &[u8]| [b"\x80\x02", first, &whole[2..]].concat();
    // A tuple of 40,000 numbers becomes torch.Size 40,000 times. Copies would take 6 GB.
    let sizes = [&b"ctorch\nSize\nq\0("[..], &b"N".repeat(40_000)[..], b"t\x85q\x01"].concat();
    inspect(&before(&[&sizes[..], &b"h\0h\x01R0".repeat(40_000), b"00"].concat())).ok();
    // One tensor of 64 dimensions is made a million times.
    let tuple = [&b"("[..], &b"K\x01".repeat(64), b"t"].concat();
    let start = [
        b"ctorch._utils\n_rebuild_tensor_v2\nq\0((X\x07\0\0\0storagectorch\nFloatStorage\n",
        &b"X\x01\0\0\x000NK\x01tQK\0"[..],
    ];
    let tensor = [&start.concat()[..], &tuple, &tuple, b"\x89}tq\x01"].concat();
    inspect(&before(&[&tensor[..], &b"h\0h\x01R0".repeat(1_000_000), b"00"].concat())).ok();
    // A million names have a dictionary of a million entries.
    let entries = [&b"}q\0("[..], &b"NN".repeat(1_000_000), b"u0"].concat();
    let names =
        (0u32..1_000_000).map(|name| [b"X\x08\0\0\0", format!("{name:08}").as_bytes(), b"h\0"].concat());
    let many = [b"\x80\x02", &entries[..], b"}(", &names.collect::<Vec<_>>().concat(), &whole[4..]].concat();
    inspect(&many).ok();
    for (what, count) in [(&b")"[..], 1 << 23), (b"(", 1 << 23), (b")\x94", 1 << 22), (b"N\x85", 1 << 22)] {
        inspect(&before(&what.repeat(count))).fails_with(&["x.pt", "more than the 8388608 values allowed"]);
    }
}

#[test]
fn forbidden_pickle_operations_are_refused_by_name() {
    let storage = [0u8; 256];
    let tensor = |tensor: TorchTensor<'_>| torch_pickle(&[tensor]);
    let nested = |keys: &[&str]| {
        let inside = tensor(WHOLE);
        let entry = |key: &&str| {
            let text = [&b"X"[..], &(key.len() as u32).to_le_bytes(), key.as_bytes()].concat();
            [text, inside[2..inside.len() - 1].to_vec()].concat()
        };
        [b"\x80\x02}(".to_vec(), keys.iter().flat_map(entry).collect(), b"u.".to_vec()].concat()
    };
    let cases: [(&str, Vec<u8>, &[&str]); 16] = [
        ("system", b"cos\nsystem\n(X\x02\0\0\0lstR.".to_vec(), &["os.system", "nothing of it was run"]),
        ("eval", b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.".to_vec(), &["builtins.eval"]),
        (
            "numpy",
            b"cnumpy.core.multiarray\n_reconstruct\n.".to_vec(),
            &["numpy.core.multiarray._reconstruct"],
        ),
        ("called", b"K\x01)R.".to_vec(), &["calls something that is not a function"]),
        ("build", b"K\x01}b.".to_vec(), &["an object with attributes is not a dictionary"]),
        ("import", b"S'x'\n.".to_vec(), &["instruction 0x53"]),
        ("end", b"\x80\x02}(".to_vec(), &["ends too early"]),
        ("stack", b"\x80\x02\x87.".to_vec(), &["takes more values than it has made"]),
        ("no dictionary", b"K\x01.".to_vec(), &["it is not a dictionary"]),
        ("nothing", b"}.".to_vec(), &["holds no tensors"]),
        ("two", nested(&["model", "ema"]), &["\"model\" and \"ema\"", "save only the intended one"]),
        (
            "beyond",
            tensor(TorchTensor { offset: 1, ..WHOLE }),
            &["a.weight", "beyond its storage of 256 bytes"],
        ),
        (
            "huge",
            tensor(TorchTensor { shape: &[1 << 40, 1 << 40], ..WHOLE }),
            &["a.weight", "can be counted"],
        ),
        ("missing", tensor(TorchTensor { key: "7", ..WHOLE }), &["a.weight", "data/7, is missing"]),
        (
            "class",
            tensor(TorchTensor { class: "ComplexFloatStorage", ..WHOLE }),
            &["torch.ComplexFloatStorage"],
        ),
        (
            "repeated",
            tensor(TorchTensor { shape: &[1 << 20, 64], strides: &[0, 1], ..WHOLE }),
            &["a.weight", "repeats elements", ".contiguous()"],
        ),
    ];
    for (name, pickle, parts) in cases {
        let scratch = Scratch::new();
        let file = scratch.write(format!("{name}.pt"), torch_file(&pickle, &[("0", &storage)]));
        quantize(&scratch, &file, "OUT", &[]).fails_with(&[&[name], parts].concat());
        run(&[&"inspect", &file]).fails_with(parts);
        assert!(!scratch.path("OUT").exists());
    }
    let scratch = Scratch::new();
    let one = scratch.write("one.pt", torch_file(&nested(&["model"]), &[("0", &storage)]));
    assert!(run(&[&"inspect", &one]).ok().contains("a.weight"));
    // Many tensors may share one storage.
    let many: Vec<String> = (0..40).map(|i| format!("layers.{i}.weight")).collect();
    let many: Vec<_> = many.iter().map(|name| TorchTensor { name, ..WHOLE }).collect();
    let storage = [0u8; 1 << 16];
    let wide =
        many.iter().map(|tensor| TorchTensor { shape: &[128, 128], strides: &[128, 1], ..tensor.clone() });
    let file = torch_file(&torch_pickle(&wide.collect::<Vec<_>>()), &[("0", &storage)]);
    quantize(&scratch, &scratch.write("bomb.pt", file), "OUT", &[])
        .fails_with(&["bomb.pt", "far more bytes in all than the file"]);
    for (name, bytes, parts) in [
        ("damaged.bin", &b"PK\x03\x04\0\0\x08\x08 and so on"[..], &["its zip archive is damaged"][..]),
        ("text.bin", b"x", &["its zip archive is damaged"]),
        ("old.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P", &["before version 1.6", "save_pretrained"]),
    ] {
        quantize(&scratch, &scratch.write(name, bytes), "OUT", &[]).fails_with(&[&[name], parts].concat());
    }
}

/// `.safetensors` is longer than the suffix `.bin` of the input.
#[test]
fn a_shard_whose_written_name_is_too_long_is_refused_before_any_work() {
    let scratch = Scratch::new();
    let shard = format!("{}.bin", "x".repeat(251));
    let file = torch_file(&torch_pickle(&[WHOLE]), &[("0", &floats(&noise(64)))]);
    scratch.write(format!("IN/{shard}"), file);
    let index = json!({ "metadata": {}, "weight_map": { WHOLE.name: shard } });
    scratch.write("IN/pytorch_model.bin.index.json", index.to_string());
    for more in [&[][..], &["--part", "1/1"]] {
        let run = quantize(&scratch, &scratch.path("IN"), "OUT", more);
        run.fails_with(&["the file system takes no name or path as long as", &"x".repeat(251)]);
        assert!(!scratch.path("OUT").exists());
    }
}
