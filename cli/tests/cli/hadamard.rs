//! Block Hadamard transforms: `quantize --hadamard`, and what reads its output.

use std::collections::BTreeSet;
use std::path::Path;

use half::bf16;
use microscale::HadamardWidth;
use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{bf16s, floats, noise, quantizable, quantize, read_json, tensors};

const W32: &[&str] = &["--hadamard", "32"];

/// Returns the relative squared error of a checkpoint against the sample.
fn loss(path: &Path) -> f64 {
    let compared = run(&[&"compare", &sample(), &path, &"--json", &"-"]).ok();
    let json: Value = serde_json::from_str(&compared).unwrap();
    json["total"]["relative_squared_error"].as_f64().unwrap_or_else(|| panic!("{json}"))
}

/// Writes the sample with its linear layers transformed, in F32.
fn transformed_sample(scratch: &Scratch, width: HadamardWidth) {
    let stored: Vec<TensorData> = tensors(&sample())
        .into_iter()
        .map(|(name, (dtype, shape, data, _))| {
            let name: &'static str = name.leak();
            if !quantizable(name) || !shape[1].is_multiple_of(width.columns()) {
                return (name, dtype, shape, data);
            }
            let mut values: Vec<f32> = bf16s(&data).into_iter().map(bf16::to_f32).collect();
            width.transform(&mut values);
            (name, Dtype::F32, shape, floats(&values))
        })
        .collect();
    scratch.write_tensors("TRANSFORMED/model.safetensors", &stored);
    scratch.write("TRANSFORMED/config.json", read_json(sample().join("config.json")).to_string());
}

#[test]
fn codes_are_of_the_transformed_weights() {
    for (format, search, width) in
        [("mxfp4", "none", HadamardWidth::W32), ("nvfp4", "full", HadamardWidth::W128)]
    {
        let scratch = Scratch::new();
        transformed_sample(&scratch, width);
        let (width, options) = (width.to_string(), ["--format", format, "--search", search]);
        quantize(&scratch, &scratch.path("TRANSFORMED"), "RIGHT", &options).ok();
        let check = if search == "full" { &["--check-search"][..] } else { &[] };
        let options = [&options[..], &["--hadamard", &width], check].concat();
        quantize(&scratch, &sample(), "OUT", &options).ok();
        let (right, found) = (tensors(&scratch.path("RIGHT")), tensors(&scratch.path("OUT")));
        for (name, (dtype, shape, data, _)) in &right {
            let (found_dtype, found_shape, found_data, _) = &found[name];
            assert_eq!((found_dtype, found_shape), (dtype, shape), "{name}");
            assert!(found_data == data, "{name}");
        }
        // Each layer has the matrix of the transform.
        let size: usize = width.parse().unwrap();
        let more: Vec<_> = found.keys().filter(|name| !right.contains_key(*name)).collect();
        let fits = |shape: &[usize]| (2 * shape[1]).is_multiple_of(size);
        let layers = right.iter().filter(|(name, (_, shape, ..))| name.ends_with("_packed") && fits(shape));
        assert_eq!(more.len(), layers.count());
        for name in more {
            assert!(name.ends_with(&format!("_proj.hadamard_{width}_input.weight")), "{name}");
            let (dtype, shape, data, _) = &found[name];
            assert_eq!((dtype, &shape[..]), (&Dtype::BF16, &[size, size][..]));
            for (at, entry) in bf16s(data).into_iter().enumerate() {
                let negative = HadamardWidth::is_negative(at / size, at % size);
                assert_eq!(entry.to_f32(), if negative { -1.0 } else { 1.0 });
            }
        }
    }
}

