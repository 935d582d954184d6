//! Reports about tensors: the plan, the JSON, `compare` and `inspect`, also after dequantizing.

use approx::assert_relative_eq;
use half::bf16;
use microscale::{ErrorStats, Format, QuantizedShape, QuantizedTensor, Recipe, Shape};
use microscale_test_support::{Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{bf16s, floats, noise, quantizable, quantize, read_json, tensors};

#[test]
fn there_and_back_again() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &[]).ok();
    let (out, back) = (scratch.path("OUT"), scratch.path("BACK"));
    run(&[&"dequantize", &out, &"--out", &back]).ok();
    let (before, quantized, after) = (tensors(&sample()), tensors(&out), tensors(&back));
    assert!(before.keys().eq(after.keys()));
    for (name, (dtype, shape, data, file)) in &after {
        let (original_dtype, original_shape, original, original_file) = &before[name];
        assert_eq!((dtype, shape, file), (original_dtype, original_shape, original_file), "{name}");
        let expected = if quantizable(name) {
            let parts = ["packed", "scale"].map(|part| quantized[&format!("{name}_{part}")].2.clone());
            let [codes, scales] = parts;
            let quantized_shape = QuantizedShape::new(Format::Mxfp4, shape[0], shape[1]);
            let tensor = QuantizedTensor::from_parts(quantized_shape, codes, scales).unwrap();
            &microscale::dequantize::<bf16>(&tensor).iter().flat_map(|value| value.to_le_bytes()).collect()
        } else {
            original
        };
        assert_eq!(data, expected, "{name}");
    }
    for name in ["config.json", "model.safetensors.index.json"] {
        assert_eq!(read_json(back.join(name)), read_json(sample().join(name)), "{name}");
    }
    // Dequantized values are representable, so quantizing again loses nothing.
    quantize(&scratch, &back, "AGAIN", &[]).ok();
    assert_eq!(tensors(&scratch.path("AGAIN")), quantized);
}

#[test]
fn json_states_what_happened_to_each_tensor_and_in_total() {
    let scratch = Scratch::new();
    let file = scratch.path("facts.json");
    quantize(&scratch, &sample(), "OUT", &["--device", "cpu", "--json", file.to_str().unwrap()]).ok();
    let facts = read_json(file);
    let before = tensors(&sample());
    let mut total = ErrorStats::default();
    let entries = facts["tensors"].as_array().unwrap();
    assert_eq!(entries.len(), before.len());
    for entry in entries {
        let name = entry["name"].as_str().unwrap();
        let (_, shape, data, _) = &before[name];
        assert_eq!(entry["shape"], json!(shape));
        assert_eq!(entry["bytes_before"], json!(data.len()));
        assert_eq!(entry["copied"].is_null(), quantizable(name), "{name}: {entry}");
        if quantizable(name) {
            let (values, shape) = (bf16s(data), Shape::new(shape[0], shape[1]));
            let quantized = microscale::quantize(&values, shape, &Recipe::default()).unwrap();
            let errors = ErrorStats::of_quantized(&values, shape, &quantized.tensor).unwrap();
            total += errors;
            let loss = &entry["loss"];
            let error = loss["relative_squared_error"].as_f64().unwrap();
            assert_relative_eq!(error, errors.relative_squared_error(), max_relative = 1e-12);
            assert_eq!(loss["clipped_blocks"], json!(quantized.report.clipped_blocks));
            assert_eq!(entry["bytes_after"], json!(values.len() / 2 + values.len() / 32));
        } else {
            assert_eq!(entry["bytes_after"], entry["bytes_before"]);
        }
    }
    let loss = &facts["loss"];
    assert_relative_eq!(loss["sqnr_db"].as_f64().unwrap(), total.sqnr_db(), max_relative = 1e-12);
    assert_relative_eq!(loss["cosine"].as_f64().unwrap(), total.cosine(), max_relative = 1e-12);
    assert_eq!(loss["nan"], json!(0));
    assert_eq!(facts["quantized"]["elements"], json!(total.elements()));
    let count = |part: &str| facts[part]["tensors"].as_u64().unwrap();
    assert_eq!(
        (count("total"), count("quantized") + count("copied")),
        (before.len() as u64, before.len() as u64)
    );
    assert!(facts["device"].as_str().unwrap().starts_with("CPU, "));
    assert_eq!((&facts["scale_rule"], &facts["ties"]), (&json!("floor"), &json!("even")));
}

