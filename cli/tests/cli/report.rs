//! The report and the plot: well-formed, without external resources, with the figures of the JSON.

use std::fs;
use std::path::Path;

use approx::assert_relative_eq;
use microscale_checkpoint::{Checkpoint, inspect};
use microscale_test_support::{Scratch, run, sample};
use roxmltree::{Document, Node, ParsingOptions};
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::{floats, noise, quantize, read_json};

/// A name that is markup unless it is escaped.
const HOSTILE: &str = "</title><script src=\"http://x\">'&amp;\u{1}\u{202e}\n\u{ffff}.weight";
const ESCAPED: &str = r#"</title><script src="http://x">'&amp;\u{1}\u{202e}\u{a}\u{ffff}.weight"#;

pub(super) fn parse(text: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).unwrap_or_else(|error| panic!("{error}"))
}

pub(super) fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter(Node::is_text).filter_map(|text| text.text()).collect()
}

/// Returns the cells of the rows of a table with this caption, without the header.
pub(super) fn rows(page: &Document<'_>, caption: &str) -> Vec<Vec<String>> {
    let mut tables = tables(page, caption);
    assert!(!tables.is_empty(), "no table {caption:?}");
    tables.swap_remove(0)
}

/// Returns the rows of all tables with this caption.
pub(super) fn tables(page: &Document<'_>, caption: &str) -> Vec<Vec<Vec<String>>> {
    let is_table = |node: &Node<'_, '_>| {
        let mut captions = node.children().filter(|child| child.has_tag_name("caption"));
        node.has_tag_name("table") && captions.any(|node| text(node).starts_with(caption))
    };
    let cells_of = |table: Node<'_, '_>| {
        let bodies = table.children().filter(|node| node.has_tag_name("tbody"));
        let rows = bodies.flat_map(|body| body.children().filter(|node| node.has_tag_name("tr")));
        rows.map(|row| row.children().filter(Node::is_element).map(text).collect()).collect()
    };
    page.descendants().filter(is_table).map(cells_of).collect()
}