#[test]
fn the_config_declares_the_transform_and_doctor_names_who_leaves_it_out() {
    let scratch = Scratch::new();
    let json = quantize(&scratch, &sample(), "OUT", &[W32, &["--json", "-"]].concat());
    let facts: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(facts["hadamard"], "32");
    assert!(json.stderr.contains("transformers 5.24 leaves the transform out"), "{json:#?}");
    let config = read_json(scratch.path("OUT/config.json"));
    let group = &config["quantization_config"]["transform_config"]["config_groups"]["hadamard_32"];
    assert_eq!(
        (&group["type"], &group["head_dim"], &group["randomize"]),
        (&json!("hadamard"), &json!(32), &json!(false))
    );
    let locations: Vec<_> =
        group["apply"].as_array().unwrap().iter().map(|apply| &apply["location"]).collect();
    assert_eq!(locations, ["input", "weight_input"]);
    let targets: BTreeSet<_> = group["apply"][0]["targets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|target| target.as_str().unwrap())
        .collect();
    assert!(targets.contains(r"re:(.*\.)?layers\.\d+\.mlp\.down_proj$") && targets.len() == 7, "{targets:?}");
    let ignore = config["quantization_config"]["ignore"].to_string();
    assert!(!ignore.contains("hadamard"), "{ignore}");
    let out = scratch.path("OUT");
    for diagnosis in [
        run(&[&"doctor", &out, &"--json", &"-"]),
        run(&[&"doctor", &out, &"--against", &sample(), &"--json", &"-"]),
    ] {
        let diagnosis: Value = serde_json::from_str(&diagnosis.stdout).unwrap();
        let findings = diagnosis["findings"].as_array().unwrap();
        assert_eq!(findings.len(), 1, "{findings:#?}");
        assert_eq!(findings[0]["defect"], "transform");
    }
}

#[test]
fn values_are_of_the_models_own_parameters() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "PLAIN", &[]).ok();
    quantize(&scratch, &sample(), "OUT", W32).ok();
    let (plain, out, back) = (scratch.path("PLAIN"), scratch.path("OUT"), scratch.path("BACK"));
    run(&[&"dequantize", &out, &"--out", &back]).ok();
    let (names, right) = (tensors(&back), tensors(&sample()));
    assert!(names.keys().eq(right.keys()), "{:?}", names.keys());
    let plain = loss(&plain);
    for path in [&out, &back] {
        let loss = loss(path);
        assert!((0.5 * plain..1.5 * plain).contains(&loss), "{loss} {plain}");
    }
    assert!(read_json(back.join("config.json")).get("quantization_config").is_none());
    // The transform is kept by compressed-tensors only.
    let again = scratch.path("AGAIN");
    run(&[&"convert", &out, &"--to", &"compressed-tensors", &"--out", &again]).ok();
    assert_eq!(read_json(again.join("config.json")), read_json(out.join("config.json")));
    assert_eq!(tensors(&again), tensors(&out));
    let words =
        ["transform_config (input, weight_input)", "or dequantize it first, which undoes the transform"];
    run(&[&"convert", &out, &"--to", &"modelopt", &"--format", &"nvfp4", &"--out", &scratch.path("M")])
        .fails_with(&words);
    quantize(&scratch, &out, "Q", &["--requantize"]).fails_with(&words);
    let inspected = run(&[&"inspect", &out, &"--json", &"-"]);
    let inspected: Value = serde_json::from_str(&inspected.stdout).unwrap();
    let widths = inspected.as_array().unwrap().iter().filter_map(|tensor| tensor.get("hadamard"));
    assert!(widths.clone().all(|width| *width == 32) && widths.count() > 0);
}

/// The values of layers that are transformed and not quantized are not undone.
#[test]
fn transforms_of_unquantized_layers_are_refused() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", W32).ok();
    let mut config = read_json(scratch.path("OUT/config.json"));
    let group = &mut config["quantization_config"]["transform_config"]["config_groups"]["hadamard_32"];
    for apply in group["apply"].as_array_mut().unwrap() {
        apply["targets"] = json!(["Linear"]);
    }
    scratch.write("OUT/config.json", config.to_string());
    let (out, back) = (scratch.path("OUT"), scratch.path("BACK"));
    let refused = run(&[&"dequantize", &out, &"--out", &back]);
    // The head of the sample is unquantized.
    refused.fails_with(&["transform_config (input, weight_input)"]);
}