#[test]
fn a_dry_run_writes_nothing_and_says_why_each_tensor_is_copied() {
    let scratch = Scratch::new();
    let zeros = |n: usize| vec![0; n];
    let input = scratch.write_tensors(
        "x.safetensors",
        &[
            ("fc.weight", Dtype::F32, vec![4, 64], zeros(1024)),
            ("fc.bias", Dtype::F32, vec![4], zeros(16)),
            ("odd.weight", Dtype::F16, vec![4, 100], zeros(800)),
            ("norm.weight", Dtype::BF16, vec![64], zeros(128)),
            ("embed_tokens.weight", Dtype::BF16, vec![4, 64], zeros(512)),
            ("ids", Dtype::I64, vec![2, 32], zeros(512)),
            ("experts.down", Dtype::BF16, vec![2, 2, 64], zeros(512)),
            ("head.weight", Dtype::F32, vec![4, 64], zeros(1024)),
        ],
    );
    let before = scratch.contents();
    let exclude = ["--dry-run", "--exclude", "head*"];
    let plan = quantize(&scratch, &input, "OUT", &exclude).ok();
    let line = |name: &str| {
        plan.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {plan}"))
    };
    for (name, part) in [
        ("fc.weight", "mxfp4"),
        ("fc.bias", "copy: 1-D"),
        ("odd.weight", "copy: K = 100 is not a multiple of 32"),
        ("norm.weight", "copy: norm"),
        ("embed_tokens.weight", "copy: embedding"),
        ("ids", "copy: dtype I64"),
        ("experts.down", "copy: not called *.weight"),
        ("head.weight", "copy: excluded by \"head*\""),
    ] {
        assert!(line(name).contains(part), "{name}: {plan}");
    }
    assert_eq!(before, scratch.contents());
}

#[test]
fn include_and_exclude_choose_tensors_and_experts_keep_their_dimensions() {
    let scratch = Scratch::new();
    let values = noise(2 * 3 * 64);
    let tensor = |name, shape: &[usize]| (name, Dtype::F32, shape.to_vec(), floats(&values));
    let input = scratch.write_tensors(
        "x.safetensors",
        &[
            tensor("experts.down", &[2, 3, 64]),
            tensor("lm_head.weight", &[6, 64]),
            tensor("fc.weight", &[6, 64]),
        ],
    );
    let run = quantize(
        &scratch,
        &input,
        "OUT",
        &["--include", "*.down", "--include", "lm_head.*", "--exclude", "fc.*", "--exclude", "typo"],
    );
    assert!(run.stderr.contains("no tensor is called \"typo\""), "{}", run.stderr);
    run.ok();
    let after = tensors(&scratch.path("OUT"));
    assert_eq!(after["experts.down_packed"].1, [2, 3, 32]);
    assert_eq!(after["experts.down_scale"].1, [2, 3, 2]);
    assert_eq!(after["lm_head.weight_packed"].2, after["experts.down_packed"].2);
    assert_eq!(after["fc.weight"].2, floats(&values));
    let nothing = quantize(&scratch, &input, "NONE", &["--exclude", "*"]);
    nothing.fails_with(&["x.safetensors", "no tensor to quantize"]);
}

