//! 4-bit weights and inputs: input scales that are given, kept or missing.

use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::parts::files;
use super::{Tensors, floats, noise, quantize, read_json, tensors};

const CT: [&str; 2] = ["--format", "nvfp4"];
const MO: [&str; 4] = ["--format", "nvfp4", "--to", "modelopt"];

/// Returns the quantized layers, found by the scales of their codes.
fn layers(tensors: &Tensors) -> Vec<String> {
    let layers = tensors.keys().filter_map(|name| name.strip_suffix(".weight_scale"));
    layers.map(String::from).collect()
}

fn number(tensors: &Tensors, name: &str) -> f32 {
    f32::from_le_bytes(tensors[name].2[..].try_into().unwrap())
}

#[test]
fn a_number_is_the_amax_of_all_inputs() {
    let scratch = Scratch::new();
    for (out, options, end, shape, expected) in [
        ("CT", &CT[..], "input_global_scale", vec![1], 2688.0 / 12.5),
        ("MO", &MO, "input_scale", vec![], 12.5 / 2688.0),
    ] {
        let plain = format!("{out}-PLAIN");
        let text = quantize(&scratch, &sample(), out, &[options, &["--input-scale", "12.5"]].concat()).ok();
        quantize(&scratch, &sample(), &plain, options).ok();
        assert!(text.contains("nvfp4"), "{text}");
        let (found, weights) = (tensors(&scratch.path(out)), tensors(&scratch.path(&plain)));
        let layers = layers(&found);
        assert!(layers.len() == 21 && found.len() == weights.len() + 21, "{layers:?}");
        for layer in &layers {
            let (dtype, of, ..) = &found[&format!("{layer}.{end}")];
            assert_eq!((*dtype, of), (Dtype::F32, &shape));
            assert_eq!(number(&found, &format!("{layer}.{end}")), expected);
        }
        // Input scales do not change the weights.
        for (name, weight) in &weights {
            assert_eq!(&found[name].2, &weight.2, "{name}");
        }
        let index = read_json(scratch.path(out).join("model.safetensors.index.json"));
        assert!(found.keys().all(|name| index["weight_map"].get(name).is_some()), "{index}");
        run(&[&"doctor", &scratch.path(out)]).ok();
        run(&[&"doctor", &scratch.path(&plain)]).ok();
        for part in ["1/2", "2/2"] {
            let part = ["--input-scale", "12.5", "--part", part];
            quantize(&scratch, &sample(), &format!("{out}-PARTS"), &[options, &part].concat()).ok();
        }
        run(&[&"merge", &sample(), &"--out", &scratch.path(format!("{out}-PARTS"))]).ok();
        assert_eq!(files(&scratch.path(format!("{out}-PARTS"))), files(&scratch.path(out)));
    }
    let group = &read_json(scratch.path("CT/config.json"))["quantization_config"]["config_groups"]["group_0"];
    assert_eq!(group["input_activations"]["dynamic"], "local");
    assert_eq!(read_json(scratch.path("MO/hf_quant_config.json"))["quantization"]["quant_algo"], "NVFP4");
    for (from, to, end, expected) in [
        ("CT", "modelopt", "input_scale", 1.0 / (2688.0 / 12.5)),
        ("MO", "compressed-tensors", "input_global_scale", 1.0 / (12.5 / 2688.0)),
    ] {
        let out = scratch.path(format!("{from}-{to}"));
        run(&[&"convert", &scratch.path(from), &"--to", &to, &"--out", &out]).ok();
        let found = tensors(&out);
        for layer in layers(&found) {
            assert_eq!(number(&found, &format!("{layer}.{end}")), expected);
        }
        run(&[&"doctor", &out]).ok();
    }
}