#[test]
fn layers_without_an_engine_are_quantized_without_it() {
    let scratch = Scratch::new();
    let columns = |name, columns: usize| -> TensorData {
        (name, Dtype::F32, vec![16, columns], floats(&noise(16 * columns)))
    };
    let stored = [
        columns("model.layers.0.mlp.up_proj.weight", 64),
        columns("model.layers.1.mlp.up_proj.weight", 64),
        ("model.layers.1.mlp.up_proj.bias", Dtype::F32, vec![16], floats(&noise(16))),
        columns("model.layers.0.mlp.down_proj.weight", 96),
        columns("model.layers.0.self_attn.kv_b_proj.weight", 64),
        columns("model.layers.0.mlp.experts.0.up_proj.weight", 64),
    ];
    let input = scratch.write_tensors("in.safetensors", &stored);
    let done = quantize(&scratch, &input, "out.safetensors", &["--hadamard", "64"]);
    assert_eq!(done.code, Some(0), "{done:#?}");
    for words in [
        "model.layers.1.mlp.up_proj.weight are quantized without the Hadamard transform: vLLM runs no transform of layers with a bias",
        "engines run no transform of experts",
        "their columns are no multiple of the width",
        "vLLM multiplies these weights without a transform",
    ] {
        assert!(done.stderr.contains(words), "{}", done.stderr);
    }
    let names: Vec<_> = tensors(&scratch.path("out.safetensors"))
        .into_keys()
        .filter(|name| name.contains("hadamard"))
        .collect();
    assert_eq!(names, ["model.layers.0.mlp.up_proj.hadamard_64_input.weight"]);
    let input = scratch.write_tensors("none.safetensors", &stored[1..]);
    let refused = quantize(&scratch, &input, "none-out.safetensors", &["--hadamard", "64"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    assert!(refused.stderr.contains("would be quantized without the Hadamard transform"), "{refused:#?}");
}

#[test]
fn settings_that_do_not_fit_are_refused_by_name() {
    let scratch = Scratch::new();
    for (options, words) in [
        (&["--hadamard", "48"][..], &["16", "128"][..]),
        (&["--hadamard", "32", "--format", "mxfp8"], &["--hadamard is for mxfp4 and nvfp4"]),
        (&["--hadamard", "32", "--non-finite", "saturate"], &["--hadamard spreads NaN and infinities"]),
        (
            &["--hadamard", "32", "--to", "modelopt", "--format", "nvfp4"],
            &["modelopt has no transforms", "compressed-tensors"],
        ),
    ] {
        let refused = quantize(&scratch, &sample(), "OUT", options);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(words.iter().all(|word| refused.stderr.contains(word)), "{refused:#?}");
    }
    for (recipe, words) in [
        ("hadamard = 24", &["recipe.toml:1: hadamard is 24", "16, 32, 64, 128 or \"none\""][..]),
        (
            "hadamard = 32\n[[tensors]]\nmatch = \"*.q_proj.weight\"\nhadamard = 64",
            &["q_proj", "hadamard 64", "one rule"],
        ),
        (
            "hadamard = 32\n[[tensors]]\nmatch = \"*.down_proj.weight\"\nformat = \"mxfp8-e4m3\"",
            &["hadamard is for mxfp4"],
        ),
    ] {
        let recipe = scratch.write("recipe.toml", recipe);
        let recipe = recipe.to_str().unwrap();
        quantize(&scratch, &sample(), "OUT", &["--recipe", recipe]).fails_with(words);
    }
    let recipe = "hadamard = 32\n[[tensors]]\nmatch = \"*.down_proj.weight\"\nhadamard = \"none\"\n\
                  [[tensors]]\nmatch = \"*.o_proj.weight\"\nhadamard = 64";
    let recipe = scratch.write("recipe.toml", recipe);
    quantize(&scratch, &sample(), "OUT", &["--recipe", recipe.to_str().unwrap()]).ok();
    let config = read_json(scratch.path("OUT/config.json"));
    let groups = &config["quantization_config"]["transform_config"]["config_groups"];
    assert_eq!(
        groups["hadamard_64"]["apply"][0]["targets"],
        json!([r"re:(.*\.)?layers\.\d+\.self_attn\.o_proj$"])
    );
    assert!(!groups.to_string().contains("down_proj"), "{groups}");
    let back = scratch.path("BACK");
    run(&[&"dequantize", &scratch.path("OUT"), &"--out", &back]).ok();
    assert!(loss(&back) < 0.02);
}

/// Inputs under a transform have another amax than inputs without one.
#[test]
fn scales_of_inputs_are_of_the_transformed_inputs() {
    let scratch = Scratch::new();
    let weights = tensors(&sample()).into_keys().filter(|name| quantizable(name));
    let modules: Vec<_> = weights.map(|name| name.replace(".weight", "")).collect();
    let plain: serde_json::Map<String, Value> =
        modules.iter().map(|name| (name.clone(), json!(8.0))).collect();
    let mut both = plain.clone();
    both.extend(modules.iter().map(|name| (format!("{name}.hadamard_32"), json!(4.0))));
    let files = [
        scratch.write("plain.json", json!(plain).to_string()),
        scratch.write("both.json", json!(both).to_string()),
    ];
    let options = |file: &'static str, more: &[&'static str]| {
        let file = scratch.path(file).display().to_string();
        let given = ["-f".to_string(), "nvfp4".into(), "--input-scale".into(), file];
        given.into_iter().chain(more.iter().map(|word| word.to_string())).collect::<Vec<_>>()
    };
    assert!(files.iter().all(|file| file.exists()));
    let refused = options("plain.json", W32);
    let refused: Vec<_> = refused.iter().map(String::as_str).collect();
    quantize(&scratch, &sample(), "OUT", &refused).fails_with(&[".hadamard_32 (the largest magnitude)"]);
    for (out, more, divisor) in [("OUT", W32, 2688.0 / 4.0f32), ("PLAIN", &[][..], 2688.0 / 8.0)] {
        let options = options("both.json", more);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let done = quantize(&scratch, &sample(), out, &options);
        assert_eq!(done.code, Some(0), "{done:#?}");
        assert!(!done.stderr.contains("is called so"), "{}", done.stderr);
        let scales = tensors(&scratch.path(out));
        let scales: Vec<_> =
            scales.iter().filter(|(name, _)| name.ends_with(".input_global_scale")).collect();
        assert_eq!(scales.len(), modules.len());
        assert!(scales.iter().all(|(_, (_, _, data, _))| *data == divisor.to_le_bytes()));
    }
}
