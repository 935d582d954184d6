//! Sources of NVFP4's global scales: shared amax, a number, a file, or none.

use std::fs;

use half::f16;
use microscale::{Format, Global, GlobalScale, Numerics, Recipe, Shape};
use microscale_test_support::{Run, Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{floats, noise, quantize, read_json, tensors};

/// Returns a 4 × 32 weight with this amax.
fn weight(name: &'static str, amax: f32) -> TensorData {
    let mut values = vec![0.5f32; 128];
    values[77] = -amax;
    (name, Dtype::F32, vec![4, 32], floats(&values))
}

/// Returns a tensor's stored divisor.
fn stored(scratch: &Scratch, out: &str, name: &str) -> f32 {
    let (_, _, data, _) = tensors(&scratch.path(out)).remove(&format!("{name}_global_scale")).unwrap();
    f32::from_le_bytes(data[..].try_into().unwrap())
}

fn nvfp4(scratch: &Scratch, input: &str, out: &str, more: &[&str]) -> Run {
    quantize(scratch, &scratch.path(input), out, &[&["--format", "nvfp4"], more].concat())
}

#[test]
fn fused_layers_share_the_largest_amax_across_shards_and_others_do_not() {
    let scratch = Scratch::new();
    let shards: [&[TensorData]; 2] = [
        &[
            weight("layers.0.attn.k_proj.weight", 1.0),
            weight("layers.0.attn.q_proj.weight", 2.0),
            weight("layers.0.mlp.gate_proj.weight", 7.0),
            weight("layers.0.mlp.down_proj.weight", 3.0),
            weight("moe.experts.0.w1.weight", 6.0),
            weight("moe.experts.1.w1.weight", 1.0),
            weight("bert.query.weight", 1.0),
        ],
        &[
            weight("layers.0.attn.v_proj.weight", 4.0),
            weight("layers.0.mlp.up_proj.weight", 5.0),
            weight("layers.1.attn.q_proj.weight", 16.0),
            weight("moe.experts.0.w3.weight", 12.0),
            weight("moe.experts.0.w2.weight", 24.0),
            weight("bert.key.weight", 2.0),
        ],
    ];
    let mut entries = Vec::new();
    for (file, shard) in ["one.safetensors", "two.safetensors"].into_iter().zip(shards) {
        scratch.write_tensors(format!("in/{file}"), shard);
        entries.extend(shard.iter().map(|(name, ..)| (*name, file)));
    }
    scratch.write_index("in", &entries);
    nvfp4(&scratch, "in", "OUT", &["--numerics", "transformer-engine"]).ok();
    for (name, amax) in [
        ("layers.0.attn.q_proj", 4.0),
        ("layers.0.attn.k_proj", 4.0),
        ("layers.0.attn.v_proj", 4.0),
        ("layers.1.attn.q_proj", 16.0),
        ("layers.0.mlp.gate_proj", 7.0),
        ("layers.0.mlp.up_proj", 7.0),
        ("layers.0.mlp.down_proj", 3.0),
        ("moe.experts.0.w1", 12.0),
        ("moe.experts.0.w3", 12.0),
        ("moe.experts.0.w2", 24.0),
        ("moe.experts.1.w1", 1.0),
        ("bert.query", 2.0),
        ("bert.key", 2.0),
    ] {
        assert_eq!(stored(&scratch, "OUT", &format!("{name}.weight")), 2688.0 / amax, "{name}");
    }
    // Unquantized tensors do not count.
    let exclude = ["--numerics", "transformer-engine", "--exclude", "*.v_proj.*"];
    nvfp4(&scratch, "in", "SOME", &exclude).ok();
    assert_eq!(stored(&scratch, "SOME", "layers.0.attn.k_proj.weight"), 1344.0);
}

#[test]
fn parts_of_several_dtypes_and_values_that_are_not_finite() {
    let scratch = Scratch::new();
    let mut bad = vec![f16::from_f32(0.5); 128];
    (bad[40], bad[41]) = (f16::NAN, f16::NEG_INFINITY);
    let bytes = bad.iter().flat_map(|value| value.to_le_bytes()).collect();
    let bad = ("b.up_proj.weight", Dtype::F16, vec![4, 32], bytes);
    scratch.write_tensors("x.safetensors", &[weight("b.gate_proj.weight", 4.0), bad]);
    let before = scratch.contents();
    // The error names the faulty tensor, although the other one is quantized first.
    nvfp4(&scratch, "x.safetensors", "OUT", &[]).fails_with(&[
        "x.safetensors",
        "tensor b.up_proj.weight",
        "1 NaN",
        "1 infinite",
        "row 1, column 8",
    ]);
    assert_eq!(before, scratch.contents());
    for (policy, amax) in [("propagate", 4.0), ("saturate", 65504.0)] {
        let more = ["--numerics", "transformer-engine", "--non-finite", policy];
        nvfp4(&scratch, "x.safetensors", policy, &more).ok();
        for name in ["b.gate_proj.weight", "b.up_proj.weight"] {
            assert_eq!(stored(&scratch, policy, name), 2688.0 / amax, "{policy} {name}");
        }
    }
}

#[test]
fn a_number_is_for_all_tensors_and_none_is_one() {
    let scratch = Scratch::new();
    let values = noise(128);
    let input = ("a.weight", Dtype::F32, vec![4, 32], floats(&values));
    scratch.write_tensors("x.safetensors", &[input, weight("b.weight", 2.0)]);
    for (i, (numerics, argument, global, file, words)) in [
        ("compressed-tensors", "700", Global::Given(GlobalScale::Divisor(700.0)), 700.0, "700, a divisor"),
        ("transformer-engine", "0.5", Global::Given(GlobalScale::Divisor(0.5)), 0.5, "0.5, a divisor"),
        ("torchao", "3", Global::Given(GlobalScale::Multiplier(3.0)), 1.0 / 3.0, "3, a multiplier"),
        ("modelopt", "0.25", Global::Given(GlobalScale::Multiplier(0.25)), 4.0, "0.25, a multiplier"),
        ("compressed-tensors", "none", Global::Absent, 1.0, "none"),
        ("torchao", "none", Global::Absent, 1.0, "none"),
    ]
    .into_iter()
    .enumerate()
    {
        let (out, facts) = (format!("OUT{i}"), scratch.path("facts.json"));
        let more = ["--numerics", numerics, "--global-scale", argument, "--json", facts.to_str().unwrap()];
        let text = nvfp4(&scratch, "x.safetensors", &out, &more).ok();
        assert!(text.contains(&format!(", global scale {words}\n")), "{text}");
        assert_eq!(read_json(facts)["global_scale"], argument);
        let numerics = microscale::Words::from_word(numerics).unwrap();
        let recipe = Recipe::of(Format::Nvfp4, numerics).unwrap().with_global(global);
        let expected = microscale::quantize(&values, Shape::new(4, 32), &recipe).unwrap().tensor;
        let written = tensors(&scratch.path(&out));
        assert_eq!(written["a.weight_packed"].2, expected.codes(), "{numerics:?} {argument}");
        assert_eq!(written["a.weight_scale"].2, expected.scales(), "{numerics:?} {argument}");
        for name in ["a.weight", "b.weight"] {
            assert_eq!(stored(&scratch, &out, name), file, "{numerics:?} {argument}");
        }
    }
}

#[test]
fn a_file_gives_each_tensor_its_own() {
    let scratch = Scratch::new();
    let names = ["a.weight", "b.weight", "c.weight"];
    scratch.write_tensors("x.safetensors", &names.map(|name| weight(name, 2.0)));
    let scale = |name, shape: &[usize], value: f32| (name, Dtype::F32, shape.to_vec(), floats(&[value]));
    scratch.write_tensors(
        "scales.safetensors",
        &[
            scale("a.weight", &[], 300.0),
            scale("b.weight_global_scale", &[1], 400.0),
            scale("c.weight_scale_2", &[], 0.125),
            scale("d.weight", &[], 1.0),
        ],
    );
    let (file, facts) = (scratch.path("scales.safetensors"), scratch.path("facts.json"));
    let file = file.to_str().unwrap();
    let more = ["--global-scale", file, "--json", facts.to_str().unwrap()];
    let run = nvfp4(&scratch, "x.safetensors", "OUT", &more);
    assert!(
        run.stderr.contains("scales.safetensors: d.weight: no tensor to quantize is called so"),
        "{run:#?}"
    );
    assert!(run.stderr.contains("scales.safetensors: c.weight: inverted, which rounds"), "{run:#?}");
    assert!(!run.stderr.contains("fuse"), "{run:#?}");
    let text = run.ok();
    assert!(text.contains(&format!(", global scale from {file}, a divisor\n")), "{text}");
    assert_eq!(names.map(|name| stored(&scratch, "OUT", name)), [300.0, 400.0, 8.0]);
    let facts = read_json(facts);
    assert_eq!(facts["global_scale"], json!(format!("from {file}")));
    assert_eq!(facts["tensors"][2]["global_scale"], json!(8.0));

    // Numerics with multipliers. The plain name then means a multiplier.
    let numerics = ["--numerics", "torchao", "--global-scale", file];
    let run = nvfp4(&scratch, "x.safetensors", "TORCHAO", &numerics);
    assert!(run.stderr.contains("b.weight: inverted"), "{run:#?}");
    run.ok();
    let multipliers = [300.0, 1.0 / 400.0, 0.125].map(|multiplier: f32| 1.0 / multiplier);
    assert_eq!(names.map(|name| stored(&scratch, "TORCHAO", name)), multipliers);
}

#[test]
fn a_quantized_checkpoint_gives_its_global_scales_and_unequal_ones_are_warned_about() {
    let scratch = Scratch::new();
    let (q, k) = ("attn.q_proj.weight", "attn.k_proj.weight");
    scratch.write_tensors("x.safetensors", &[weight(q, 2.0), weight(k, 3.0)]);
    nvfp4(&scratch, "x.safetensors", "FIRST", &[]).ok();
    let first = scratch.path("FIRST");
    let run = nvfp4(&scratch, "x.safetensors", "AGAIN", &["--global-scale", first.to_str().unwrap()]);
    assert!(run.stderr.contains("q_proj.weight_packed") && !run.stderr.contains("fuse"), "{run:#?}");
    run.ok();
    assert_eq!(fs::read(scratch.path("AGAIN")).unwrap(), fs::read(&first).unwrap());
    let scale = |name, value: f32| (name, Dtype::F32, vec![1], floats(&[value]));
    let unequal = scratch.write_tensors("unequal.safetensors", &[scale(q, 1.0), scale(k, 2.0)]);
    let run = nvfp4(&scratch, "x.safetensors", "UNEQUAL", &["--global-scale", unequal.to_str().unwrap()]);
    assert!(run.stderr.contains("serving engines fuse"), "{run:#?}");
    run.ok();
    assert_eq!([q, k].map(|name| stored(&scratch, "UNEQUAL", name)), [1.0, 2.0]);
}

#[test]
fn files_that_do_not_give_one() {
    let scratch = Scratch::new();
    scratch.write_tensors("x.safetensors", &[weight("a.weight", 2.0), weight("b.bias.weight", 2.0)]);
    let scale = |name, dtype, shape: &[usize], bytes: Vec<u8>| (name, dtype, shape.to_vec(), bytes);
    let number = |name, value: f32| scale(name, Dtype::F32, &[1], floats(&[value]));
    let other = || number("b.bias.weight", 1.0);
    for (tensors, parts) in [
        (vec![other()], &["no global scale for tensor a.weight", "a.weight_scale_2", "--exclude"][..]),
        (vec![other(), number("a.weight", 0.0)], &["tensor a.weight", "global scale of 0 as a divisor"]),
        (vec![other(), number("a.weight_scale_2", f32::NAN)], &["a.weight_scale_2", "NaN as a multiplier"]),
        (vec![other(), number("a.weight_global_scale", -1.0)], &["a.weight_global_scale", "-1 as a divisor"]),
        (
            vec![other(), scale("a.weight", Dtype::BF16, &[1], vec![0; 2])],
            &["tensor a.weight", "one F32", "BF16"],
        ),
        (vec![other(), scale("a.weight", Dtype::F32, &[2], vec![0; 8])], &["tensor a.weight", "shape [2]"]),
        (
            vec![other(), number("a.weight_scale_2", 1.0), number("a.weight_global_scale", 1.0)],
            &["two global scales", "tensor a.weight", "a.weight_global_scale and a.weight_scale_2"],
        ),
    ] {
        let file = scratch.write_tensors("scales.safetensors", &tensors);
        let before = scratch.contents();
        let run = nvfp4(&scratch, "x.safetensors", "OUT", &["--global-scale", file.to_str().unwrap()]);
        run.fails_with(&[&["scales.safetensors"], parts].concat());
        assert_eq!(before, scratch.contents());
    }
    // A divisor with a subnormal inverse.
    let file = scratch.write_tensors("scales.safetensors", &[other(), number("a.weight_global_scale", 3e38)]);
    let torchao = ["--numerics", "torchao", "--global-scale", file.to_str().unwrap()];
    let parts = ["scales.safetensors", "a.weight_global_scale", "as a multiplier is out of range"];
    nvfp4(&scratch, "x.safetensors", "OUT", &torchao).fails_with(&parts);

    let nowhere = nvfp4(&scratch, "x.safetensors", "OUT", &["--global-scale", "nowhere"]);
    nowhere.fails_with(&["cannot take global scales from nowhere", "cannot open"]);
    let help = run(&[&"quantize", &"--help"]).ok();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["compressed-tensors a divisor", "transformer-engine a divisor", "modelopt a multiplier"] {
        assert!(help.contains(part), "{help}");
    }
    assert_eq!(Numerics::default_for(Format::Nvfp4), Numerics::CompressedTensors);
}
