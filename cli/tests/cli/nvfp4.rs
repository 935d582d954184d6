//! Checkpoints in NVFP4: their contents, and the values after dequantizing.

use std::collections::BTreeMap;

use approx::assert_relative_eq;
use half::bf16;
use microscale::formats::E4m3;
use microscale::{
    Amax, Format, Global, GlobalScale, NonFinite, Numerics, QuantizedShape, QuantizedTensor, Recipe, Shape,
};
use microscale_test_support::{Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{Tensors, bf16s, floats, noise, quantizable, quantize, read_json, tensors};

const NVFP4: [&str; 2] = ["--format", "nvfp4"];

/// Returns the tensors that share a global scale with this one, because engines fuse them.
fn fused(name: &str) -> String {
    let parts =
        [("q_proj", "qkv"), ("k_proj", "qkv"), ("v_proj", "qkv"), ("gate_proj", "gu"), ("up_proj", "gu")];
    parts.iter().fold(name.into(), |name, (part, layer)| name.replace(part, layer))
}

/// Quantizes the sample with the library, tensor by tensor, with shared global scales.
fn expected_of_sample(numerics: Numerics) -> BTreeMap<String, QuantizedTensor> {
    let before = tensors(&sample());
    let mut amax: BTreeMap<String, Amax> = BTreeMap::new();
    let to_quantize = || before.iter().filter(|(name, _)| quantizable(name));
    for (name, (_, shape, data, _)) in to_quantize() {
        let found = microscale::amax(&bf16s(data), Shape::new(shape[0], shape[1])).unwrap();
        amax.entry(fused(name)).or_default().add(found);
    }
    let arithmetic = numerics.nvfp4().unwrap();
    let quantized = to_quantize().map(|(name, (_, shape, data, _))| {
        let global = amax[&fused(name)].global_scale::<bf16>(&arithmetic, NonFinite::Error);
        let recipe = Recipe::of(Format::Nvfp4, numerics).unwrap().with_global(Global::Given(global));
        let shape = Shape::new(shape[0], shape[1]);
        (name.clone(), microscale::quantize(&bf16s(data), shape, &recipe).unwrap().tensor)
    });
    quantized.collect()
}

/// Returns the number in a global scale tensor.
fn number(tensors: &Tensors, name: &str) -> f32 {
    let (dtype, shape, data, _) = &tensors[name];
    assert_eq!((dtype, &shape[..]), (&Dtype::F32, &[1][..]), "{name}");
    f32::from_le_bytes(data[..].try_into().unwrap())
}

/// Returns the divisor that files store.
fn divisor(scale: GlobalScale) -> f32 {
    match scale {
        GlobalScale::Divisor(divisor) => divisor,
        GlobalScale::Multiplier(multiplier) => 1.0 / multiplier,
    }
}

#[test]
fn the_sample_becomes_what_the_library_makes_of_it_in_every_numerics() {
    for (word, numerics) in [
        ("compressed-tensors", Numerics::CompressedTensors),
        ("torchao", Numerics::Torchao),
        ("modelopt", Numerics::Modelopt),
        ("transformer-engine", Numerics::TransformerEngine),
    ] {
        let scratch = Scratch::new();
        quantize(&scratch, &sample(), "OUT", &[&NVFP4[..], &["--numerics", word]].concat()).ok();
        let (before, after) = (tensors(&sample()), tensors(&scratch.path("OUT")));
        let expected = expected_of_sample(numerics);
        assert_eq!(after.len(), before.len() + 2 * expected.len());
        for (name, (dtype, shape, data, file)) in &before {
            let Some(tensor) = expected.get(name) else {
                assert_eq!(after[name], (*dtype, shape.clone(), data.clone(), file.clone()), "{name}");
                continue;
            };
            let (rows, cols) = (shape[0], shape[1]);
            let codes = (Dtype::U8, vec![rows, cols / 2], tensor.codes().to_vec(), file.clone());
            let scales = (Dtype::F8_E4M3, vec![rows, cols / 16], tensor.scales().to_vec(), file.clone());
            assert_eq!(after[&format!("{name}_packed")], codes, "{word}: {name}");
            assert_eq!(after[&format!("{name}_scale")], scales, "{word}: {name}");
            let stored = number(&after, &format!("{name}_global_scale"));
            assert_eq!(stored, divisor(tensor.global_scale().unwrap()), "{word}: {name}");
            assert!(!after.contains_key(name));
        }
    }
}

#[test]
fn the_closing_table_names_the_default_numerics_and_what_it_does() {
    let scratch = Scratch::new();
    let text = quantize(&scratch, &sample(), "OUT", &NVFP4).ok();
    let format = "\nformat  nvfp4, numerics compressed-tensors: block scale G * (amax / 6), quotient x / (b / G), \
                  -0 drop-input, global scale from amax, a divisor that fused layers share\n";
    assert!(text.contains(format), "{text}");
    let plan = quantize(&scratch, &sample(), "NONE", &[&NVFP4[..], &["--dry-run"]].concat()).ok();
    assert!(plan.contains(format) && plan.contains("model.layers.0.mlp.up_proj.weight"), "{plan}");
}

#[test]
fn the_config_equals_compressed_tensors_config() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &NVFP4).ok();
    let out = scratch.path("OUT");
    // compressed-tensors 0.20.0 writes the same entry: tests/golden/README.md.
    let mut config = read_json(out.join("config.json"));
    let quantization = config.as_object_mut().unwrap().shift_remove("quantization_config").unwrap();
    assert_eq!(config, read_json(sample().join("config.json")));
    assert_eq!(
        quantization,
        json!({
            "config_groups": { "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "dynamic": false, "group_size": 16, "num_bits": 4,
                    "scale_dtype": "torch.float8_e4m3fn",
                    "strategy": "tensor_group", "symmetric": true, "type": "float",
                },
            } },
            "format": "nvfp4-pack-quantized",
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
    let index = read_json(out.join("model.safetensors.index.json"));
    let (map, written) = (index["weight_map"].as_object().unwrap(), tensors(&out));
    assert_eq!(map.len(), written.len());
    assert!(written.iter().all(|(name, (.., file))| map[name] == json!(file)));
    let bytes: usize = written.values().map(|(_, _, data, _)| data.len()).sum();
    assert_eq!(index["metadata"]["total_size"], json!(bytes));
}

