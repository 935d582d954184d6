//! Models that run: `eval`, `calibrate`, and quantizing with the statistics.

use std::fs;

use microscale_test_support::{Run, Scratch, command, run, sample};
use safetensors::SafeTensors;
use serde_json::Value;

use super::read_json;
use super::report::{parse, rows, shows, tables, text};

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
fn a_report_on_a_calibration_has_the_figures_of_its_files() {
    let scratch = Scratch::new();
    let (stats, page) = (scratch.path("stats"), scratch.path("page.html"));
    let more = ["--skip-hessians", "--report", page.to_str().unwrap()];
    on_text(&[&"calibrate", &story(), &stats], &more).ok();
    let page = fs::read_to_string(page).unwrap();
    let page = parse(&page);
    let amax = read_json(stats.join("input_amax.json"));
    let bytes = fs::read(stats.join("importance.safetensors")).unwrap();
    let importance = SafeTensors::deserialize(&bytes).unwrap();
    let shown = rows(&page, "Inputs by layer");
    assert_eq!(shown.len(), 4 * 4, "four layers with four inputs");
    for row in &shown {
        let (parent, _) = row[0].rsplit_once('.').unwrap();
        for layer in row[1].split(", ") {
            let module = format!("{parent}.{layer}_proj");
            shows(&row[3], &amax[&module]);
            let bytes = importance.tensor(&format!("{module}.weight.importance")).unwrap().data();
            let squares = bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            assert_eq!(row[2], squares.len().to_string());
            let rms = (squares.clone().map(f64::from).sum::<f64>() / squares.len() as f64).sqrt();
            shows(&row[4], &rms.into());
            assert_eq!(row[7], format!("{:.1}", amax[&module].as_f64().unwrap() / rms));
        }
    }
    let layers: usize = shown.iter().map(|row| row[1].split(", ").count()).sum();
    assert_eq!(layers, 28);

    let kv = read_json(stats.join("kv_amax.json"));
    let shown = rows(&page, "Largest magnitudes by layer");
    assert_eq!(shown.len(), 4);
    for row in shown {
        for (cell, end) in [(1, "k_cache"), (2, "v_cache")] {
            shows(&row[cell], &kv[format!("{}.{end}", row[0])]);
        }
    }
    let settings = rows(&page, "The run");
    assert!(settings.contains(&vec!["device".into(), "cpu".into()]), "{settings:?}");
    assert!(tables(&page, "Weights without statistics").is_empty());
}

#[test]
fn a_report_on_a_calibration_names_experts_without_tokens() {
    let scratch = Scratch::new();
    for (name, experts) in [("qwen3_moe", 4), ("gpt_oss", 4)] {
        // A random model, without its golden values and with a tokenizer of three words.
        let [model, stats, page] =
            ["model", "stats", "page.html"].map(|end| scratch.path(format!("{name}-{end}")));
        fs::create_dir(&model).unwrap();
        let golden = sample().with_file_name("../tests/golden/models").join(name);
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(file), model.join(file)).unwrap();
        }
        let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 3, "b": 50, "c": 7}, "unk_token": "a"}}"#;
        fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
        let text = scratch.path("text.txt");
        fs::write(&text, "a b c").unwrap();
        run(&[&"calibrate", &model, &stats, &"--text", &text, &"--report", &page]).ok();
        let page = fs::read_to_string(&page).unwrap();
        let page = parse(&page);
        let unseen = read_json(stats.join("calibration.json"))["unseen_experts"].clone();
        let unseen = unseen.as_object().unwrap();
        let shown = rows(&page, "Weights without statistics");
        assert_eq!(shown.len(), unseen.len());
        assert!(!unseen.is_empty() && shown.iter().all(|row| unseen.contains_key(&row[0])), "{shown:?}");
        // Weights of one input count once.
        for row in rows(&page, "Inputs by layer").iter().filter(|row| row[0].contains("experts")) {
            let (layer, _) = row[0].split_once("experts").unwrap();
            let end = row[1].split(", ").next().unwrap();
            let of_row = |weight: &str| {
                weight.starts_with(layer)
                    && weight.trim_end_matches(".weight").ends_with(&format!(".{end}_proj"))
            };
            let count = |experts: &Value| experts.as_array().map_or(1, Vec::len);
            let unseen = unseen.iter().filter(|(weight, _)| of_row(weight));
            let unseen: usize = unseen.map(|(_, experts)| count(experts)).sum();
            assert_eq!(row[7], format!("{unseen} of {experts}"), "{name} {}", row[0]);
        }
    }
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
