//! The output of `quantize`, byte for byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use microscale::{Format, Numerics, Recipe, Scheme, Shape};
use microscale_test_support::{Run, Scratch, command, raw_file, run, sample};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{bf16s, floats, noise, quantizable, quantize, read_json, tensors};

#[test]
fn the_sample_becomes_what_the_library_makes_of_it() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &["--device", "cpu"]).ok();
    let (before, after) = (tensors(&sample()), tensors(&scratch.path("OUT")));
    let quantized = before.keys().filter(|name| quantizable(name)).count();
    assert!(quantized >= 14, "the sample should have layers to quantize");
    assert_eq!(after.len(), before.len() + quantized);
    for (name, (dtype, shape, data, file)) in &before {
        if !quantizable(name) {
            assert_eq!(after[name], (*dtype, shape.clone(), data.clone(), file.clone()), "{name}");
            continue;
        }
        let &[rows, cols] = &shape[..] else { panic!("{name} is no matrix") };
        let expected =
            microscale::quantize(&bf16s(data), Shape::new(rows, cols), &Recipe::default()).unwrap().tensor;
        let codes = (Dtype::U8, vec![rows, cols / 2], expected.codes().to_vec(), file.clone());
        let scales = (Dtype::U8, vec![rows, cols / 32], expected.scales().to_vec(), file.clone());
        assert_eq!(after[&format!("{name}_packed")], codes, "{name}");
        assert_eq!(after[&format!("{name}_scale")], scales, "{name}");
        assert!(!after.contains_key(name));
    }
}

#[test]
fn the_samples_other_files_are_copied_and_index_and_config_are_brought_up_to_date() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &[]).ok();
    let out = scratch.path("OUT");
    let names = |path: &Path| -> Vec<String> {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&sample()), names(&out));
    for name in names(&sample()).iter().filter(|name| !name.contains("model") && *name != "config.json") {
        assert_eq!(fs::read(sample().join(name)).unwrap(), fs::read(out.join(name)).unwrap(), "{name}");
    }

    let index = read_json(out.join("model.safetensors.index.json"));
    let tensors = tensors(&out);
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), tensors.len());
    for (name, (.., file)) in &tensors {
        assert_eq!(map[name], json!(file), "{name}");
    }
    let bytes: usize = tensors.values().map(|(_, _, data, _)| data.len()).sum();
    assert_eq!(index["metadata"]["total_size"], json!(bytes));

    // compressed-tensors 0.20.0 writes the same entry: tests/golden/README.md.
    let mut config = read_json(out.join("config.json"));
    let quantization = config.as_object_mut().unwrap().shift_remove("quantization_config").unwrap();
    assert_eq!(config, read_json(sample().join("config.json")));
    assert_eq!(
        quantization,
        json!({
            "config_groups": { "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": false, "group_size": 32, "num_bits": 4, "scale_dtype": "torch.uint8",
                    "strategy": "group", "symmetric": true, "type": "float",
                },
            } },
            "format": "mxfp4-pack-quantized",
            "global_compression_ratio": null,
            "ignore": ["lm_head"],
            "kv_cache_scheme": null,
            "moe_sparsity_config": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.20.0",
        })
    );
}

