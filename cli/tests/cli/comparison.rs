//! `compare --format`, and refused combinations.

use microscale_test_support::{Scratch, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{floats, noise, quantize, read_json};

#[test]
fn a_checkpoint_is_measured_in_formats_without_files() {
    let sample = sample();
    let total = |format: &str| {
        let text = run(&[&"compare", &sample, &"--format", &format]).ok();
        let total = text.lines().find(|line| line.starts_with("total")).expect("a total").to_owned();
        assert!(text.contains("down_proj") && !text.contains("norm"), "{text}");
        total.split_whitespace().nth(1).expect("an error").parse::<f64>().expect("a number")
    };
    let [e3m0, mxfp4, nf4] = ["mxfp4-e3m0", "mxfp4", "nf4"].map(total);
    assert!(0.0 < nf4 && nf4 < mxfp4 && mxfp4 < e3m0 && e3m0 < 1.0, "{nf4} {mxfp4} {e3m0}");
}

#[test]
fn files_and_two_answers_are_refused() {
    let sample = sample();
    for format in ["nf4", "mxfp4-e3m0"] {
        let refused = run(&[&"quantize", &sample, &"--format", &format, &"--out", &"/nowhere/OUT"]);
        assert_ne!(refused.code, Some(0));
        let advice = format!("compare A --format {format}");
        assert!(refused.stderr.contains("has no") && refused.stderr.contains(&advice), "{}", refused.stderr);
    }
    let refused = run(&[&"compare", &sample, &"--format", &"nf4", &"--numerics", &"ocp"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("bitsandbytes"), "{}", refused.stderr);
    let refused = run(&[&"compare", &sample, &sample, &"--format", &"nf4"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
}

#[test]
fn checkpoints_that_share_no_tensor_are_not_compared() {
    let scratch = Scratch::new();
    let tensor = |name| (name, Dtype::F32, vec![2, 32], floats(&noise(64)));
    let a = scratch.write_tensors("a.safetensors", &[tensor("fc.weight")]);
    let b = scratch.write_tensors("b.safetensors", &[tensor("model.fc.weight")]);
    let parts = ["no tensor of", "a.safetensors", "b.safetensors", "\"fc.weight\"", "\"model.fc.weight\""];
    run(&[&"compare", &a, &b]).fails_with(&parts);
    let norm =
        scratch.write_tensors("norm.safetensors", &[("norm.weight", Dtype::F32, vec![32], vec![0; 128])]);
    run(&[&"compare", &norm, &"--format", &"nvfp4"])
        .fails_with(&["norm.safetensors", "no tensor to quantize"]);
}

#[test]
fn figures_without_data_are_none() {
    let scratch = Scratch::new();
    // A NaN in each block makes the whole tensor NaN. The other tensor keeps some blocks.
    let mut values = noise(2048);
    values.iter_mut().step_by(32).for_each(|value| *value = f32::NAN);
    let all = ("a.weight", Dtype::F32, vec![64, 32], floats(&values));
    let input = scratch.write_tensors("in.safetensors", std::slice::from_ref(&all));
    let json = scratch.path("facts.json");
    let more = ["--non-finite", "propagate", "--json", json.to_str().unwrap()];
    let text = quantize(&scratch, &input, "out.safetensors", &more).ok();
    assert!(text.contains("2,048 of 2,048 values, not finite"), "{text}");
    assert!(!text.contains('∞') && !text.contains("1.000000"), "{text}");
    let line =
        |text: &str, start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
    assert!(line(&text, "SQNR").contains('–') && line(&text, "cosine").contains('–'), "{text}");
    let loss = &read_json(json)["loss"];
    assert_eq!(
        (&loss["left_out"], &loss["sqnr_db"], &loss["cosine"]),
        (&json!(2048), &Value::Null, &Value::Null)
    );

    let text = run(&[&"compare", &input, &scratch.path("out.safetensors")]).ok();
    assert_eq!(
        line(&text, "a.weight").split_whitespace().collect::<Vec<_>>(),
        ["a.weight", "–", "–", "–", "–"]
    );
    assert!(text.contains("left out: 2,048 of 2,048 values, not finite"), "{text}");
}