#[test]
fn there_and_back_again() {
    for numerics in [Numerics::CompressedTensors, Numerics::Torchao] {
        let (scratch, word) = (Scratch::new(), microscale::Words::word(numerics));
        quantize(&scratch, &sample(), "OUT", &[&NVFP4[..], &["--numerics", word]].concat()).ok();
        let (out, back) = (scratch.path("OUT"), scratch.path("BACK"));
        run(&[&"dequantize", &out, &"--out", &back]).ok();
        let (before, after) = (tensors(&sample()), tensors(&back));
        assert!(before.keys().eq(after.keys()));
        let expected = expected_of_sample(numerics);
        for (name, (dtype, shape, data, file)) in &after {
            assert_eq!((dtype, shape, file), (&before[name].0, &before[name].1, &before[name].3), "{name}");
            let Some(tensor) = expected.get(name) else {
                assert_eq!(data, &before[name].2, "{name}");
                continue;
            };
            // The file stores a divisor for all numerics.
            let stored = GlobalScale::Divisor(divisor(tensor.global_scale().unwrap()));
            let values: Vec<bf16> =
                microscale::dequantize(&tensor.clone().with_global_scale(stored).unwrap());
            assert_eq!(bf16s(data), values, "{name}");
        }
        for name in ["config.json", "model.safetensors.index.json"] {
            assert_eq!(read_json(back.join(name)), read_json(sample().join(name)), "{name}");
        }
    }
}

#[test]
fn json_and_compare_agree_on_the_loss_of_what_is_in_the_file() {
    for numerics in ["compressed-tensors", "modelopt"] {
        let scratch = Scratch::new();
        let facts = scratch.path("facts.json");
        let more = ["--numerics", numerics, "--json", facts.to_str().unwrap()];
        quantize(&scratch, &sample(), "OUT", &[&NVFP4[..], &more].concat()).ok();
        let facts = read_json(facts);
        assert_eq!((&facts["format"], &facts["numerics"]), (&json!("nvfp4"), &json!(numerics)));
        assert_eq!(facts["global_scale"], "from amax");
        let written = tensors(&scratch.path("OUT"));
        let text = run(&[&"compare", &sample(), &scratch.path("OUT")]).ok();
        for entry in facts["tensors"].as_array().unwrap() {
            let name = entry["name"].as_str().unwrap();
            if !entry["copied"].is_null() {
                continue;
            }
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
            let printed: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            let error = entry["loss"]["relative_squared_error"].as_f64().unwrap();
            assert_relative_eq!(printed, error, max_relative = 1e-3);
            assert!(error < 0.02, "{name}: {error}");
            let used = entry["global_scale"].as_f64().unwrap() as f32;
            let stored = number(&written, &format!("{name}_global_scale"));
            let used = if numerics == "modelopt" { 1.0 / used } else { used };
            assert_eq!(used, stored, "{name}");
            let elements = entry["elements"].as_u64().unwrap();
            assert_eq!(entry["bytes_after"], json!(elements / 2 + elements / 16 + 4), "{name}");
        }
    }
}

