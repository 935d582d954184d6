//! `doctor`: each kind of defect, inserted into a sound checkpoint.

use std::path::{Path, PathBuf};

use half::bf16;
use microscale_test_support::{Run, Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{Tensors, noise, quantize, read_json, tensors};

const LAYER: &str = "model.layers.0.mlp.down_proj.weight";

/// Writes the sample in NVFP4 with changed tensors and config.
fn changed(scratch: &Scratch, change: impl FnOnce(&mut Tensors, &mut Value)) -> PathBuf {
    quantize(scratch, &sample(), "GOOD", &["--format", "nvfp4"]).ok();
    let mut all = tensors(&scratch.path("GOOD"));
    let mut config = read_json(scratch.path("GOOD/config.json"));
    change(&mut all, &mut config);
    let all: Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)> =
        all.into_iter().map(|(name, (dtype, shape, data, _))| (&*name.leak(), dtype, shape, data)).collect();
    scratch.write_tensors("BAD/model.safetensors", &all);
    scratch.write("BAD/config.json", config.to_string());
    scratch.path("BAD")
}

/// Returns the findings of `--json`: defect, tensor and text.
fn findings(run: &Run) -> Vec<(String, String, String)> {
    let json: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:#?}"));
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_string();
    let all = json["findings"].as_array().unwrap();
    for finding in all {
        assert!(!text(finding, "effect").is_empty() && !text(finding, "fix").is_empty());
    }
    all.iter()
        .map(|finding| (text(finding, "defect"), text(finding, "tensor"), text(finding, "what")))
        .collect()
}

/// Asserts that a checkpoint has only this defect in these tensors, in JSON and in the text.
#[track_caller]
fn finds(path: &Path, defect: &str, tensors: &[&str], part: &str) {
    let found = run(&[&"doctor", &path, &"--json", &"-"]);
    assert_eq!(found.code, Some(1), "{found:#?}");
    let all = findings(&found);
    let names: Vec<_> = all.iter().map(|(_, tensor, _)| tensor.as_str()).collect();
    assert_eq!(names, tensors, "{found:#?}");
    assert!(all.iter().all(|(word, _, what)| word == defect && what.contains(part)), "{found:#?}");
    let text = run(&[&"doctor", &path]);
    assert_eq!(text.code, Some(1));
    assert!(text.stdout.starts_with(&format!("{defect}\n")) && text.stdout.contains("effect: "), "{text:#?}");
    let n = if all.len() == 1 {
        "1 defect was found".into()
    } else {
        format!("{} defects were found", all.len())
    };
    assert!(text.stderr.contains(&n), "{text:#?}");
}

/// Returns the bytes of a part of [`LAYER`].
fn part<'a>(all: &'a mut Tensors, suffix: &str) -> &'a mut Vec<u8> {
    &mut all.get_mut(&format!("{LAYER}{suffix}")).unwrap().2
}

#[test]
fn sound_checkpoints_have_no_defects() {
    for format in ["mxfp4", "nvfp4", "mxfp8-e4m3"] {
        let scratch = Scratch::new();
        quantize(&scratch, &sample(), "OUT", &["--format", format]).ok();
        for more in [&[][..], &["--against", sample().to_str().unwrap()]] {
            let mut command =
                microscale_test_support::command(&[&"doctor", &scratch.path("OUT"), &"--json", &"-"]);
            command.args(more);
            let json: Value = serde_json::from_str(&Run::new(command).ok()).unwrap();
            assert_eq!(json["findings"], json!([]));
            assert_eq!((&json["quantized_tensors"], &json["other_tensors"]), (&json!(21), &json!(9)));
        }
    }
    run(&[&"doctor", &sample()]).fails_with(&["is unquantized", "quantize it first"]);
}

#[test]
fn invalid_scale_bytes_are_defects() {
    for byte in [0x7F, 0xFF] {
        let scratch = Scratch::new();
        let bad = changed(&scratch, |all, _| part(all, "_scale")[21] = byte);
        let row = 21 / (tensors(&bad)[&format!("{LAYER}_scale")].1[1]);
        finds(&bad, "nan-scales", &[LAYER], &format!("the first in row {row}, block "));
        finds(&bad, "nan-scales", &[LAYER], &format!("scale byte {byte:#04x}"));
    }
    let scratch = Scratch::new();
    let bad =
        changed(&scratch, |all, _| part(all, "_scale").iter_mut().step_by(3).for_each(|byte| *byte |= 0x80));
    finds(&bad, "signed-scales", &[LAYER], "the first in row 0, block 0 ");
}

#[test]
fn lost_blocks_are_defects() {
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| {
        let codes = part(all, "_packed");
        let half = codes.len() / 2;
        codes[..half].fill(0x80);
    });
    finds(&bad, "zero-blocks", &[LAYER], "1408 of 2816 blocks, the first in row 0, block 0 ");
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| {
        part(all, "_scale")[..100].fill(0x7E);
        part(all, "_packed")[..800].fill(0xF7);
    });
    finds(&bad, "saturated-blocks", &[LAYER], "the first in row 0, block 0 (scale byte 0x7e)");
}

