//! `--split-experts`: merged experts of a layer become one tensor each.

use std::ops::ControlFlow;

use half::bf16;
use microscale::Device;
use microscale_checkpoint::{Checkpoint, Dequantize, OpenOptions, Progress};
use microscale_test_support::{Arg, Run, Scratch, TensorData, run};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{Tensors, noise, read_json, tensors};

const EXPERTS: usize = 3;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 96;

/// Layouts of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    OneByOne,
    Rows,
    Transposed,
}

/// Returns a matrix of unique values.
fn matrix(layer: usize, expert: usize, which: usize, rows: usize, cols: usize) -> Vec<bf16> {
    let scale = 1.0 + (layer * 100 + expert * 10 + which) as f32 / 64.0;
    noise(rows * cols).into_iter().map(|value| bf16::from_f32(value * scale)).collect()
}

fn transposed(values: &[bf16], cols: usize) -> Vec<bf16> {
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols).copied()).collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the tensors of a layer.
fn layer(form: Form, layer: usize) -> Vec<TensorData> {
    // The names of the tensors must outlive the test.
    let name = |rest: &str| &*format!("model.layers.{layer}.mlp.{rest}").leak();
    let bf16 = Dtype::BF16;
    let mut all = vec![(
        name("gate.weight"),
        bf16,
        vec![EXPERTS, HIDDEN],
        bytes(&matrix(layer, 0, 9, EXPERTS, HIDDEN)),
    )];
    let of = |expert, which, rows, cols| matrix(layer, expert, which, rows, cols);
    if form == Form::OneByOne {
        for expert in 0..EXPERTS {
            for (which, matrix, rows, cols) in [
                (0, "gate_proj", INTERMEDIATE, HIDDEN),
                (1, "up_proj", INTERMEDIATE, HIDDEN),
                (2, "down_proj", HIDDEN, INTERMEDIATE),
            ] {
                let name = name(&format!("experts.{expert}.{matrix}.weight"));
                all.push((name, bf16, vec![rows, cols], bytes(&of(expert, which, rows, cols))));
            }
        }
        return all;
    }
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for expert in 0..EXPERTS {
        let both = [of(expert, 0, INTERMEDIATE, HIDDEN), of(expert, 1, INTERMEDIATE, HIDDEN)].concat();
        let one = of(expert, 2, HIDDEN, INTERMEDIATE);
        if form == Form::Rows {
            gate_up.extend(both);
            down.extend(one);
        } else {
            gate_up.extend(transposed(&both, HIDDEN));
            down.extend(transposed(&one, INTERMEDIATE));
        }
    }
    let (of_gate_up, of_down) = match form {
        Form::Rows => ([EXPERTS, 2 * INTERMEDIATE, HIDDEN], [EXPERTS, HIDDEN, INTERMEDIATE]),
        _ => ([EXPERTS, HIDDEN, 2 * INTERMEDIATE], [EXPERTS, INTERMEDIATE, HIDDEN]),
    };
    all.push((name("experts.gate_up_proj"), bf16, of_gate_up.to_vec(), bytes(&gate_up)));
    all.push((name("experts.down_proj"), bf16, of_down.to_vec(), bytes(&down)));
    all
}

/// Writes a checkpoint in two shards with an index.
fn checkpoint(scratch: &Scratch, name: &str, form: Form, config: &Value) {
    let mut map = serde_json::Map::new();
    for number in 0..2 {
        let shard = format!("model-0000{}-of-00002.safetensors", number + 1);
        let all = layer(form, number);
        scratch.write_tensors(format!("{name}/{shard}"), &all);
        map.extend(all.iter().map(|(name, ..)| (name.to_string(), Value::from(shard.clone()))));
    }
    scratch.write(format!("{name}/config.json"), config.to_string());
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
    scratch.write(format!("{name}/model.safetensors.index.json"), index.to_string());
}

fn config() -> Value {
    json!({ "architectures": ["X"], "text_config": { "hidden_size": HIDDEN }, "hidden_size": 1 })
}

