//! The doctor on models whose layers differ on purpose, and on tensors of every dtype.

use std::path::Path;

use half::{bf16, f16};
use microscale::{Device, Words};
use microscale_checkpoint::{Checkpoint, diagnose};
use microscale_test_support::Scratch;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use crate::input::{Tensor, write_file};
use crate::{BAND, going_on};

/// The findings of a checkpoint: the word of the defect, the tensor and the details.
fn findings(path: &Path, against: Option<&Path>) -> Vec<(&'static str, String, String)> {
    let open = |path: &Path| Checkpoint::open(path).unwrap();
    let against = against.map(open);
    let found = diagnose(&open(path), against.as_ref(), &Device::Cpu, going_on()).unwrap().findings;
    let found = found.into_iter();
    found.map(|found| (found.defect.word(), found.tensor.unwrap_or_default(), found.what)).collect()
}

/// The names of the tensors with findings of a defect.
fn tensors_with(path: &Path, defect: &str) -> Vec<String> {
    let found = findings(path, None);
    assert!(found.iter().all(|(word, ..)| *word == defect), "{found:#?}");
    found.into_iter().map(|(_, tensor, _)| tensor).collect()
}

/// Tensors by name and shape.
type Shapes = Vec<(String, Vec<usize>)>;

/// Writes a model with these tensors, given by name and shape.
fn write(scratch: &Scratch, config: &Value, tensors: &[(String, Vec<usize>)]) -> std::path::PathBuf {
    let tensors: Vec<_> = tensors
        .iter()
        .zip(0..)
        .map(|((name, shape), seed)| Tensor::noise::<bf16>(name, shape, seed))
        .collect();
    write_file(scratch, "IN/model.safetensors", &tensors);
    scratch.write("IN/config.json", config.to_string());
    scratch.path("IN")
}

/// The tensors of layers: of each, the modules that `modules` names.
fn stack(layers: usize, modules: impl Fn(usize) -> Vec<&'static str>) -> Shapes {
    let mut tensors = Vec::new();
    for layer in 0..layers {
        for module in modules(layer) {
            let shape = if module.contains("norm") { vec![32] } else { vec![32, 32] };
            tensors.push((format!("model.layers.{layer}.{module}.weight"), shape));
        }
    }
    for (name, shape) in
        [("model.embed_tokens", vec![64, 32]), ("lm_head", vec![64, 32]), ("model.norm", vec![32])]
    {
        tensors.push((format!("{name}.weight"), shape));
    }
    tensors
}

const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];
const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