/// Parses a number with separated thousands and an optional unit.
fn number(text: &str) -> f64 {
    let text = text.replace(',', "").replace('−', "-");
    let number = text.split_whitespace().next().unwrap();
    number.parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

/// Asserts that a text shows a number to four digits.
pub(super) fn shows(shown: &str, exact: &Value) {
    assert_relative_eq!(number(shown), exact.as_f64().unwrap(), max_relative = 6e-4, epsilon = 5e-7);
}

fn report(scratch: &Scratch, input: &Path, more: &[&str]) -> (String, Value) {
    let (page, facts) = (scratch.path("report.html"), scratch.path("facts.json"));
    let files = ["--report", page.to_str().unwrap(), "--json", facts.to_str().unwrap()];
    quantize(scratch, input, "OUT", &[&files, more].concat()).ok();
    (fs::read_to_string(page).unwrap(), read_json(facts))
}

#[test]
fn the_report_has_the_figures_of_the_json() {
    for format in ["mxfp4", "nvfp4", "mxfp8-e4m3"] {
        let scratch = Scratch::new();
        let (page, facts) = report(&scratch, &sample(), &["--format", format]);
        let page = parse(&page);
        let title = page.descendants().find(|node| node.has_tag_name("h1")).unwrap();
        assert_eq!(text(title), "tiny-llama");

        let loss = rows(&page, "Loss of all");
        shows(&loss[0][1], &facts["loss"]["sqnr_db"]);
        shows(&loss[1][1], &facts["loss"]["relative_squared_error"]);
        let counts = rows(&page, "Values that were not kept");
        for (row, name) in
            counts.iter().zip(["nan", "infinite", "clipped_blocks", "flushed_blocks", "saturated_scales"])
        {
            assert_eq!(number(&row[1]), facts["loss"][name].as_f64().unwrap(), "{name}");
        }
        let settings = rows(&page, "Settings that decide the bytes");
        for (name, fact) in [("format", "format"), ("numerics", "numerics"), ("files", "files")] {
            assert!(settings.contains(&vec![name.into(), facts[fact].as_str().unwrap().into()]), "{name}");
        }

        let lines = rows(&page, "Quantized tensors");
        let entries = facts["tensors"].as_array().unwrap();
        let (copied, quantized): (Vec<_>, Vec<_>) =
            entries.iter().partition(|entry| entry["copied"].is_string());
        assert_eq!(lines.len(), quantized.len());
        for entry in quantized {
            let line = lines.iter().find(|line| entry["name"] == line[0].as_str()).unwrap();
            assert_eq!(entry["dtype"], line[1].as_str());
            shows(&line[5], &entry["loss"]["relative_squared_error"]);
            shows(&line[6], &entry["loss"]["sqnr_db"]);
        }
        let listed = rows(&page, "Not quantized");
        for entry in &copied {
            assert!(listed.iter().any(|line| entry["name"] == line[0].as_str()), "{entry}");
        }
    }
}

#[test]
fn distributions_are_those_of_the_files_that_were_written() {
    for format in ["mxfp4", "nvfp4", "mxfp8-e4m3"] {
        let scratch = Scratch::new();
        let (page, _) = report(&scratch, &sample(), &["--format", format]);
        let page = parse(&page);
        let out = Checkpoint::open(&scratch.path("OUT")).unwrap();
        let histograms: Vec<_> = inspect(&out).into_iter().filter_map(|entry| entry.histogram).collect();
        let of_scale = |byte: usize| histograms.iter().map(|histogram| histogram.scales[byte]).sum::<u64>();
        let of_code = |code: usize| histograms.iter().map(|histogram| histogram.codes[code]).sum::<u64>();
        let scales = rows(&page, "Block scales");
        assert_eq!(scales.len(), (0..256).filter(|byte| of_scale(*byte) > 0).count());
        for row in scales {
            assert_eq!(number(&row[2]), of_scale(row[1].parse().unwrap()) as f64);
        }
        let codes = rows(&page, "Codes");
        let all: f64 = codes.iter().map(|row| number(&row[2])).sum();
        assert_eq!(all, (0..256).map(of_code).sum::<u64>() as f64);
        for row in codes.iter().filter(|row| !row[1].is_empty()) {
            assert_eq!(number(&row[2]), of_code(row[1].parse().unwrap()) as f64);
        }
    }
}

#[test]
fn names_from_files_are_text_and_the_worst_blocks_are_found() {
    let scratch = Scratch::new();
    let mut outlier = noise(4 * 64);
    outlier[64 + 40] = 1e4;
    let tensors = [
        ("model.layers.0.q_proj.weight", noise(4 * 64)),
        ("model.layers.1.q_proj.weight", noise(4 * 64)),
        (HOSTILE, outlier),
        ("zeros.weight", vec![0.0; 4 * 64]),
        ("norm.weight", noise(4 * 64)),
    ];
    let tensors = tensors.map(|(name, values)| (name, Dtype::F32, vec![4, 64], floats(&values)));
    scratch.write_tensors("in/model.safetensors", &tensors);
    let (page, facts) = report(&scratch, &scratch.path("in"), &["--search", "full"]);
    let page = parse(&page);
    assert!(!page.descendants().any(|node| node.has_tag_name("script")));
    for name in ["href", "src"] {
        assert!(!page.descendants().any(|node| node.has_attribute(name)), "{name}");
    }
    let lines = rows(&page, "Quantized tensors");
    assert!(lines.iter().any(|line| line[0] == ESCAPED), "{lines:?}");
    for (caption, column) in [("By squared error relative", 7), ("By absolute squared error", 6)] {
        let worst = rows(&page, caption);
        assert_eq!(worst.len(), 20, "{caption}");
        let errors = worst.iter().map(|row| number(&row[column]));
        assert!(errors.is_sorted_by(|a, b| a >= b), "{worst:?}");
    }
    let worst = &rows(&page, "By absolute squared error")[0];
    assert_eq!((worst[0].as_str(), &worst[1..4]), (ESCAPED, &["1", "1", "10000"].map(String::from)[..]));
    let searched = rows(&page, "Searched scales");
    shows(&searched[0][1], &facts["loss"]["plain_relative_squared_error"]);
    shows(&searched[0][2], &facts["loss"]["relative_squared_error"]);
}

#[test]
fn the_plot_has_each_tensor_that_lost_something() {
    let scratch = Scratch::new();
    let (_, facts) = report(&scratch, &sample(), &[]);
    let plot = scratch.path("plot.svg");
    run(&[&"compare", &sample(), &scratch.path("OUT"), &"--plot", &plot]).ok();
    let svg = fs::read_to_string(plot).unwrap();
    let svg = parse(&svg);
    let bars = svg.descendants().filter(|node| node.attribute("class") == Some("bar"));
    let titles: Vec<String> = bars.map(text).collect();
    for entry in facts["tensors"].as_array().unwrap() {
        let title = titles.iter().find(|title| title.starts_with(entry["name"].as_str().unwrap()));
        assert_eq!(title.is_some(), entry["copied"].is_null(), "{entry}");
        if let Some(title) = title {
            shows(title.rsplit_once(": ").unwrap().1, &entry["loss"]["sqnr_db"]);
        }
    }
    let said = text(svg.root_element());
    for part in ["tiny-llama", "OUT", "SQNR, dB", "9 tensors without any error", "model.layers.0"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn many_tensors_are_dots_by_layer_and_kind() {
    let scratch = Scratch::new();
    let names: Vec<&'static str> = (0..50)
        .flat_map(|layer| {
            ["q_proj", "k_proj"].map(|kind| &*format!("model.layers.{layer}.{kind}.weight").leak())
        })
        .chain([HOSTILE])
        .collect();
    let values = |i: usize| floats(&noise(64 + i)[i..]);
    let tensors: Vec<_> =
        names.iter().enumerate().map(|(i, name)| (*name, Dtype::F32, vec![2, 32], values(i))).collect();
    scratch.write_tensors("in/model.safetensors", &tensors);
    quantize(&scratch, &scratch.path("in"), "OUT", &[]).ok();
    let plot = scratch.path("plot.svg");
    run(&[&"compare", &scratch.path("in"), &scratch.path("OUT"), &"--plot", &plot]).ok();
    let svg = fs::read_to_string(plot).unwrap();
    let svg = parse(&svg);
    let titles: Vec<_> = svg.descendants().filter(|node| node.has_tag_name("title")).map(text).collect();
    assert_eq!(titles.len(), names.len());
    assert!(titles.iter().any(|title| title.starts_with(ESCAPED)), "{titles:?}");
    let said = text(svg.root_element());
    for part in ["q_proj", "k_proj", "layer", "49"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_wrong_path_fails_before_anything_is_done() {
    let scratch = Scratch::new();
    let before = scratch.contents();
    let nowhere = scratch.path("nowhere/report.html");
    let nowhere = nowhere.to_str().unwrap();
    quantize(&scratch, &sample(), "OUT", &["--report", nowhere]).fails_with(&["cannot write", "report.html"]);
    run(&[&"compare", &sample(), &sample(), &"--plot", &nowhere])
        .fails_with(&["cannot write", "report.html"]);
    let same = scratch.path("same");
    let same = same.to_str().unwrap();
    for (more, part) in [(&["--json", same][..], "the same file"), (&["--dry-run"], "--dry-run")] {
        let run = quantize(&scratch, &sample(), "OUT", &[&["--report", same], more].concat());
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains(part), "{run:#?}");
    }
    assert_eq!(before, scratch.contents());
}