fn quantize(scratch: &Scratch, input: &str, out: &str, options: &[&str]) -> Run {
    let (input, out) = (scratch.path(input), scratch.path(out));
    let fixed: [Arg<'_>; 4] = [&"quantize", &input, &"--out", &out];
    run(&fixed.into_iter().chain(options.iter().map(|option| option as Arg<'_>)).collect::<Vec<_>>())
}

fn all_tensors(scratch: &Scratch, out: &str) -> Tensors {
    tensors(&scratch.path(out))
}

#[test]
fn experts_of_every_layout_become_those_that_were_one_by_one() {
    let scratch = Scratch::new();
    for (name, form) in [("ONE", Form::OneByOne), ("ROWS", Form::Rows), ("T", Form::Transposed)] {
        checkpoint(&scratch, name, form, &config());
    }
    // Some experts are quantized, with one global scale for gate and up, and others stay in bf16.
    let cases: [&[&str]; 3] = [
        &["--format", "mxfp4", "--exclude", "*layers.1*.experts.*"],
        &["--format", "nvfp4", "--exclude", "*layers.0*.experts.*"],
        &["--format", "nvfp4", "--to", "modelopt"],
    ];
    for (case, options) in cases.iter().enumerate() {
        let out = |name: &str| format!("{name}.{case}");
        quantize(&scratch, "ONE", &out("ONE"), options).ok();
        let expected = all_tensors(&scratch, &out("ONE"));
        for name in ["ROWS", "T"] {
            quantize(&scratch, name, &out(name), &[options, &["--split-experts"][..]].concat()).ok();
            assert!(all_tensors(&scratch, &out(name)) == expected, "{name}, {options:?}");
            let [split, one] = [out(name), out("ONE")].map(|out| scratch.path(format!("{out}/config.json")));
            assert_eq!(read_json(split)["quantization_config"], read_json(one)["quantization_config"]);
            let index = read_json(scratch.path(format!("{}/model.safetensors.index.json", out(name))));
            let listed = index["weight_map"].as_object().unwrap();
            assert!(listed.len() == expected.len() && expected.keys().all(|name| listed.contains_key(name)));
        }
    }
}

#[test]
fn parts_of_split_experts_are_merged_as_they_were_made() {
    let scratch = Scratch::new();
    checkpoint(&scratch, "T", Form::Transposed, &config());
    let options = ["--format", "mxfp4", "--split-experts"];
    quantize(&scratch, "T", "WHOLE", &options).ok();
    for part in ["1/2", "2/2"] {
        quantize(&scratch, "T", "OUT", &[&options[..], &["--part", part]].concat()).ok();
    }
    let merge = |more: &[&str]| {
        let (input, out) = (scratch.path("T"), scratch.path("OUT"));
        let fixed: [Arg<'_>; 4] = [&"merge", &input, &"--out", &out];
        run(&fixed.into_iter().chain(more.iter().map(|option| option as Arg<'_>)).collect::<Vec<_>>())
    };
    let refused = merge(&[]);
    assert!(refused.code == Some(1) && refused.stderr.contains("of split experts"), "{refused:#?}");
    merge(&["--split-experts"]).ok();
    assert!(all_tensors(&scratch, "OUT") == all_tensors(&scratch, "WHOLE"));
    let index = |out: &str| read_json(scratch.path(format!("{out}/model.safetensors.index.json")));
    assert_eq!(index("OUT"), index("WHOLE"));
}

#[test]
fn operations_of_the_library_transpose_split_experts_that_they_copy() {
    let scratch = Scratch::new();
    for (name, form) in [("ONE", Form::OneByOne), ("T", Form::Transposed)] {
        checkpoint(&scratch, name, form, &config());
    }
    // One tensor is quantized, so that `dequantize` accepts the checkpoint and copies the experts.
    quantize(&scratch, "T", "Q", &["--format", "mxfp4", "--include", "*.gate.weight"]).ok();
    let options = OpenOptions { split_experts: true, ..OpenOptions::default() };
    let checkpoint = Checkpoint::open_with(&scratch.path("Q"), options).unwrap();
    let go_on = &mut |_: Progress<'_>| ControlFlow::Continue(());
    Dequantize::default().run(&checkpoint, &scratch.path("D"), &Device::Cpu, go_on).unwrap();
    let (found, expected) = (all_tensors(&scratch, "D"), all_tensors(&scratch, "ONE"));
    let experts = expected.iter().filter(|(name, _)| name.contains(".experts."));
    let same = experts.map(|(name, tensor)| assert!(found[name] == *tensor, "{name}")).count();
    assert_eq!(same, 2 * EXPERTS * 3);
}

/// The experts of Llama 4 are merged in unquantized checkpoints and split in quantized ones.
#[test]
fn experts_of_llama_4_are_split_by_default_and_joined_when_dequantized() {
    let scratch = Scratch::new();
    let llama4 = json!({
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": { "hidden_size": HIDDEN },
    });
    checkpoint(&scratch, "T", Form::Transposed, &llama4);
    checkpoint(&scratch, "OTHER", Form::Transposed, &config());
    for format in ["mxfp4", "nvfp4"] {
        let [out, split] = ["OUT", "SPLIT"].map(|name| format!("{name}.{format}"));
        quantize(&scratch, "T", &out, &["--format", format]).ok();
        quantize(&scratch, "OTHER", &split, &["--format", format, "--split-experts"]).ok();
        let (found, expected) = (all_tensors(&scratch, &out), all_tensors(&scratch, &split));
        assert!(found == expected && found.keys().any(|name| name.contains(".experts.2.up_proj.weight_")));

        let dequantize = |out: &str| {
            let values = format!("{out}.bf16");
            let (from, to) = (scratch.path(out), scratch.path(&values));
            run(&[&"dequantize", &from, &"--dtype", &"bf16", &"--out", &to]).ok();
            all_tensors(&scratch, &values)
        };
        let (joined, one_by_one) = (dequantize(&out), dequantize(&split));
        let input = all_tensors(&scratch, "T");
        assert!(joined.keys().eq(input.keys()), "{:?}", joined.keys());
        for number in 0..2 {
            let layer = format!("model.layers.{number}.mlp.experts");
            let of = |expert: usize, matrix: &str| -> Vec<bf16> {
                let (_, _, bytes, _) = &one_by_one[&format!("{layer}.{expert}.{matrix}.weight")];
                bytes.chunks_exact(2).map(|pair| bf16::from_le_bytes([pair[0], pair[1]])).collect()
            };
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for expert in 0..EXPERTS {
                let both = [of(expert, "gate_proj"), of(expert, "up_proj")].concat();
                gate_up.extend(transposed(&both, HIDDEN));
                down.extend(transposed(&of(expert, "down_proj"), INTERMEDIATE));
            }
            let gate_up = (Dtype::BF16, vec![EXPERTS, HIDDEN, 2 * INTERMEDIATE], bytes(&gate_up));
            let down = (Dtype::BF16, vec![EXPERTS, INTERMEDIATE, HIDDEN], bytes(&down));
            let found = |name: &str| {
                let (dtype, shape, bytes, _) = joined[&format!("{layer}.{name}")].clone();
                (dtype, shape, bytes)
            };
            assert!(found("gate_up_proj") == gate_up, "{format} {layer}");
            assert!(found("down_proj") == down, "{format} {layer}");
        }
        let index = read_json(scratch.path(format!("{out}.bf16/model.safetensors.index.json")));
        assert!(index["weight_map"].as_object().unwrap().keys().all(|name| joined.contains_key(name)));
    }
    // Parts and their merge give the same result.
    for part in ["1/2", "2/2"] {
        quantize(&scratch, "T", "PARTS", &["--format", "mxfp4", "--part", part]).ok();
    }
    run(&[&"merge", &scratch.path("T"), &"--out", &scratch.path("PARTS")]).ok();
    assert!(all_tensors(&scratch, "PARTS") == all_tensors(&scratch, "OUT.mxfp4"));
}

#[test]
fn experts_of_a_layer_are_quantized_together_or_not_at_all() {
    let scratch = Scratch::new();
    checkpoint(&scratch, "ONE", Form::OneByOne, &config());
    for pattern in ["*.1.down_proj*", "*layers.0*gate_proj*", "*.experts.2.*"] {
        let refused = quantize(&scratch, "ONE", "OUT", &["--exclude", pattern]);
        let parts = [pattern, "engines load the experts of a layer alike", ".experts.*"];
        assert!(
            refused.code == Some(1) && parts.iter().all(|part| refused.stderr.contains(part)),
            "{refused:#?}"
        );
    }
    // Rows of 80 divide into blocks of 16, but not of 32.
    let weight = |name: &'static str, shape: [usize; 2]| -> TensorData {
        (name, Dtype::BF16, shape.to_vec(), bytes(&matrix(0, 0, 0, shape[0], shape[1])))
    };
    let experts = [
        weight("model.layers.0.mlp.experts.0.up_proj.weight", [80, 64]),
        weight("model.layers.0.mlp.experts.0.down_proj.weight", [64, 80]),
        weight("model.layers.0.mlp.experts.1.up_proj.weight", [80, 64]),
        weight("model.layers.0.mlp.experts.1.down_proj.weight", [64, 80]),
        weight("model.layers.0.self_attn.q_proj.weight", [64, 64]),
    ];
    scratch.write_tensors("WIDE/model.safetensors", &experts);
    for (format, packed) in [("mxfp4", 1), ("nvfp4", 5)] {
        quantize(&scratch, "WIDE", format, &["--format", format]).ok();
        let found = all_tensors(&scratch, format);
        assert_eq!(found.keys().filter(|name| name.ends_with("_packed")).count(), packed, "{format}");
    }
}

#[test]
fn unsplittable_experts_are_refused() {
    let scratch = Scratch::new();
    checkpoint(&scratch, "ONE", Form::OneByOne, &config());
    checkpoint(&scratch, "NO_SIZE", Form::Rows, &json!({ "architectures": ["X"] }));
    checkpoint(&scratch, "OTHER_SIZE", Form::Rows, &json!({ "hidden_size": HIDDEN + 1 }));
    for (input, parts) in [
        ("ONE", &["no experts of a layer in one tensor"][..]),
        ("NO_SIZE", &["experts.gate_up_proj", "no hidden_size"]),
        ("OTHER_SIZE", &["[192, 64]", "65"]),
    ] {
        let refused = quantize(&scratch, input, "OUT", &["--split-experts"]);
        assert_eq!(refused.code, Some(1), "{refused:#?}");
        assert!(parts.iter().all(|part| refused.stderr.contains(part)), "{refused:#?}");
    }
    let warned = quantize(&scratch, "NO_SIZE", "COPIED", &["--include", "*.gate.weight"]);
    assert!(
        warned.code == Some(0) && warned.stderr.contains("4 tensors have the experts of a layer"),
        "{warned:#?}"
    );
    let gpt_oss: [TensorData; 3] = [
        ("mlp.experts.gate_up_proj", Dtype::BF16, vec![1, 64, 32], vec![0; 4096]),
        ("mlp.experts.gate_up_proj_bias", Dtype::BF16, vec![1, 32], vec![0; 64]),
        ("mlp.experts.down_proj", Dtype::BF16, vec![1, 16, 64], vec![0; 2048]),
    ];
    scratch.write_tensors("GPT/model.safetensors", &gpt_oss);
    scratch.write("GPT/config.json", json!({ "hidden_size": 64 }).to_string());
    let refused = quantize(&scratch, "GPT", "OUT", &["--split-experts"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("--to gpt-oss"), "{refused:#?}");
    for (shape, why) in [([1 << 40, 0, 64], "it is empty"), ([1 << 21, 2, 1], "1048576 tensors allowed")] {
        let data = vec![0; shape.iter().product::<usize>() * 2];
        let many: [TensorData; 1] = [("mlp.experts.gate_up_proj", Dtype::BF16, shape.to_vec(), data)];
        scratch.write_tensors("MANY/model.safetensors", &many);
        scratch.write("MANY/config.json", json!({ "hidden_size": shape[2] }).to_string());
        let refused = quantize(&scratch, "MANY", "OUT", &["--split-experts"]);
        assert!(refused.code == Some(1) && refused.stderr.contains(why), "{refused:#?}");
    }
    // Gates of two experts of 16 rows each; the other tensor must be [2, 64, 16].
    for (shape, why) in
        [([3, 64, 16], "[2, 64, 16] fit"), ([2, 64, 32], "[2, 64, 16] fit"), ([2, 16, 64], "[2, 64, 16] fit")]
    {
        let of = |name, shape: &[usize]| -> TensorData {
            (name, Dtype::BF16, shape.to_vec(), vec![0; shape.iter().product::<usize>() * 2])
        };
        let both = [of("mlp.experts.gate_up_proj", &[2, 32, 64]), of("mlp.experts.down_proj", &shape)];
        scratch.write_tensors("UNEQUAL/model.safetensors", &both);
        scratch.write("UNEQUAL/config.json", json!({ "hidden_size": 64 }).to_string());
        let refused = quantize(&scratch, "UNEQUAL", "OUT", &["--split-experts"]);
        let parts = ["mlp.experts.down_proj", &format!("{shape:?}"), why];
        assert!(
            refused.code == Some(1) && parts.iter().all(|part| refused.stderr.contains(part)),
            "{refused:#?}"
        );
    }
    let gates: [TensorData; 1] = [("mlp.experts.gate_up_proj", Dtype::BF16, vec![1, 32, 64], vec![0; 4096])];
    scratch.write_tensors("GATES/model.safetensors", &gates);
    scratch.write("GATES/config.json", json!({ "hidden_size": 64 }).to_string());
    let refused = quantize(&scratch, "GATES", "OUT", &["--split-experts"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("no mlp.experts.down_proj"), "{refused:#?}");
    let alone: [TensorData; 1] = [("mlp.experts.down_proj", Dtype::BF16, vec![1, 16, 64], vec![0; 2048])];
    scratch.write_tensors("HALF/model.safetensors", &alone);
    scratch.write("HALF/config.json", json!({ "hidden_size": 64 }).to_string());
    let refused = quantize(&scratch, "HALF", "OUT", &["--split-experts"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("complete the checkpoint"), "{refused:#?}");
}