fn layer(parts: &[&[&'static str]]) -> Vec<&'static str> {
    parts.concat()
}

/// The layers of models that differ on purpose, with a config for each.
fn hybrids() -> Vec<(&'static str, Value, Shapes)> {
    let config =
        |model_type: &str| json!({ "model_type": model_type, "num_hidden_layers": 6, "hidden_size": 32 });
    let types = |full: &[usize]| {
        let kind = |layer| if full.contains(&layer) { "full_attention" } else { "sliding_attention" };
        json!((0..6).map(kind).collect::<Vec<_>>())
    };
    let linear = ["linear_attn.in_proj_qkv", "linear_attn.out_proj", "linear_attn.norm"];
    let experts = ["mlp.gate", "mlp.experts.0.up_proj", "mlp.experts.1.up_proj"];
    let alternating = stack(6, |at| layer(&[&NORMS, if at % 3 == 2 { &ATTENTION } else { &linear }, &MLP]));
    let dense_first = stack(6, |at| layer(&[&NORMS, &ATTENTION, if at == 0 { &MLP } else { &experts }]));
    let shared = stack(6, |at| {
        let own: &[_] =
            if at == 5 { &[] } else { &["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"] };
        layer(&[&NORMS, &["self_attn.q_proj", "self_attn.o_proj"], own, &MLP])
    });
    let mut wide = stack(6, |_| layer(&[&NORMS, &ATTENTION, &MLP]));
    for (name, shape) in &mut wide {
        if name.starts_with("model.layers.5.self_attn.k_proj") {
            *shape = vec![64, 32];
        }
    }
    let mut kinds = config("gemma4");
    kinds["layer_types"] = types(&[5]);
    let first = stack(6, |at| {
        let norm: &[_] = if at == 0 { &[] } else { &["attn_norm"] };
        layer(&[norm, &["mlp_norm", "attn.Wqkv", "mlp.Wo"]])
    });
    let relative = stack(6, |at| {
        let first: &[_] = if at == 0 { &["attn.relative_attention_bias"] } else { &[] };
        layer(&[&NORMS, first, &ATTENTION])
    });
    vec![
        ("alternating kinds", config("qwen3_next"), alternating),
        ("a dense first layer", config("deepseek_v3"), dense_first),
        ("keys and values of another layer", config("gemma3n"), shared),
        ("one layer of another kind", kinds, wide),
        ("a first layer without a norm", config("modernbert"), first),
        ("positions of the first layer for all", config("who-knows"), relative),
    ]
}

#[test]
fn layers_that_differ_on_purpose_are_no_defect() {
    for (what, config, tensors) in hybrids() {
        let scratch = Scratch::new();
        assert_eq!(findings(&write(&scratch, &config, &tensors), None), [], "{what}");
    }
}

#[test]
fn a_tensor_that_one_layer_of_its_kind_lacks_is_missing() {
    for (number, name) in [
        (0, "model.layers.4.linear_attn.norm.weight"),
        (0, "model.layers.1.post_attention_layernorm.weight"),
        (1, "model.layers.3.mlp.experts.1.up_proj.weight"),
        (2, "model.layers.2.self_attn.k_norm.weight"),
        (4, "model.layers.3.mlp_norm.weight"),
        (5, "model.layers.5.input_layernorm.weight"),
    ] {
        let scratch = Scratch::new();
        let (what, config, mut tensors) = hybrids().swap_remove(number);
        let before = tensors.len();
        tensors.retain(|(tensor, _)| tensor != name);
        assert_eq!(tensors.len() + 1, before, "{name}");
        assert_eq!(tensors_with(&write(&scratch, &config, &tensors), "missing"), [name], "{what}");
    }
    // Several layers without it are a kind of their own, and one of several files has part of a layer.
    let scratch = Scratch::new();
    let (_, config, mut tensors) = hybrids().swap_remove(1);
    tensors.retain(|(name, _)| !name.contains(".2.input_layernorm") && !name.contains(".3.input_layernorm"));
    assert_eq!(findings(&write(&scratch, &config, &tensors), None), []);
    let part = [Tensor::noise::<bf16>("model.layers.0.a.weight", &[32], 1)];
    let part: Vec<_> = (1..4)
        .flat_map(|layer| ["a", "b"].map(|name| format!("model.layers.{layer}.{name}.weight")))
        .map(|name| Tensor::noise::<bf16>(name, &[32], 1))
        .chain(part)
        .collect();
    let (whole, file) = ("model.safetensors", "model-00001-of-00002.safetensors");
    assert_eq!(tensors_with(&write_file(&scratch, whole, &part), "missing"), ["model.layers.0.b.weight"]);
    assert_eq!(findings(&write_file(&scratch, file, &part), None), []);
}

#[test]
fn values_of_every_dtype_are_checked() {
    let scratch = Scratch::new();
    let with = |bytes: &mut Vec<u8>, element: usize, value: &[u8]| {
        bytes[element * value.len()..][..value.len()].copy_from_slice(value);
    };
    let mut tensors = Vec::new();
    let mut add = |name: &str, dtype, one: &[u8], wrong: Option<(usize, &[u8])>| {
        let mut bytes = one.repeat(3 * BAND);
        if let Some((element, value)) = wrong {
            with(&mut bytes, element, value);
        }
        tensors.push(Tensor::of_bytes(name, dtype, &[3, BAND], &bytes));
    };
    let late = 2 * BAND + 5;
    add("f32.bias", Dtype::F32, &1f32.to_le_bytes(), Some((late, &f32::INFINITY.to_le_bytes())));
    add("f16", Dtype::F16, &f16::ONE.to_le_bytes(), Some((late, &f16::NAN.to_le_bytes())));
    add("bf16", Dtype::BF16, &bf16::ONE.to_le_bytes(), Some((late, &bf16::NEG_INFINITY.to_le_bytes())));
    add("f64", Dtype::F64, &1f64.to_le_bytes(), Some((late, &f64::NAN.to_le_bytes())));
    add("e5m2", Dtype::F8_E5M2, &[0x3C], Some((late, &[0x7C])));
    add("attn_mask", Dtype::F32, &f32::NEG_INFINITY.to_le_bytes(), None);
    add("index", Dtype::I64, &[0xFF; 8], None);
    add("sound", Dtype::F32, &f32::MAX.to_le_bytes(), None);
    let file = write_file(&scratch, "in.safetensors", &tensors);
    let mut found = findings(&file, None);
    found.sort();
    let names: Vec<_> = found.iter().map(|(word, tensor, _)| (*word, tensor.as_str())).collect();
    let expected = ["bf16", "e5m2", "f16", "f32.bias", "f64"].map(|name| ("non-finite", name));
    assert_eq!(names, expected);
    for (_, tensor, what) in &found {
        let infinite = ["bf16", "e5m2", "f32.bias"].contains(&tensor.as_str());
        let counts = if infinite {
            "0 of 786432 values are NaN and 1 infinite"
        } else {
            "1 of 786432 values are NaN and 0 infinite"
        };
        assert_eq!(*what, format!("{counts}, the first in row 2, column 5"), "{tensor}");
    }
}

#[test]
fn unquantized_tensors_are_compared_with_the_original() {
    let scratch = Scratch::new();
    let values = crate::input::noise::<f32>(2 * BAND, 3);
    let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
    let mut other = values.clone();
    other[BAND + 3] = 9.0;
    let mut sign = narrow.clone();
    sign.iter_mut().step_by(9).for_each(|value| *value = -*value);
    let file = |name: &str, tensors: &[Tensor]| write_file(&scratch, name, tensors);
    let table = |name: &str| Tensor::of(name, &[2, BAND], &values);
    let integers = |last: u8| {
        Tensor::of_bytes("ids", Dtype::I64, &[2], &[0, 0, 0, 0, 0, 0, 0, 0, last, 0, 0, 0, 0, 0, 0, 0])
    };
    let original =
        file("o.safetensors", &[table("same"), table("cast"), table("changed"), table("wrong"), integers(1)]);
    let sound = file(
        "a.safetensors",
        &[
            table("same"),
            Tensor::of("cast", &[2, BAND], &narrow),
            table("changed"),
            table("wrong"),
            integers(1),
        ],
    );
    assert_eq!(findings(&sound, Some(&original)), []);
    let damaged = file(
        "b.safetensors",
        &[
            table("same"),
            Tensor::of("cast", &[2, BAND], &sign),
            Tensor::of("changed", &[2, BAND], &other),
            Tensor::of("wrong", &[BAND, 2], &values),
            integers(2),
        ],
    );
    let mut found = findings(&damaged, Some(&original));
    found.sort();
    let names: Vec<_> = found.iter().map(|(word, tensor, _)| (*word, tensor.as_str())).collect();
    assert_eq!(names, ["cast", "changed", "ids", "wrong"].map(|name| ("other-values", name)));
    assert!(found[0].2.starts_with("SQNR"), "{found:?}");
    assert_eq!(found[1].2, "its values are not the original's, from row 1, column 3 on");
    assert_eq!(found[2].2, "its values are not the original's, from row 0, column 1 on");
    assert!(found[3].2.contains("the original has shape"), "{found:?}");
    // A tensor that only the original has.
    let names: Vec<_> = (0..20).map(|number| format!("t{number}.weight")).collect();
    let all: Vec<_> = names.iter().map(|name| Tensor::noise::<f32>(name, &[4], 1)).collect();
    let (whole, less) = (file("all.safetensors", &all), file("less.safetensors", &all[1..]));
    assert_eq!(
        findings(&less, Some(&whole)),
        [("missing", "t0.weight".into(), "the original has it".into())]
    );
    assert_eq!(findings(&file("few.safetensors", &all[9..]), Some(&whole)), []);
}
