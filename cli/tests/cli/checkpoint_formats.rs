//! Checkpoint formats: the tensors of each, and the values after a conversion.

use half::bf16;
use microscale::{Recipe, Shape};
use microscale_test_support::{Arg, Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{Tensors, bf16s, floats, noise, quantizable, quantize, read_json, tensors};

const NVFP4: [&str; 2] = ["--format", "nvfp4"];
const MODELOPT: [&str; 2] = ["--to", "modelopt"];
const GPT_OSS: [&str; 2] = ["--to", "gpt-oss"];

/// The experts of one layer with biases, and other tensors.
fn experts(scratch: &Scratch, config: &Value) -> std::path::PathBuf {
    let data = |n| noise(n).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect();
    let tensors: [TensorData; 4] = [
        ("model.layers.0.mlp.experts.gate_up_proj", Dtype::BF16, vec![3, 64, 20], data(3 * 64 * 20)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", Dtype::BF16, vec![3, 20], data(60)),
        ("model.layers.0.mlp.router.weight", Dtype::BF16, vec![3, 64], data(192)),
        ("model.layers.0.self_attn.q_proj.weight", Dtype::BF16, vec![32, 64], data(32 * 64)),
    ];
    scratch.write("IN/config.json", config.to_string());
    scratch.write_tensors("IN/model.safetensors", &tensors);
    scratch.path("IN")
}

/// Returns the tensors of a dequantized checkpoint.
fn dequantized(scratch: &Scratch, checkpoint: &str, dtype: &str) -> Tensors {
    let out = format!("{checkpoint}.{dtype}");
    run(&[&"dequantize", &scratch.path(checkpoint), &"--dtype", &dtype, &"--out", &scratch.path(&out)]).ok();
    tensors(&scratch.path(&out))
}

fn convert(scratch: &Scratch, from: &str, to: &str, out: &str) -> microscale_test_support::Run {
    run(&[&"convert", &scratch.path(from), &"--to", &to, &"--out", &scratch.path(out)])
}

#[test]
fn modelopt_has_the_same_codes_under_its_own_names_and_configs() {
    let scratch = Scratch::new();
    let modelopt_arithmetic = [&NVFP4[..], &["--numerics", "modelopt"]].concat();
    quantize(&scratch, &sample(), "CT", &modelopt_arithmetic).ok();
    let text = quantize(&scratch, &sample(), "MO", &[&modelopt_arithmetic[..], &MODELOPT].concat()).ok();
    assert!(text.contains("files   modelopt"), "{text}");
    let (ct, modelopt) = (tensors(&scratch.path("CT")), tensors(&scratch.path("MO")));
    let mut quantized = 0;
    for (name, (dtype, shape, data, _)) in tensors(&sample()) {
        if !quantizable(&name) {
            assert_eq!(modelopt[&name].2, data, "{name}");
            continue;
        }
        quantized += 1;
        assert_eq!(dtype, Dtype::BF16);
        let (codes, scales) = (&modelopt[&name], &modelopt[&format!("{name}_scale")]);
        assert_eq!((codes.0, &codes.1[..]), (Dtype::U8, &[shape[0], shape[1] / 2][..]));
        assert_eq!((scales.0, &scales.1[..]), (Dtype::F8_E4M3, &[shape[0], shape[1] / 16][..]));
        assert_eq!(codes.2, ct[&format!("{name}_packed")].2, "{name}");
        assert_eq!(scales.2, ct[&format!("{name}_scale")].2, "{name}");
        let (dtype, shape, global, _) = &modelopt[&format!("{name}_scale_2")];
        assert_eq!((*dtype, &shape[..]), (Dtype::F32, &[][..]));
        let multiplier = f32::from_le_bytes(global[..].try_into().unwrap());
        let divisor = f32::from_le_bytes(ct[&format!("{name}_global_scale")].2[..].try_into().unwrap());
        assert_eq!(1.0 / multiplier, divisor, "{name}");
    }
    assert_eq!(modelopt.len(), tensors(&sample()).len() + 2 * quantized);

    let config = read_json(scratch.path("MO/config.json"));
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["quant_method"], "modelopt");
    assert_eq!(quantization["quant_algo"], "W4A16_NVFP4");
    assert_eq!(quantization["config_groups"]["group_0"]["weights"]["group_size"], 16);
    assert_eq!(quantization["config_groups"]["group_0"].get("input_activations"), None);
    let own = read_json(scratch.path("MO/hf_quant_config.json"));
    let expected = json!({
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": null,
        "group_size": 16,
        "exclude_modules": quantization["ignore"],
    });
    assert_eq!(own["quantization"], expected);
    assert!(quantization["ignore"].as_array().unwrap().contains(&json!("lm_head")));

    // Dequantizing restores the names and removes both configs.
    let back = dequantized(&scratch, "MO", "bf16");
    assert!(back.keys().eq(tensors(&sample()).keys()));
    assert!(!scratch.path("MO.bf16/hf_quant_config.json").exists());
    assert_eq!(read_json(scratch.path("MO.bf16/config.json")).get("quantization_config"), None);
    run(&[&"doctor", &scratch.path("MO"), &"--against", &sample()]).ok();
}

#[test]
fn gpt_oss_stores_experts_transposed_and_nothing_else() {
    let scratch = Scratch::new();
    let input = experts(&scratch, &json!({ "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16" }));
    let text = quantize(&scratch, &input, "OUT", &GPT_OSS).ok();
    assert!(text.contains("not gpt-oss experts"), "{text}");
    let (before, after) = (tensors(&input), tensors(&scratch.path("OUT")));
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let (rows, cols) = (20, 64);
    let weights = bf16s(&before[name].2);
    let transposed: Vec<bf16> = (0..3 * rows * cols)
        .map(|i| weights[i / (rows * cols) * rows * cols + i % cols * rows + i / cols % rows])
        .collect();
    let expected = microscale::quantize(&transposed, Shape::new(3 * rows, cols), &Recipe::default()).unwrap();
    let (blocks, scales) = (&after[&format!("{name}_blocks")], &after[&format!("{name}_scales")]);
    assert_eq!((blocks.0, &blocks.1[..]), (Dtype::U8, &[3, rows, cols / 32, 16][..]));
    assert_eq!((scales.0, &scales.1[..]), (Dtype::U8, &[3, rows, cols / 32][..]));
    assert_eq!((&blocks.2[..], &scales.2[..]), (expected.tensor.codes(), expected.tensor.scales()));
    assert_eq!(after.len(), before.len() + 1);
    for other in before.keys().filter(|other| *other != name) {
        assert_eq!(after[other].2, before[other].2, "{other}");
    }
    let quantization = &read_json(scratch.path("OUT/config.json"))["quantization_config"];
    assert_eq!(quantization["quant_method"], "mxfp4");

    // The parameter's own order again, with values close to the original. `compare` agrees.
    let back = dequantized(&scratch, "OUT", "f32");
    assert_eq!(back[name].1, before[name].1);
    let text = run(&[&"compare", &input, &scratch.path("OUT")]).ok();
    let db: f64 = text
        .lines()
        .find(|line| line.starts_with(name))
        .unwrap()
        .split_whitespace()
        .nth(2)
        .unwrap()
        .parse()
        .unwrap();
    assert!(db > 15.0, "{text}");
    run(&[&"doctor", &scratch.path("OUT"), &"--against", &input]).ok();
    // The other checkpoint formats do not store transposes.
    let refused = convert(&scratch, "OUT", "compressed-tensors", "NO");
    refused.fails_with(&[name, "transpose", "no loader is known", "bf16"]);
    assert!(!scratch.path("NO").exists());
}

#[test]
fn nan_errors_name_the_position_in_the_parameter() {
    let scratch = Scratch::new();
    let mut data: Vec<u8> = noise(2 * 32 * 5).into_iter().flat_map(f32::to_le_bytes).collect();
    let (row, col) = (32 + 7, 3);
    data[(row * 5 + col) * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let name = "a.experts.down_proj";
    let input = scratch.write_tensors("x.safetensors", &[(name, Dtype::F32, vec![2, 32, 5], data)]);
    quantize(&scratch, &input, "OUT", &GPT_OSS).fails_with(&[name, "row 39", "column 3"]);
}

#[test]
fn numerics_list_their_formats() {
    let scratch = Scratch::new();
    let refused = quantize(&scratch, &sample(), "OUT", &MODELOPT);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    for part in ["modelopt", "no mxfp4", "nvfp4", "compressed-tensors, gpt-oss"] {
        assert!(refused.stderr.contains(part), "{refused:#?}");
    }
    let refused = quantize(&scratch, &sample(), "OUT", &GPT_OSS);
    refused.fails_with(&["no tensor to quantize"]);
}

#[test]
fn converting_keeps_codes_and_scales_and_reports_global_scale_losses() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "CT", &NVFP4).ok();
    let text = convert(&scratch, "CT", "modelopt", "MO").ok();
    assert!(text.contains("files   modelopt"), "{text}");
    convert(&scratch, "MO", "compressed-tensors", "BACK").ok();
    let (ct, back) = (tensors(&scratch.path("CT")), tensors(&scratch.path("BACK")));
    assert!(ct.keys().eq(back.keys()));
    let mut rounded = 0;
    for (name, before) in &ct {
        let after = &back[name];
        if name.ends_with("_global_scale") {
            let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            let multiplier =
                value(&tensors(&scratch.path("MO"))[&name.replace("_global_scale", "_scale_2")].2);
            assert_eq!(multiplier, 1.0 / value(&before.2));
            assert_eq!(value(&after.2), 1.0 / multiplier);
        } else {
            assert_eq!((before.0, &before.1, &before.2), (after.0, &after.1, &after.2), "{name}");
        }
    }
    assert_eq!(read_json(scratch.path("BACK/config.json")), read_json(scratch.path("CT/config.json")));
    assert!(!scratch.path("BACK/hf_quant_config.json").exists());
    // The output names exactly the tensors whose values changed.
    let (a, b) = (dequantized(&scratch, "CT", "f32"), dequantized(&scratch, "MO", "f32"));
    for (name, (_, _, values, _)) in &a {
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
        };
        let differing = words(values).iter().zip(words(&b[name].2)).filter(|(a, b)| **a != *b).count();
        let told = text.lines().any(|line| line.split_whitespace().next() == Some(name));
        assert_eq!(told, differing != 0, "{name}: {text}");
        rounded += usize::from(told);
    }
    let same = a.keys().filter(|name| quantizable(name)).count() - rounded;
    assert!(text.contains(&format!("{same} tensors have the same values to the bit")), "{text}");

    // A power of two has an exact inverse.
    let exact = [&NVFP4[..], &["--global-scale", "1024"]].concat();
    quantize(&scratch, &sample(), "EXACT", &exact).ok();
    let text = convert(&scratch, "EXACT", "modelopt", "EXACT-MO").ok();
    assert!(!text.contains("rounded"), "{text}");
}