#[test]
fn compare_measures_what_quantize_reported() {
    let scratch = Scratch::new();
    let facts = scratch.path("facts.json");
    quantize(&scratch, &sample(), "OUT", &["--json", facts.to_str().unwrap()]).ok();
    let facts = read_json(facts);
    let text = run(&[&"compare", &sample(), &scratch.path("OUT")]).ok();
    for entry in facts["tensors"].as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        let figures: Vec<&str> = line[name.len()..].split_whitespace().collect();
        if entry["copied"].is_null() {
            let expected = entry["loss"]["relative_squared_error"].as_f64().unwrap();
            assert_relative_eq!(figures[0].parse::<f64>().unwrap(), expected, max_relative = 1e-3);
            let expected = entry["loss"]["sqnr_db"].as_f64().unwrap();
            assert_relative_eq!(figures[1].parse::<f64>().unwrap(), expected, epsilon = 0.006);
        } else {
            assert_eq!(figures, ["0", "∞", "0", "1.000000"], "{name}");
        }
    }
    assert!(text.lines().any(|line| line.starts_with("total ")), "{text}");
}

#[test]
fn compare_lists_what_only_one_side_has_and_compares_bytes_of_other_dtypes() {
    let scratch = Scratch::new();
    let ints = |name, byte| (name, Dtype::I64, vec![2], vec![byte; 16]);
    let float = ("f", Dtype::F32, vec![2], floats(&[3.0, 4.0]));
    let half = ("f", Dtype::BF16, vec![2], vec![0x40, 0x40, 0x40, 0x40]);
    let a =
        scratch.write_tensors("a.safetensors", &[ints("same", 1), ints("other", 1), ints("mine", 1), float]);
    let b =
        scratch.write_tensors("b.safetensors", &[ints("same", 1), ints("other", 2), ints("yours", 1), half]);
    let text = run(&[&"compare", &a, &b]).ok();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(words.contains(&vec!["same", "same", "bytes"]), "{text}");
    assert!(words.contains(&vec!["other", "other", "bytes"]), "{text}");
    // 3 and 3 in place of 3 and 4: 1² / 25.
    assert!(words.contains(&vec!["f", "0.04000", "13.98", "dB", "1.000", "0.989949"]), "{text}");
    assert!(text.contains("a.safetensors:\n  mine") && text.contains("b.safetensors:\n  yours"), "{text}");
}

#[test]
fn inspect_counts_scales_and_codes() {
    let scratch = Scratch::new();
    let mut values = vec![0.0f32; 96];
    (values[0], values[1], values[32], values[64]) = (4.0, -1.0, 1.5, f32::NAN);
    let input =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![1, 96], floats(&values))]);
    quantize(&scratch, &input, "y.safetensors", &["--non-finite", "propagate"]).ok();
    let text = run(&[&"inspect", &scratch.path("y.safetensors")]).ok();
    let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let counted = |start: &[&str]| words.iter().any(|line| line.starts_with(start));
    assert!(counted(&["a.weight", "mxfp4", "1×96", "51", "B", "2^-2", "…", "2^0", "1"]), "{text}");
    assert!(
        counted(&["2^0", "127", "1"]) && counted(&["2^-2", "125", "1"]) && counted(&["NaN", "255", "1"]),
        "{text}"
    );
    // 4 and 1.5 / 2^-2 = 6 and -1. The other codes are zero.
    assert!(
        counted(&["4.0", "6", "1"]) && counted(&["6.0", "7", "1"]) && counted(&["-1.0", "10", "1"]),
        "{text}"
    );
    assert!(counted(&["0.0", "0", "93"]) && counted(&["-0.0", "8", "0"]), "{text}");

    let text = run(&[&"inspect", &sample()]).ok();
    assert!(text.contains("30 tensors in 2 files, 0 of them quantized"), "{text}");
}

#[test]
fn global_scales_are_parts_of_tensors() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &["--format", "nvfp4"]).ok();
    let compared = run(&[&"compare", &sample(), &scratch.path("OUT")]).ok();
    assert!(!compared.contains("only in"), "{compared}");
}