#[test]
fn inverted_and_unequal_global_scales_are_defects() {
    let scratch = Scratch::new();
    let invert = |bytes: &mut Vec<u8>| {
        let value = f32::from_le_bytes(bytes[..].try_into().unwrap());
        *bytes = (1.0 / value).to_le_bytes().to_vec();
    };
    let bad = changed(&scratch, |all, _| invert(part(all, "_global_scale")));
    finds(&bad, "inverted-global-scale", &[LAYER], "as a divisor");
    let scratch = Scratch::new();
    let key = "model.layers.1.self_attn.k_proj.weight";
    let bad = changed(&scratch, |all, _| {
        all.get_mut(&format!("{key}_global_scale")).unwrap().2 = 77f32.to_le_bytes().to_vec();
    });
    let found = run(&[&"doctor", &bad, &"--json", &"-"]);
    let all = findings(&found);
    // The file's order: k_proj precedes q_proj and v_proj, which differ from it.
    let unequal: Vec<_> = all.iter().filter(|(word, ..)| word == "unequal-global-scales").collect();
    assert!(unequal.len() == 2 && unequal.iter().all(|(_, _, what)| what.contains("k_proj")), "{found:#?}");
}

#[test]
fn values_far_from_the_original_are_defects() {
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| {
        part(all, "_packed").iter_mut().for_each(|byte| *byte = byte.rotate_left(4))
    });
    // This defect is invisible without the original.
    run(&[&"doctor", &bad]).ok();
    let found = run(&[&"doctor", &bad, &"--against", &sample(), &"--json", &"-"]);
    assert_eq!(found.code, Some(1));
    let all = findings(&found);
    assert_eq!((all.len(), all[0].0.as_str(), all[0].1.as_str()), (1, "nibble-order", LAYER), "{found:#?}");
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| part(all, "_packed").rotate_left(64));
    let all = findings(&run(&[&"doctor", &bad, &"--against", &sample(), &"--json", &"-"]));
    assert_eq!((all.len(), all[0].0.as_str(), all[0].1.as_str()), (1, "other-values", LAYER));
}

#[test]
fn missing_and_misread_parts_are_defects() {
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| {
        all.remove(&format!("{LAYER}_scale"));
    });
    let found = run(&[&"doctor", &bad, &"--json", &"-"]);
    let all = findings(&found);
    assert!(
        all.iter().any(|(word, tensor, what)| {
            word == "unreadable" && tensor.starts_with(LAYER) && what.contains("are missing")
        }),
        "{found:#?}"
    );
    let scratch = Scratch::new();
    let bad = changed(&scratch, |all, _| all.get_mut(&format!("{LAYER}_global_scale")).unwrap().1.clear());
    finds(&bad, "misread", &[LAYER], "shape []");
    let scratch = Scratch::new();
    let e8m0 = scratch.write_tensors(
        "x.safetensors",
        &[
            ("a.weight_packed", Dtype::U8, vec![1, 16], vec![0x26; 16]),
            ("a.weight_scale", Dtype::F8_E8M0, vec![1, 1], vec![127]),
        ],
    );
    finds(&e8m0, "misread", &["a.weight"], "F8_E8M0");
}

#[test]
fn configs_that_contradict_the_tensors_are_defects() {
    let with = |change: &dyn Fn(&mut Value), tensors: &[&str], part: &str| {
        let scratch = Scratch::new();
        finds(&changed(&scratch, |_, config| change(config)), "config", tensors, part);
    };
    with(
        &|config| {
            config.as_object_mut().unwrap().remove("quantization_config");
        },
        &["model.layers.0.mlp.down_proj.weight"],
        "there is no quantization_config, but 21 tensors are quantized",
    );
    with(
        &|config| {
            config["quantization_config"]["ignore"] = json!(["lm_head", "re:.*layers.0.mlp.down_proj$"])
        },
        &[LAYER],
        "the config says that it is not",
    );
    with(
        &|config| config["quantization_config"]["ignore"] = json!([]),
        &["lm_head.weight"],
        "does not list lm_head as ignored",
    );
    let scratch = Scratch::new();
    let bad = changed(&scratch, |_, config| config["hidden_size"] = json!(96));
    let all = findings(&run(&[&"doctor", &bad, &"--json", &"-"]));
    // Seven kinds of layers and two norms in three layers each, and the last norm.
    assert!(all.len() == 28 && all.iter().all(|(word, ..)| word == "config"), "{all:?}");
    assert!(
        all.iter().any(|(_, tensor, what)| tensor == LAYER && what.contains("but hidden_size is 96")),
        "{all:?}"
    );
}