#[test]
fn quantized_inputs_and_caches_stay_known() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "MO", &[&NVFP4[..], &MODELOPT, &["--global-scale", "1024"]].concat()).ok();
    // Changes the output into a checkpoint with quantized inputs and an FP8 cache.
    let mut all = tensors(&scratch.path("MO"));
    let file = all.values().next().unwrap().3.clone();
    let layers: Vec<_> =
        all.keys().filter_map(|name| name.strip_suffix(".weight_scale_2").map(String::from)).collect();
    for layer in &layers {
        all.insert(
            format!("{layer}.input_scale"),
            (Dtype::F32, vec![], 0.25f32.to_le_bytes().to_vec(), file.clone()),
        );
    }
    let named: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> =
        all.into_iter().map(|(name, (dtype, shape, data, _))| (&*name.leak(), dtype, shape, data)).collect();
    std::fs::remove_dir_all(scratch.path("MO")).unwrap();
    scratch.write_tensors("W4A4/model.safetensors", &named);
    let quantization = json!({
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": { "dynamic": false, "num_bits": 8, "type": "float" },
    });
    scratch.write("W4A4/config.json", json!({ "quantization_config": quantization }).to_string());

    convert(&scratch, "W4A4", "compressed-tensors", "CT").ok();
    let converted = tensors(&scratch.path("CT"));
    for layer in &layers {
        let (dtype, shape, data, _) = &converted[&format!("{layer}.input_global_scale")];
        assert_eq!((*dtype, &shape[..], &data[..]), (Dtype::F32, &[1][..], &4f32.to_le_bytes()[..]));
        assert!(!converted.contains_key(&format!("{layer}.input_scale")));
    }
    let quantization = &read_json(scratch.path("CT/config.json"))["quantization_config"];
    assert_eq!(quantization["config_groups"]["group_0"]["input_activations"]["num_bits"], 4);
    assert_eq!(quantization["kv_cache_scheme"]["num_bits"], 8);
    convert(&scratch, "CT", "modelopt", "BACK").ok();
    assert_eq!(read_json(scratch.path("BACK/hf_quant_config.json"))["quantization"]["quant_algo"], "NVFP4");
    assert_eq!(
        read_json(scratch.path("BACK/hf_quant_config.json"))["quantization"]["kv_cache_quant_algo"],
        "FP8"
    );
    // Dequantized, without the tensors that only quantized layers have.
    assert!(dequantized(&scratch, "CT", "bf16").keys().all(|name| !name.contains("input_global_scale")));
}