#[test]
fn numerics_decide_the_bytes_and_rules_override_them() {
    let scratch = Scratch::new();
    let mut values = noise(8 * 64);
    // Ties, both zeros, and a negative that rounds to zero.
    values[..8].copy_from_slice(&[6.0, 0.25, -0.75, 2.5, -0.0, 0.0, -1e-9, 5.0]);
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![8, 64], floats(&values))]);
    let codes = |out: &str, more: &[&str]| {
        quantize(&scratch, &input, out, more).ok();
        let mut tensors = tensors(&scratch.path(out));
        (tensors.remove("a.weight_packed").unwrap().2, tensors.remove("a.weight_scale").unwrap().2)
    };
    let expected = |recipe: Recipe| {
        microscale::quantize(&values, Shape::new(8, 64), &recipe).unwrap().tensor.into_parts()
    };
    let numerics = [
        ("ocp", Numerics::Ocp),
        ("torchao", Numerics::Torchao),
        ("compressed-tensors", Numerics::CompressedTensors),
        ("modelopt", Numerics::Modelopt),
        ("ggml", Numerics::Ggml),
    ];
    for (word, numerics) in numerics {
        let recipe = Recipe::of(Format::Mxfp4, numerics).unwrap();
        assert_eq!(codes(word, &["--numerics", word]), expected(recipe), "{word}");
    }
    let mut arithmetic = Numerics::Ggml.mxfp4().unwrap();
    arithmetic.scale_rule = microscale::formats::ScaleRule::Ceil;
    arithmetic.ties = microscale::formats::Ties::Away;
    let mixed = Recipe { scheme: Scheme::Mxfp4(arithmetic), ..Recipe::default() };
    let more = ["--numerics", "ggml", "--scale-rule", "ceil", "--ties", "away"];
    assert_eq!(codes("mixed", &more), expected(mixed));
}

#[test]
fn a_single_file_keeps_its_metadata_and_misaligned_data_gives_the_same_bytes() {
    let scratch = Scratch::new();
    let values = noise(4 * 64);
    // One byte of padding before or after the name shifts the data by one, so one file is
    // misaligned.
    let file = |padding: &str| {
        let entry = r#""a.weight":{"dtype":"F32","shape":[4,64],"data_offsets":[0,1024]}"#;
        let header =
            format!(r#"{{"__metadata__":{{"format":"pt","z":"last","a":"first"}},{padding}{entry}}}"#);
        raw_file(header, &floats(&values))
    };
    let outputs = ["", " ", "  ", "   "].map(|padding| {
        let input = scratch.write(format!("in{}.safetensors", padding.len()), file(padding));
        quantize(&scratch, &input, &format!("out{}.safetensors", padding.len()), &[]).ok();
        fs::read(scratch.path(format!("out{}.safetensors", padding.len()))).unwrap()
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]));
    let (length, header) = SafeTensors::read_metadata(&outputs[0]).unwrap();
    assert_eq!(length % 8, 0);
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata.len(), 3);
    assert_eq!((&*metadata["format"], &*metadata["z"], &*metadata["a"]), ("pt", "last", "first"));
    let expected = microscale::quantize(&values, Shape::new(4, 64), &Recipe::default()).unwrap().tensor;
    assert_eq!(
        SafeTensors::deserialize(&outputs[0]).unwrap().tensor("a.weight_packed").unwrap().data(),
        expected.codes()
    );
}

#[test]
fn empty_tensors_and_scalars_pass_through() {
    let scratch = Scratch::new();
    let tensors_in = [
        ("a.weight", Dtype::F32, vec![2, 32], floats(&noise(64))),
        ("none.weight", Dtype::F32, vec![0, 32], vec![]),
        ("narrow.weight", Dtype::BF16, vec![4, 0], vec![]),
        ("scalar", Dtype::F64, vec![], vec![1; 8]),
        ("four", Dtype::F4, vec![3, 2], vec![7; 3]),
    ];
    let input = scratch.write_tensors("x.safetensors", &tensors_in);
    quantize(&scratch, &input, "y.safetensors", &[]).ok();
    let (before, mut after) = (tensors(&input), tensors(&scratch.path("y.safetensors")));
    assert_eq!(after.remove("a.weight_packed").unwrap().1, [2, 16]);
    assert_eq!(after.remove("a.weight_scale").unwrap().1, [2, 1]);
    assert_eq!(after.len(), before.len() - 1);
    for (name, (dtype, shape, data, _)) in after {
        assert_eq!((&dtype, &shape, &data), (&before[&name].0, &before[&name].1, &before[&name].2), "{name}");
    }
}