#[test]
fn modelopt_without_input_scales() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "MO", &["--format", "nvfp4", "--to", "modelopt"]).ok();
    for file in ["MO/config.json", "MO/hf_quant_config.json"] {
        let text = std::fs::read_to_string(scratch.path(file)).unwrap();
        scratch.write(file, text.replace("W4A16_NVFP4", "NVFP4"));
    }
    let found = run(&[&"doctor", &scratch.path("MO"), &"--json", &"-"]);
    let all = findings(&found);
    assert_eq!(all.len(), 21, "{found:#?}");
    assert!(
        all.iter().all(|(word, _, what)| word == "input-scale" && what.contains("W4A16_NVFP4")),
        "{found:#?}"
    );
}

#[test]
fn an_original_of_another_shape_is_reported() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "OUT", &[]).ok();
    let data = vec![bf16::ONE; 64].into_iter().flat_map(bf16::to_le_bytes).collect();
    let other = scratch.write_tensors("o.safetensors", &[(LAYER, Dtype::BF16, vec![2, 32], data)]);
    let all = findings(&run(&[&"doctor", &scratch.path("OUT"), &"--against", &other, &"--json", &"-"]));
    assert!(all.len() == 1 && all[0].0 == "other-values" && all[0].2.contains("[2, 32]"), "{all:?}");
}

#[test]
fn zeros_of_the_original_are_no_defect() {
    let scratch = Scratch::new();
    let mut values = noise(64 * 64);
    // Half of the rows are pruned.
    values[..32 * 64].fill(0.0);
    let file = |name: &str, values: &[f32]| {
        scratch.write_tensors(name, &[("a.weight", Dtype::F32, vec![64, 64], super::floats(values))])
    };
    let input = file("in.safetensors", &values);
    quantize(&scratch, &input, "out.safetensors", &["--format", "nvfp4"]).ok();
    let out = scratch.path("out.safetensors");
    let alone = findings(&run(&[&"doctor", &out, &"--json", &"-"]));
    assert_eq!((alone.len(), alone[0].0.as_str()), (1, "zero-blocks"));
    run(&[&"doctor", &out, &"--against", &input]).ok();
    // A quarter of the rows has weights in the original.
    values[16 * 64..32 * 64].fill(1e-3);
    let other = file("other.safetensors", &values);
    let lost = findings(&run(&[&"doctor", &out, &"--against", &other, &"--json", &"-"]));
    let zeros: Vec<_> = lost.iter().filter(|(defect, ..)| defect == "zero-blocks").collect();
    let [(_, tensor, what)] = zeros[..] else { panic!("{lost:?}") };
    assert!(
        tensor == "a.weight" && what.starts_with("64 of 256 blocks, the first in row 16, block 0"),
        "{what}"
    );
}

#[test]
fn names_of_a_config_are_unlimited_and_patterns_are_counted() {
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "Q", &["--format", "nvfp4"]).ok();
    let config = read_json(scratch.path("Q/config.json"));
    let examine = |change: &dyn Fn(&mut Value)| {
        let mut config = config.clone();
        change(&mut config["quantization_config"]);
        scratch.write("Q/config.json", config.to_string());
        run(&[&"doctor", &scratch.path("Q")])
    };
    // Lists that formerly took ten seconds to a minute.
    let ignore = |quantization: &mut Value| {
        let names = (0..200_000).map(|number| json!(format!("n{number}")));
        quantization["ignore"].as_array_mut().unwrap().extend(names);
    };
    examine(&ignore).ok();
    let group = config["quantization_config"]["config_groups"]["group_0"].clone();
    let groups = |count: usize, targets: &dyn Fn(usize) -> Vec<String>| {
        let groups = (0..count).map(|number| {
            let mut group = group.clone();
            group["targets"] = json!(targets(number));
            (format!("group_{number}"), group)
        });
        json!(groups.collect::<serde_json::Map<_, _>>())
    };
    let names = groups(20_000, &|number| vec![format!("n{number}"), "model.layers.0.mlp.up_proj".into()]);
    // The last of several targets of the same kind applies, so the other groups match no layer, and
    // the other layers match no group.
    let found = examine(&|quantization| quantization["config_groups"] = names.clone());
    assert!(found.code == Some(1) && found.stdout.contains("and 19,992 more"), "{found:#?}");
    let patterns = groups(500, &|number| (0..50).map(|other| format!("re:x{number}.{other}")).collect());
    let refused = examine(&|quantization| quantization["config_groups"] = patterns.clone());
    assert!(refused.code == Some(1) && refused.stdout.contains("25000 patterns"), "{refused:#?}");
    let refused = examine(&|quantization| quantization["ignore"] = json!(vec!["*.x"; 3000]));
    assert!(refused.code == Some(1) && refused.stdout.contains("3000 patterns"), "{refused:#?}");
}