#[test]
fn weights_that_need_more_than_codes_and_scales_are_refused() {
    let codes = |name| (name, Dtype::U8, vec![4, 16], vec![0x22; 64]);
    let scales = |name| (name, Dtype::F8_E4M3, vec![4, 2], vec![0x38; 8]);
    let one = |name| (name, Dtype::F32, vec![], 1f32.to_le_bytes().to_vec());
    let awq = ("a.pre_quant_scale", Dtype::F32, vec![32], vec![0; 128]);
    for (tensors, parts) in [
        (
            vec![codes("a.weight"), scales("a.weight_scale"), one("a.weight_scale_2"), awq],
            ["a.weight", "AWQ"],
        ),
        (vec![codes("x.experts.up"), scales("x.experts.up_weight_scale")], ["x.experts.up", "another axis"]),
        (vec![codes("a.weight"), scales("a.weight_scale")], ["a.weight", "a.weight_scale_2, is missing"]),
        (vec![codes("a.experts_blocks")], ["a.experts_blocks", "a.experts_scales, are missing"]),
    ] {
        let scratch = Scratch::new();
        let input = scratch.write_tensors("x.safetensors", &tensors);
        let out = scratch.path("OUT");
        run(&[&"dequantize", &input, &"--out", &out]).fails_with(&parts);
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &out]).fails_with(&parts);
        let text = run(&[&"doctor", &input]);
        assert_eq!(text.code, Some(1));
        assert!(text.stdout.contains("unreadable") && text.stdout.contains(parts[1]), "{text:#?}");
        assert!(!out.exists());
    }
}

