//! Models that run: `eval`, `calibrate`, and quantizing with the statistics.

use std::fs;

use microscale_test_support::{Run, Scratch, command, run, sample};
use serde_json::Value;

use super::read_json;
use super::report::{parse, rows, tables, text};

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
    let page = scratch.path("page.html");
    let files = [("--json", &facts), ("--plot", &plot), ("--report", &page)];
    let files = files.iter().flat_map(|(option, file)| [*option, file.to_str().unwrap()]);
    let more: Vec<_> = ["--activations", "nvfp4"].into_iter().chain(files).collect();
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
    has_figures(&fs::read_to_string(page).unwrap(), &facts);
}

/// Asserts that a report on an evaluation has the figures of its JSON.
fn has_figures(page: &str, facts: &Value) {
    let page = parse(page);
    let shown = rows(&page, "Quantized checkpoints");
    let expected = facts["quantized"].as_array().unwrap();
    assert_eq!(shown.len(), expected.len());
    let titles = page.descendants().filter(|node| node.has_tag_name("h2")).map(text);
    let titles: Vec<_> = titles.filter(|title| title.starts_with("Outputs of layers: ")).collect();
    assert_eq!(titles.len(), expected.len());
    let tables = tables(&page, "The SQNR of each layer");
    for (((cells, table), model), title) in shown.iter().zip(&tables).zip(expected).zip(titles) {
        for (cell, figure) in [(1, "perplexity"), (4, "divergence")] {
            let digits = if cell == 1 { 3 } else { 5 };
            let number = |key: &str| format!("{:.digits$}", model[figure][key].as_f64().unwrap());
            assert_eq!(cells[cell], format!("{} ± {}", number("mean"), number("margin")));
        }
        let name = model["model"].as_str().unwrap();
        assert!(cells[0].starts_with(name) && title.contains(name), "{cells:?} {title}");
        let layers = model["layers"].as_array().unwrap();
        assert_eq!(table.len(), layers.len());
        for (row, layer) in table.iter().zip(layers) {
            let sqnr_db = layer["sqnr_db"].as_f64().unwrap();
            assert_eq!(row[..2], [layer["weight"].as_str().unwrap(), &format!("{sqnr_db:.2} dB")]);
        }
    }
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

#[test]
fn devices_that_models_do_not_run_on_are_refused() {
    let scratch = Scratch::new();
    let (story, stats) = (story(), scratch.path("stats"));
    let commands: [&[&dyn AsRef<std::ffi::OsStr>]; 2] = [&[&"eval", &story], &[&"calibrate", &story, &stats]];
    for command in commands {
        for device in ["cuda:all", "auto", "tpu"] {
            let refused = on_text(command, &["--device", device]);
            assert!(refused.code == Some(2) && refused.stderr.contains("cuda:N"), "{refused:#?}");
        }
        if cfg!(not(feature = "models-cuda")) {
            let refused = on_text(command, &["--device", "cuda"]);
            assert_eq!(refused.code, Some(2), "{refused:#?}");
            assert!(
                refused.stderr.contains("models-cuda") && refused.stderr.contains("nvcc"),
                "{refused:#?}"
            );
        }
    }
    assert!(!stats.exists());
}