#[test]
fn an_empty_directory_may_be_the_output_and_relative_paths_work() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("OUT")).unwrap();
    quantize(&scratch, &sample(), "OUT", &[]).ok();
    let mut relative = command(&[&"quantize", &"OUT2/../sample", &"--out", &"OUT2/nested"]);
    fs::create_dir(scratch.path("OUT2")).unwrap();
    fs::create_dir(scratch.path("sample")).unwrap();
    for entry in fs::read_dir(sample()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), scratch.path("sample").join(entry.file_name())).unwrap();
    }
    relative.current_dir(scratch.path(""));
    Run::new(relative).ok();
    // Every run gives the same bytes, in any directory.
    let files = |path: &str| -> BTreeMap<_, _> {
        let root = scratch.path(path);
        let inside =
            scratch.contents().into_iter().filter(|(path, _)| path.starts_with(&root) && *path != root);
        inside.map(|(path, bytes)| (path.strip_prefix(&root).unwrap().to_path_buf(), bytes)).collect()
    };
    assert!(files("OUT").len() > 4);
    assert_eq!(files("OUT"), files("OUT2/nested"));
}

#[cfg(unix)]
#[test]
fn a_cache_of_links_is_read_through_and_directories_are_copied_but_not_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let scratch = Scratch::new();
    let tensor = ("a.weight", Dtype::F32, vec![2, 32], floats(&noise(64)));
    scratch.write_tensors("blobs/1234", &[tensor]);
    scratch.write("blobs/5678", "{\"model_type\": \"x\"}");
    scratch.write("blobs/9abc", "vocabulary");
    scratch.write("in/deep/er/notes.txt", "notes");
    scratch.write("in/.git/HEAD", "ref");
    for (blob, name) in [("1234", "model.safetensors"), ("5678", "config.json"), ("9abc", "vocab.txt")] {
        symlink(Path::new("../blobs").join(blob), scratch.path("in").join(name)).unwrap();
    }
    symlink("..", scratch.path("in/deep/loop")).unwrap();
    let text = quantize(&scratch, &scratch.path("in"), "OUT", &[]).ok();
    let out = scratch.path("OUT");
    assert_eq!(fs::read_to_string(out.join("vocab.txt")).unwrap(), "vocabulary");
    assert_eq!(fs::read_to_string(out.join("deep/er/notes.txt")).unwrap(), "notes");
    assert!(read_json(out.join("config.json"))["quantization_config"].is_object());
    assert!(scratch.contents().keys().filter(|path| path.starts_with(&out)).all(|path| !path.is_symlink()));
    assert!(!out.join("deep/loop").exists() && !out.join(".git").exists());
    assert!(text.contains("left out deep/loop") && text.contains("left out .git"), "{text}");
    // Its mode is the default, not the private mode of a temporary directory.
    fs::create_dir(scratch.path("ordinary")).unwrap();
    let mode = |name: &str| fs::metadata(scratch.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("OUT"), mode("ordinary"));
}

#[test]
fn a_tied_output_head_is_named_in_the_config() {
    let scratch = Scratch::new();
    let weight = |name| (name, Dtype::F32, vec![4, 32], floats(&noise(128)));
    scratch.write_tensors(
        "in/model.safetensors",
        &[weight("model.embed_tokens.weight"), weight("fc.weight"), weight("gate.weight")],
    );
    scratch.write("in/config.json", r#"{"architectures": ["XForCausalLM"], "dtype": "float32"}"#);
    quantize(&scratch, &scratch.path("in"), "OUT", &["--exclude", "gate*"]).ok();
    let config = read_json(scratch.path("OUT/config.json"));
    assert_eq!(config["quantization_config"]["ignore"], json!(["gate", "lm_head"]));
    // The config's dtype is restored.
    run(&[&"dequantize", &scratch.path("OUT"), &"--out", &scratch.path("BACK")]).ok();
    assert_eq!(tensors(&scratch.path("BACK"))["fc.weight"].0, Dtype::F32);
}