#[test]
fn two_formats_are_converted_where_the_numerics_has_both() {
    let scratch = Scratch::new();
    let input = scratch.write_tensors(
        "x.safetensors",
        &[
            ("a.weight_packed", Dtype::U8, vec![1, 16], vec![0x22; 16]),
            ("a.weight_scale", Dtype::U8, vec![1, 1], vec![127]),
            ("b.weight_packed", Dtype::U8, vec![1, 8], vec![0x22; 8]),
            ("b.weight_scale", Dtype::F8_E4M3, vec![1, 1], vec![0x38]),
            ("b.weight_global_scale", Dtype::F32, vec![1], 1f32.to_le_bytes().to_vec()),
        ],
    );
    run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--out", &scratch.path("SAME")]).ok();
    assert_eq!(tensors(&input).len(), tensors(&scratch.path("SAME")).len());
    for (name, (dtype, shape, data, _)) in tensors(&scratch.path("SAME")) {
        let before = &tensors(&input)[&name];
        assert_eq!((before.0, &before.1, &before.2), (dtype, &shape, &data), "{name}");
    }
    let refused = run(&[&"convert", &input, &"--to", &"modelopt", &"--out", &scratch.path("OUT")]);
    refused.fails_with(&["modelopt", "has no mxfp4"]);
    let plain = scratch.write_tensors("y.safetensors", &[("a", Dtype::F32, vec![1], vec![0; 4])]);
    let refused = run(&[&"convert", &plain, &"--to", &"modelopt", &"--out", &scratch.path("OUT")]);
    refused.fails_with(&["y.safetensors", "nothing to convert"]);
}