#[test]
fn rows_need_whole_blocks_of_16_and_experts_have_one_global_scale() {
    let scratch = Scratch::new();
    let tensor =
        |name, shape: &[usize]| (name, Dtype::F32, shape.to_vec(), floats(&noise(shape.iter().product())));
    let tensors_in = [
        tensor("narrow.weight", &[4, 48]),
        tensor("odd.weight", &[4, 40]),
        tensor("experts.down", &[2, 3, 64]),
    ];
    let input = scratch.write_tensors("x.safetensors", &tensors_in);
    let text = quantize(&scratch, &input, "OUT", &[&NVFP4[..], &["--include", "experts.*"]].concat()).ok();
    assert!(text.contains("K = 40 is not a multiple of 16"), "{text}");
    let after = tensors(&scratch.path("OUT"));
    assert_eq!(after["narrow.weight_packed"].1, [4, 24]);
    assert_eq!(after["narrow.weight_scale"].1, [4, 3]);
    assert_eq!(after["odd.weight"].2, tensors_in[1].3);
    assert_eq!(after["experts.down_packed"].1, [2, 3, 32]);
    assert_eq!(after["experts.down_scale"].1, [2, 3, 4]);
    let recipe = Recipe::of(Format::Nvfp4, Numerics::CompressedTensors).unwrap();
    let expected = microscale::quantize(&noise(384), Shape::new(6, 64), &recipe).unwrap().tensor;
    assert_eq!(after["experts.down_packed"].2, expected.codes());
    assert_eq!(number(&after, "experts.down_global_scale"), expected.global_scale().unwrap().value());
    run(&[&"dequantize", &scratch.path("OUT"), &"--out", &scratch.path("BACK")]).ok();
    assert_eq!(tensors(&scratch.path("BACK"))["experts.down"].1, [2, 3, 64]);
}

#[test]
fn inspect_shows_scales_as_values_and_global_scales() {
    let scratch = Scratch::new();
    let mut values = vec![0.0f32; 64];
    // Scales with a divisor of 4: 4 · 12 / 6 = 8, 4 · 1.5 / 6 = 1, and 0.125 for the zeros.
    (values[0], values[1], values[16], values[48]) = (12.0, -2.0, 1.5, f32::NAN);
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![1, 64], floats(&values))]);
    let more = ["--non-finite", "propagate", "--global-scale", "4"];
    quantize(&scratch, &input, "y.safetensors", &[&NVFP4[..], &more].concat()).ok();
    let text = run(&[&"inspect", &scratch.path("y.safetensors")]).ok();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let counted = |start: &[&str]| words.iter().any(|line| line.starts_with(start));
    let first = ["a.weight", "nvfp4", "1×64", "40", "B", "0.125", "…", "8", "1", "1", "/", "4"];
    assert!(counted(&first), "{text}");
    assert!(
        counted(&["8", "80", "1"]) && counted(&["1", "56", "1"]) && counted(&["0.125", "32", "1"]),
        "{text}"
    );
    assert!(counted(&["NaN", "127", "1"]), "{text}");
    assert!(
        counted(&["6.0", "7", "2"]) && counted(&["-1.0", "10", "1"]) && counted(&["0.0", "0", "61"]),
        "{text}"
    );

    let (out, back) = (scratch.path("y.safetensors"), scratch.path("BACK"));
    let text = run(&[&"dequantize", &out, &"--out", &back, &"--dtype", &"f32"]).ok();
    assert!(text.contains("1 blocks have a NaN scale"), "{text}");
    let (_, _, data, _) = tensors(&back).remove("a.weight").unwrap();
    let values: Vec<f32> = data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(values[..3], [12.0, -2.0, 0.0]);
    assert!(values[48..].iter().all(|value| value.is_nan()) && values[..48].iter().all(|v| v.is_finite()));
}

#[test]
fn a_tensor_of_zeros_stays_zero_in_every_numerics() {
    let scratch = Scratch::new();
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::BF16, vec![2, 32], vec![0; 128])]);
    for numerics in ["compressed-tensors", "torchao", "modelopt", "transformer-engine"] {
        quantize(&scratch, &input, numerics, &[&NVFP4[..], &["--numerics", numerics]].concat()).ok();
        let (out, back) = (scratch.path(numerics), scratch.path(format!("{numerics}-back")));
        run(&[&"dequantize", &out, &"--out", &back]).ok();
        assert_eq!(tensors(&back)["a.weight"].2, vec![0; 128], "{numerics}");
    }
}

#[test]
fn files_of_others_are_read_too() {
    // A file with a scalar as global scale, and tensors in another order.
    let scratch = Scratch::new();
    let scales: Vec<u8> = [1.0, 448.0, 0.5, 2.0].map(|x| E4m3::from_f32(x).to_bits()).to_vec();
    let codes: Vec<u8> = (0..32).map(|i| i * 7).collect();
    let input = scratch.write_tensors(
        "x.safetensors",
        &[
            ("a_packed", Dtype::U8, vec![2, 16], codes.clone()),
            ("a_scale", Dtype::F8_E4M3, vec![2, 2], scales.clone()),
            ("a_global_scale", Dtype::F32, vec![], floats(&[3.0])),
            ("a_input_global_scale", Dtype::F32, vec![1], floats(&[5.0])),
        ],
    );
    run(&[&"dequantize", &input, &"--out", &scratch.path("OUT"), &"--dtype", &"f32"]).ok();
    let tensor =
        QuantizedTensor::from_parts(QuantizedShape::new(Format::Nvfp4, 2, 32), codes, scales).unwrap();
    let tensor = tensor.with_global_scale(GlobalScale::Divisor(3.0)).unwrap();
    let after = tensors(&scratch.path("OUT"));
    assert_eq!(after["a"].2, floats(&microscale::dequantize::<f32>(&tensor)));
    assert_eq!(after["a_input_global_scale"].2, floats(&[5.0]));
    assert_eq!(after.len(), 2);
}