#[test]
fn a_file_has_an_amax_or_a_scale_by_names() {
    let scratch = Scratch::new();
    let layer = |name: &'static str| (name, Dtype::F32, vec![32, 64], floats(&noise(32 * 64)));
    let weights: Vec<TensorData> = [
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ]
    .map(layer)
    .into();
    let input = scratch.write_tensors("in.safetensors", &weights);
    let write = |value| scratch.write("scales.json", serde_json::Value::to_string(&value));
    let given = write(json!({
        "layers.0.self_attn.q_proj": 3,
        "layers.0.self_attn.k_proj.weight": 8.0,
        "layers.0.self_attn.v_proj.input_scale": 1.0 / 2688.0,
        "layers.0.mlp.down_proj.input_global_scale": 64.0,
        "layers.0.mlp.up_proj": 1.0,
        "layers.7.mlp.up_proj": 1.0,
    }));
    let options = [&CT[..], &["--input-scale", given.to_str().unwrap()]].concat();
    let ran = quantize(&scratch, &input, "out.safetensors", &options);
    assert!(ran.stderr.contains("layers.7.mlp.up_proj: no weight that becomes nvfp4"), "{}", ran.stderr);
    ran.ok();
    let found = tensors(&scratch.path("out.safetensors"));
    let scale = |layer: &str| number(&found, &format!("layers.0.{layer}.input_global_scale"));
    // Engines fuse q, k and v, so all three have the scale of the largest inputs.
    for part in ["q_proj", "k_proj", "v_proj"] {
        assert_eq!(scale(&format!("self_attn.{part}")), 2688.0 / 8.0);
    }
    assert_eq!((scale("mlp.down_proj"), scale("mlp.up_proj")), (64.0, 2688.0));
    for (value, parts) in [
        (
            json!({ "layers.0.self_attn.q_proj": 3 }),
            &["no scale of the inputs", "down_proj.input_global_scale"][..],
        ),
        (
            json!({ "layers.0.self_attn.q_proj": "3" }),
            &["scales.json", "q_proj is \"3\"", "must be a number"],
        ),
        (
            json!({ "layers.0.mlp.down_proj": 1, "layers.0.mlp.down_proj.weight": 2 }),
            &["two scales of the inputs", "down_proj.weight"],
        ),
        (json!([1]), &["scales.json"]),
    ] {
        write(value);
        quantize(&scratch, &input, "no.safetensors", &options).fails_with(parts);
    }
    for (options, what) in [
        (&["--format", "nvfp4", "--input-scale", "0"][..], "no global scale can be"),
        (&["--format", "nvfp4", "--input-scale=-1"], "no global scale can be"),
        (&["--format", "nvfp4", "--input-scale", "NaN"], "no global scale can be"),
        (&["--format", "mxfp4", "--input-scale", "1"], "none becomes NVFP4"),
    ] {
        let refused = quantize(&scratch, &input, "no.safetensors", options);
        assert!(refused.code == Some(2) && refused.stderr.contains(what), "{refused:?}");
    }
    quantize(&scratch, &input, "no.safetensors", &[&CT[..], &["--input-scale", "nowhere.json"]].concat())
        .fails_with(&["nowhere.json"]);
}

#[test]
fn a_name_that_a_file_has_twice_is_refused() {
    let scratch = Scratch::new();
    for text in ["{\"a\": 1.0, \"b\": 2.0, \"a\": 3.0}", "{\"a\": 1.0, \"\\u0061\": 1.0}"] {
        let file = scratch.write("scales.json", text);
        let options = [&CT[..], &["--input-scale", file.to_str().unwrap()]].concat();
        quantize(&scratch, &sample(), "OUT", &options).fails_with(&["scales.json", "a is there twice"]);
    }
}

/// Returns the doctor's findings from its JSON.
fn defects(path: &std::path::Path) -> Vec<(String, String)> {
    let found = run(&[&"doctor", &path, &"--json", &"-"]);
    let json: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    let findings = json["findings"].as_array().unwrap().iter();
    let text = |finding: &serde_json::Value, key: &str| finding[key].as_str().unwrap_or_default().to_string();
    findings.map(|finding| (text(finding, "defect"), text(finding, "tensor"))).collect()
}

#[test]
fn the_doctor_misses_scales_where_the_config_says_that_inputs_are_quantized() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "CT", &[&CT[..], &["--input-scale", "12.5"]].concat()).ok();
    quantize(&scratch, &sample(), "ALONE", &CT).ok();
    // Only weights are quantized, but the config says weights and inputs.
    let config = read_json(scratch.path("CT/config.json"));
    scratch.write("ALONE/config.json", config.to_string());
    let found = defects(&scratch.path("ALONE"));
    assert!(found.len() == 21 && found.iter().all(|(defect, _)| defect == "input-scale"), "{found:?}");
    // Inputs with block scales only need no input scale.
    let text = config.to_string().replace("\"dynamic\":\"local\"", "\"dynamic\":true");
    scratch.write("ALONE/config.json", text);
    assert_eq!(defects(&scratch.path("ALONE")), []);
    // One of two experts without an input scale, in any checkpoint format: a file has no config.
    for (options, end) in [(&CT[..], "input_global_scale"), (&MO, "input_scale")] {
        let experts = ["layers.0.mlp.experts.0.up_proj.weight", "layers.0.mlp.experts.1.up_proj.weight"];
        let weights: Vec<TensorData> =
            experts.map(|name| (name, Dtype::F32, vec![32, 64], floats(&noise(32 * 64)))).into();
        let input = scratch.write_tensors(format!("{end}-in.safetensors"), &weights);
        let whole = format!("{end}-all.safetensors");
        let none = ["--input-scale", "2", "--global-scale", "none"];
        quantize(&scratch, &input, &whole, &[options, &none].concat()).ok();
        let all = tensors(&scratch.path(&whole));
        let left =
            all.into_iter().filter(|(name, _)| *name != format!("layers.0.mlp.experts.1.up_proj.{end}"));
        let left: Vec<TensorData> =
            left.map(|(name, (dtype, shape, data, _))| (&*name.leak(), dtype, shape, data)).collect();
        let broken = scratch.write_tensors(format!("{end}-broken.safetensors"), &left);
        assert_eq!(defects(&broken), [("input-scale".to_string(), experts[1].to_string())]);
        assert_eq!(defects(&scratch.path(&whole)), []);
    }
}