#[test]
fn mxfp4_is_cast_to_nvfp4_with_the_same_values() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "MX", &["--format", "mxfp4"]).ok();
    let before = dequantized(&scratch, "MX", "f32");
    for to in ["compressed-tensors", "modelopt"] {
        let out = scratch.path(to);
        let cast: [Arg<'_>; 6] = [&"--to", &to, &"--format", &"nvfp4", &"--out", &out];
        let text = run(&[&[&"convert" as Arg<'_>, &scratch.path("MX")], &cast[..]].concat()).ok();
        let after = dequantized(&scratch, to, "f32");
        assert!(before.keys().eq(after.keys()));
        for (name, (_, shape, values, _)) in &before {
            assert_eq!((shape, values), (&after[name].1, &after[name].2), "{name}");
        }
        let quantized = before.keys().filter(|name| quantizable(name)).count();
        assert!(text.contains(&format!("{quantized} of them were cast to nvfp4")), "{text}");
        let config = read_json(out.join("config.json"));
        assert_eq!(
            config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"], 16,
            "{config}"
        );
    }
    // Codes are unchanged, and layers that engines fuse share a global scale.
    let (mx, nv) = (tensors(&scratch.path("MX")), tensors(&scratch.path("compressed-tensors")));
    for (name, (_, _, codes, _)) in mx.iter().filter(|(name, _)| name.ends_with("_packed")) {
        assert_eq!(codes, &nv[name].2, "{name}");
    }
    let queries: Vec<_> = nv.keys().filter(|name| name.ends_with("q_proj.weight_global_scale")).collect();
    assert!(!queries.is_empty());
    for name in queries {
        for other in ["k_proj", "v_proj"] {
            assert_eq!(nv[name].2, nv[&name.replace("q_proj", other)].2, "{name}");
        }
    }
}

#[test]
fn inexact_casts_are_refused_and_write_nothing() {
    let scratch = Scratch::new();
    let mxfp4 = |name: &str, scales: [u8; 2]| {
        let codes = ("a.weight_packed", Dtype::U8, vec![2, 16], vec![0x22; 32]);
        scratch.write_tensors(name, &[codes, ("a.weight_scale", Dtype::U8, vec![2, 1], scales.to_vec())])
    };
    let out = scratch.path("OUT");
    let cast = |input: &std::path::Path, format: &str| {
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--format", &format, &"--out", &out])
    };
    let wide = mxfp4("wide.safetensors", [100, 118]);
    cast(&wide, "nvfp4").fails_with(&["a.weight", "span 19 powers of two", "quantize again"]);
    assert!(!out.exists());
    let other = mxfp4("other.safetensors", [100, 101]);
    let eight = scratch.path("EIGHT.safetensors");
    let to_eight = |input: &std::path::Path, out: &std::path::Path| {
        run(&[&"convert", &input, &"--to", &"compressed-tensors", &"--format", &"mxfp8-e4m3", &"--out", &out])
    };
    let text = to_eight(&other, &eight).ok();
    assert!(text.contains("1 of them were cast to mxfp8-e4m3"), "{text}");
    assert_eq!(tensors(&eight)["a.weight"].0, Dtype::F8_E4M3);
    let compared = run(&[&"compare", &other, &eight]).ok();
    assert!(compared.contains("1.000000") && compared.contains("∞"), "{compared}");
    run(&[&"doctor", &eight]).ok();
    cast(&eight, "nvfp4").fails_with(&["a.weight", "not cast to nvfp4"]);
    // NVFP4 with a global scale of 3 has values that the target cannot represent.
    let codes = ("a.weight_packed", Dtype::U8, vec![2, 32], vec![0x23; 64]);
    let scales = ("a.weight_scale", Dtype::F8_E4M3, vec![2, 4], [&[0x38; 6][..], &[0x39; 2]].concat());
    for (global_scale, block) in [(3.0f32, Some("block 0")), (4.0, Some("block 3")), (4.0, None)] {
        let mut scales = scales.clone();
        if block.is_none() {
            scales.3 = vec![0x3A; 8];
        }
        let name = ("a.weight_global_scale", Dtype::F32, vec![1], floats(&[global_scale]));
        let input = scratch.write_tensors("nv.safetensors", &[codes.clone(), scales, name]);
        let ran = to_eight(&input, &out);
        match block {
            Some(block) => {
                ran.fails_with(&["nv.safetensors", "a.weight", block, "no scale makes exact in mxfp8-e4m3"])
            }
            None => drop(ran.ok()),
        }
        assert_eq!(out.exists(), block.is_none());
    }
    std::fs::remove_file(&out).unwrap();
    assert!(!out.exists());
    // MXFP8 has no input scales.
    let global_scale = ("a.weight_global_scale", Dtype::F32, vec![1], floats(&[4.0]));
    let inputs = ("a.input_global_scale", Dtype::F32, vec![1], floats(&[8.0]));
    let scales = ("a.weight_scale", Dtype::F8_E4M3, vec![2, 4], vec![0x38; 8]);
    let input = scratch.write_tensors("w4a4.safetensors", &[codes, scales, global_scale, inputs]);
    let text = to_eight(&input, &out).ok();
    assert!(text.contains("1 layers' inputs were left out") && text.contains("of a.weight\n"), "{text}");
    assert!(tensors(&out).keys().all(|name| !name.contains("input")));
    std::fs::remove_file(&out).unwrap();
    cast(&other, "nvfp4").ok();
    assert!(tensors(&out).contains_key("a.weight_global_scale"));
}

/// Some libraries write `null` for an unquantized checkpoint.
#[test]
fn a_quantization_config_of_null_is_none() {
    let scratch = Scratch::new();
    let tensor = ("a.q_proj.weight", Dtype::F32, vec![4, 64], floats(&noise(256)));
    scratch.write_tensors("in/model.safetensors", &[tensor]);
    scratch.write("in/config.json", r#"{"a": 1, "quantization_config": null}"#);
    quantize(&scratch, &scratch.path("in"), "out", &["--format", "nvfp4"]).ok();
    let config = read_json(scratch.path("out/config.json"));
    assert_eq!(config["quantization_config"]["quant_method"], "compressed-tensors");
    run(&[&"dequantize", &scratch.path("out"), &"--out", &scratch.path("back")]).ok();
    assert!(read_json(scratch.path("back/config.json")).get("quantization_config").is_none());
}
