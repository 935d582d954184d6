//! Models that run: `eval`, `calibrate`, and quantizing with the statistics.

use std::fs;

use microscale_test_support::{Run, Scratch, command, run, sample};
use serde_json::Value;

use super::read_json;

/// The sample that was trained. It has a tokenizer.
fn story() -> std::path::PathBuf {
    sample().with_file_name("tiny-story")
}

/// Runs a command on the sample's text, on a few short windows.
fn on_text(first: &[&dyn AsRef<std::ffi::OsStr>], more: &[&str]) -> Run {
    let mut command = command(first);
    command.arg("--text").arg(story().join("heldout.txt"));
    command.args(["--documents", "--window", "64", "--windows", "6"]).args(more);
    Run::new(command)
}

#[test]
fn a_calibrated_model_diverges_less() {
    let scratch = Scratch::new();
    let [plain, gptq, stats] = ["plain", "gptq", "stats"].map(|name| scratch.path(name));
    let printed = on_text(&[&"calibrate", &story(), &stats], &[]).ok();
    assert!(printed.contains("4 layers from 378 tokens in 6 windows"), "{printed}");
    run(&[&"quantize", &story(), &plain, &"-f", &"nvfp4"]).ok();
    let printed =
        run(&[&"quantize", &story(), &gptq, &"-f", &"nvfp4", &"--calibration", &stats, &"--gptq"]).ok();
    assert!(printed.contains("error of layers' outputs") && printed.contains("GPTQ: "), "{printed}");
    run(&[&"doctor", &gptq, &"--against", &story()]).ok();

    let facts = scratch.path("facts.json");
    let plot = scratch.path("plot.svg");
    let more =
        ["--activations", "nvfp4", "--json", facts.to_str().unwrap(), "--plot", plot.to_str().unwrap()];
    let printed = on_text(&[&"eval", &story(), &plain, &gptq], &more).ok();
    assert!(printed.contains("378 tokens in 6 windows"), "{printed}");
    let facts = read_json(facts);
    let rows = facts["quantized"].as_array().unwrap();
    let divergence = |row: &Value| row["divergence"]["mean"].as_f64().unwrap();
    let [plain, plain_w4a4, gptq, _] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!((&plain["activations"], &plain_w4a4["activations"]), (&Value::Null, &"nvfp4".into()));
    assert!(divergence(gptq) < divergence(plain) && divergence(plain) < divergence(plain_w4a4), "{facts:#}");
    assert_eq!(plain["layers"].as_array().unwrap().len(), 28);
    assert!(fs::read_to_string(plot).unwrap().contains("q_proj"));
}

#[test]
fn wrong_uses_are_refused_before_the_work() {
    let scratch = Scratch::new();
    let stats = scratch.path("stats");
    // No tokenizer: the other sample has none.
    on_text(&[&"eval", &sample()], &[]).fails_with(&["tokenizer.json"]);
    on_text(&[&"calibrate", &sample(), &stats], &[]).fails_with(&["tokenizer.json"]);
    assert!(!stats.exists());
    // Other windows are another calibration.
    on_text(&[&"calibrate", &story(), &stats, &"--skip-hessians"], &[]).ok();
    on_text(&[&"calibrate", &story(), &stats], &[]).fails_with(&["another model, text or options"]);
    let out = scratch.path("out");
    let quantize = [&"quantize" as &dyn AsRef<std::ffi::OsStr>, &story(), &out, &"--calibration", &stats];
    run(&[&quantize[..], &[&"--gptq"]].concat()).fails_with(&["no Hessians", "--skip-hessians"]);
    let wrong = run(&[&"quantize", &story(), &out, &"--gptq"]);
    assert!(wrong.code == Some(2) && wrong.stderr.contains("--calibration"), "{wrong:#?}");
    assert!(!out.exists());
}
