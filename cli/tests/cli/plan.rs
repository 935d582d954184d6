//! Plans: the recipe that `plan` writes, what `quantize` makes of it, and the other outputs.

use std::fs;
use std::path::Path;

use microscale_test_support::{Run, Scratch, command, run, sample};
use serde_json::Value;

use super::{quantize, read_json, tensors};

/// Runs `plan SAMPLE` with more arguments.
fn plan(input: &Path, more: &[&str]) -> Run {
    let mut command = command(&[&"plan", &input]);
    command.args(more);
    Run::new(command)
}

/// Runs `plan` and returns its JSON.
fn planned(input: &Path, more: &[&str]) -> Value {
    let printed = plan(input, &[more, &["--json", "-"]].concat()).ok();
    serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{why}: {printed}"))
}

#[test]
fn quantize_makes_the_planned_formats_and_bytes_of_a_recipe() {
    let scratch = Scratch::new();
    let recipe = scratch.path("recipe.toml");
    let recipe = recipe.to_str().unwrap();
    for (out, budget) in [("A", ["--bits", "4.5"]), ("B", ["--bits", "5"]), ("C", ["--size", "0.9 MB"])] {
        let json = planned(&sample(), &[&budget[..], &["-o", recipe]].concat());
        let text = fs::read_to_string(recipe).unwrap();
        let first = text.lines().next().unwrap();
        assert!(first.starts_with("# Made by: microscale plan ") && first.contains(budget[0]), "{text}");
        let facts = scratch.path("facts.json");
        let more = ["-r", recipe, "--json", facts.to_str().unwrap()];
        let run = quantize(&scratch, &sample(), out, &more);
        // Every rule matches something that it changes.
        assert!(run.stderr.is_empty(), "{run:#?}\n{text}");
        run.ok();
        let facts = read_json(facts);
        let format_of = |name: &Value| {
            let tensor = facts["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == *name);
            tensor.unwrap()["format"].as_str().unwrap_or("unquantized").to_string()
        };
        for tensor in json["tensors"].as_array().unwrap() {
            assert_eq!(tensor["format"], format_of(&tensor["name"]), "{tensor}");
        }
        let bytes = json["bytes"].as_u64().unwrap() + json["other_bytes"].as_u64().unwrap();
        assert_eq!(facts["total"]["bytes_after"], bytes);
        let written: usize = tensors(&scratch.path(out)).values().map(|(_, _, data, _)| data.len()).sum();
        assert_eq!(written as u64, bytes);
        run_doctor(&scratch.path(out));
    }
}

fn run_doctor(out: &Path) {
    run(&[&"doctor", &out, &"--against", &sample()]).ok();
}

#[test]
fn the_text_has_formats_bound_and_alternatives() {
    let scratch = Scratch::new();
    let recipe = scratch.path("recipe.toml");
    let text = plan(&sample(), &["--bits", "5", "-o", recipe.to_str().unwrap()]).ok();
    for part in [
        "\nnvfp4 ",
        "\ntotal            21  552,960 ",
        "\nbudget  5.0000 bits per weight",
        " by linear relaxation, ",
        "; no plan within the budget loses less",
        "\nthis plan ",
        "\nnvfp4-keep-ends ",
        "\nfiles   compressed-tensors can hold it",
        "microscale quantize ",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let all = plan(&sample(), &["--bits", "5", "-v"]).ok();
    assert!(all.contains("\nmodel.layers.0.self_attn.q_proj.weight "), "{all}");
    assert!(all.contains("not written; -o RECIPE.toml writes it"), "{all}");
    // The plan is the best in its measure, with a search too.
    let plain = planned(&sample(), &["--bits", "5"]);
    let searched = planned(&sample(), &["--bits", "5", "--search", "full"]);
    assert!(searched["loss"].as_f64() < plain["loss"].as_f64());
    assert_eq!(plain["optimal"], true);
}

#[test]
fn loss_against_size_is_drawn() {
    let scratch = Scratch::new();
    let file = scratch.path("loss.svg");
    let input = scratch.path("a<b>&.safetensors");
    fs::copy(sample().join("model-00001-of-00002.safetensors"), &input).unwrap();
    plan(&input, &["--bits", "6", "--plot", file.to_str().unwrap()]).ok();
    let text = fs::read_to_string(file).unwrap();
    let document = roxmltree::Document::parse(&text).unwrap();
    let texts: Vec<_> = document.descendants().filter_map(|node| node.text()).collect();
    for word in ["Loss against size", "plan", "nvfp4", "mxfp4-keep-ends", "bits per weight"] {
        assert!(texts.contains(&word), "{word}: {texts:?}");
    }
    let curve = document.descendants().find(|node| node.attribute("class") == Some("curve s0")).unwrap();
    assert!(curve.attribute("points").unwrap().split(' ').count() > 10);
    assert!(!text.contains("NaN"));
}

#[test]
fn formats_are_restricted_by_their_words() {
    let used = |more: &[&str]| -> Vec<String> {
        let json = planned(&sample(), &[&["--bits", "6"], more].concat());
        let formats = json["formats"].as_array().unwrap().iter();
        formats.map(|format| format["format"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(used(&["--formats", "nvfp4"]), ["nvfp4"]);
    assert_eq!(used(&["--formats", "MXFP8,nvfp4"]), ["mxfp8-e4m3", "nvfp4"]);
    assert_eq!(used(&["--to", "modelopt"]), ["unquantized", "nvfp4"]);
    let refused = plan(&sample(), &["--bits", "6", "--formats", "nf4"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("mxfp8-e4m3, unquantized"), "{refused:#?}");
    plan(&sample(), &["--bits", "6", "--to", "modelopt", "--formats", "mxfp4"])
        .fails_with(&["modelopt", "no mxfp4"]);
}

#[test]
fn budgets_that_no_plan_fits_name_the_smallest() {
    plan(&sample(), &["--bits", "4"]).fails_with(&["4 bits per weight", "4.25 bits per weight", "--formats"]);
    plan(&sample(), &["--size", "1KB"]).fails_with(&["1000 bytes", "819840 bytes"]);
    plan(&sample(), &["--size", "819840"]).ok();
    for wrong in [&[][..], &["--bits", "5", "--size", "5GB"], &["--bits", "-1"], &["--size", "much"]] {
        assert_eq!(plan(&sample(), wrong).code, Some(2), "{wrong:?}");
    }
    let named = plan(&sample(), &["--bits", "5", "-o", "nvfp4"]);
    assert!(named.code == Some(2) && named.stderr.contains("name the file nvfp4.toml"), "{named:#?}");
    let all = plan(&sample(), &["--bits", "99"]);
    assert!(
        all.stderr.contains("exceeds the largest plan") && all.stderr.contains("nothing to do"),
        "{all:#?}"
    );
    let quiet = plan(&sample(), &["--bits", "99", "-q"]);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn no_input_is_overwritten() {
    let scratch = Scratch::new();
    let input = scratch.path("model.safetensors");
    fs::copy(sample().join("model-00001-of-00002.safetensors"), &input).unwrap();
    let before = scratch.contents();
    for option in ["-o", "--plot", "--json"] {
        let refused = plan(&input, &["--bits", "5", option, input.to_str().unwrap()]);
        assert_ne!(refused.code, Some(0), "{option}");
    }
    assert_eq!(scratch.contents(), before);
}
