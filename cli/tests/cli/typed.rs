//! Commands as people type them: users of llm-compressor, llama-quantize, uv and ripgrep.

use std::collections::BTreeSet;

use microscale_test_support::{Run, Scratch, command, sample};
use serde_json::Value;

use super::{read_json, tensors};

/// Runs a line: `@` stands for the scratch directory, `SAMPLE` for the sample.
fn typed(scratch: &Scratch, line: &str) -> Run {
    let mut command = command(&[]);
    for word in line.split(' ') {
        match (word, word.strip_prefix('@')) {
            ("SAMPLE", _) => command.arg(sample()),
            (_, Some(name)) => command.arg(scratch.path(name)),
            _ => command.arg(word),
        };
    }
    command.current_dir(scratch.path(""));
    Run::new(command)
}

#[test]
fn an_output_is_given_by_position_or_option() {
    let scratch = Scratch::new();
    typed(&scratch, "quantize SAMPLE @0").ok();
    for (at, line) in [
        "quantize SAMPLE -o @1",
        "quantize SAMPLE --output @2",
        "quantize --out @3 SAMPLE",
        "quantize -f mxfp4 SAMPLE @4",
        "quantize -f MXFP4 --device CPU SAMPLE @5",
        "quantize -q -r mxfp4 SAMPLE @6",
        "quantize SAMPLE @7 --ignore nothing*",
        "quantize SAMPLE @8 --convention ocp --out-convention compressed-tensors",
        "quantize SAMPLE @9 --numerics OCP --to Compressed-Tensors --threads 2 --color never",
    ]
    .iter()
    .enumerate()
    {
        typed(&scratch, line).ok();
        assert_eq!(tensors(&scratch.path((at + 1).to_string())), tensors(&scratch.path("0")), "{line}");
    }
    typed(&scratch, "dequantize @0 @BACK").ok();
    typed(&scratch, "dequantize @0 -o @BACK2").ok();
    typed(&scratch, "convert @0 @CONVERTED --to compressed-tensors").ok();
    typed(&scratch, "quantize SAMPLE @PARTS --part 1/1").ok();
    typed(&scratch, "merge SAMPLE @PARTS").ok();
    assert_eq!(tensors(&scratch.path("PARTS")), tensors(&scratch.path("0")));
}

#[test]
fn other_words_for_formats_and_files_are_understood() {
    let scratch = Scratch::new();
    typed(&scratch, "quantize SAMPLE @A -f NVFP4").ok();
    typed(&scratch, "quantize SAMPLE @B -f nvfp4").ok();
    assert_eq!(tensors(&scratch.path("A")), tensors(&scratch.path("B")));
    typed(&scratch, "quantize SAMPLE @C -f mxfp8").ok();
    typed(&scratch, "quantize SAMPLE @D -f mxfp8-e4m3").ok();
    assert_eq!(tensors(&scratch.path("C")), tensors(&scratch.path("D")));
    // An importance matrix by the name of llama-quantize: the file is missing, not the option.
    let missing = typed(&scratch, "quantize SAMPLE @E --search full --imatrix nowhere.dat");
    missing.fails_with(&["nowhere.dat"]);
}

#[test]
fn devices_are_understood() {
    let scratch = Scratch::new();
    let gpu = typed(&scratch, "quantize SAMPLE @OUT --device cuda");
    let named = typed(&scratch, "quantize SAMPLE @OUT2 --device cuda:0");
    assert_eq!(gpu.code, named.code);
    assert_eq!(gpu.stderr, named.stderr);
    assert_ne!(gpu.code, Some(2));
}

#[test]
fn quiet_prints_nothing_and_verbose_lists_everything() {
    let scratch = Scratch::new();
    assert_eq!(typed(&scratch, "quantize SAMPLE @OUT -q").ok(), "");
    assert_eq!(typed(&scratch, "doctor @OUT --quiet").ok(), "");
    assert_eq!(typed(&scratch, "dequantize @OUT @BACK -q").ok(), "");
    // Results that a command exists for are printed.
    assert!(typed(&scratch, "inspect @OUT -q").ok().contains("quantized"));
    let all = typed(&scratch, "quantize SAMPLE @ALL -v").ok();
    let names = tensors(&sample());
    assert!(names.keys().all(|name| all.contains(name.as_str())), "{all}");
    assert_eq!(typed(&scratch, "quantize SAMPLE @X -q -v").code, Some(2));
}

#[test]
fn json_goes_to_a_file_or_to_stdout_for_every_command() {
    let scratch = Scratch::new();
    typed(&scratch, "quantize SAMPLE @PARTS --part 1/1").ok();
    for (line, key) in [
        ("quantize SAMPLE @OUT", "loss"),
        ("quantize SAMPLE -n", "tensors"),
        ("merge SAMPLE @PARTS", "shards"),
        ("dequantize @OUT @BACK", "nan_scales"),
        ("convert @OUT @CONVERTED --to compressed-tensors", "converted"),
        ("plan SAMPLE --bits 5", "alternatives"),
        ("doctor @OUT", "findings"),
        ("compare SAMPLE @OUT", "total"),
        ("compare SAMPLE --format nf4", "total"),
    ] {
        let printed = typed(&scratch, &format!("{line} --json -")).ok();
        let printed: Value = serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{line}: {why}"));
        assert!(!printed[key].is_null(), "{line}: {printed}");
        assert!(!scratch.path("-").exists(), "{line}");
    }
    let listed: Value = serde_json::from_str(&typed(&scratch, "inspect @OUT --json -").ok()).unwrap();
    assert_eq!(listed.as_array().map(Vec::len), Some(30));
    for line in ["inspect @OUT", "doctor @OUT", "compare SAMPLE @OUT"] {
        let text = typed(&scratch, &format!("{line} --json @facts.json")).ok();
        let printed: Value =
            serde_json::from_str(&typed(&scratch, &format!("{line} --json -")).ok()).unwrap();
        assert_eq!(read_json(scratch.path("facts.json")), printed, "{line}");
        assert_eq!(text, typed(&scratch, line).ok(), "{line}");
    }
    // The value is needed: an input must not be taken for it.
    let refused = typed(&scratch, "doctor @OUT --json");
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    // JSON is not written over an input.
    let before = scratch.contents();
    for line in ["doctor @OUT --json @OUT/config.json", "inspect @OUT --json @OUT/config.json"] {
        assert_ne!(typed(&scratch, line).code, Some(0), "{line}");
    }
    assert_eq!(scratch.contents(), before);
}

#[test]
fn a_missing_output_is_a_usage_error_before_any_work() {
    let scratch = Scratch::new();
    for line in ["quantize SAMPLE", "dequantize SAMPLE", "merge SAMPLE", "convert SAMPLE --to gguf"] {
        let refused = typed(&scratch, line);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains("hint: microscale"), "{refused:#?}");
    }
    let twice = typed(&scratch, "quantize SAMPLE @A -o @B");
    assert_eq!(twice.code, Some(2), "{twice:#?}");
}

#[test]
fn an_id_of_hugging_face_gets_the_command_that_downloads_it() {
    let scratch = Scratch::new();
    for line in ["quantize Qwen/Qwen3-0.6B @OUT", "doctor Qwen/Qwen3-0.6B", "inspect Qwen/Qwen3-0.6B"] {
        typed(&scratch, line).fails_with(&["hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"]);
    }
    for path in ["nowhere", "./a/b", "a/b/c", "a/b.safetensors", "/a/b"] {
        let refused = typed(&scratch, &format!("inspect {path}"));
        assert!(!refused.stderr.contains("hf download"), "{refused:#?}");
    }
}

#[test]
fn hints_have_a_line_of_their_own() {
    let scratch = Scratch::new();
    scratch.write("in/config.json", "{}");
    let refused = typed(&scratch, "inspect @in");
    let lines: Vec<_> = refused.stderr.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("error: "), "{refused:#?}");
    assert_eq!(lines[1], "hint: name a checkpoint directory or a file");
}

#[test]
fn colors_are_used_as_asked() {
    let scratch = Scratch::new();
    for (color, has) in [("always", true), ("never", false), ("auto", false)] {
        for line in ["inspect nowhere", "inspect --nonsense", "quantize --help"] {
            let run = typed(&scratch, &format!("{line} --color {color}"));
            let text = run.stdout.clone() + &run.stderr;
            assert_eq!(text.contains("\u{1b}["), has, "{line} {color}: {run:#?}");
        }
    }
}

#[test]
fn short_help_fits_a_screen_of_80_columns() {
    for command in ["", "quantize", "dequantize", "convert", "merge", "doctor", "compare", "inspect"] {
        let scratch = Scratch::new();
        let mut run = microscale_test_support::command(&[]);
        run.args(command.split(' ').filter(|word| !word.is_empty())).arg("-h").env("COLUMNS", "80");
        run.current_dir(scratch.path(""));
        let help = Run::new(run).ok();
        assert!(help.lines().count() <= 40, "{command}: {} lines", help.lines().count());
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    }
}

#[test]
fn words_that_are_always_refused_are_not_offered() {
    let scratch = Scratch::new();
    let help = typed(&scratch, "quantize --help").ok();
    for word in ["bitsandbytes", "mxfp8-e5m2", "nf4", "--convention", "--out-convention", "--imatrix"] {
        assert!(!help.contains(word), "{word}: {help}");
    }
    let help = typed(&scratch, "convert --help").ok();
    for word in ["mxfp8-e5m2", "nf4", "mxfp4-e3m0"] {
        assert!(!help.contains(word), "{word}: {help}");
    }
    // Comparing takes them.
    typed(&scratch, "compare SAMPLE -f nf4 --numerics bitsandbytes").ok();
}

#[test]
fn keys_of_json_are_documented() {
    fn keys(json: &Value, all: &mut BTreeSet<String>) {
        match json {
            Value::Object(members) => members.iter().for_each(|(key, value)| {
                all.insert(key.clone());
                keys(value, all);
            }),
            Value::Array(values) => values.iter().for_each(|value| keys(value, all)),
            _ => {}
        }
    }
    let scratch = Scratch::new();
    scratch.write(
        "mixed.toml",
        "search = \"full\"\n[[tensors]]\nmatch = \"*.mlp.*\"\nformat = \"nvfp4\"\nsearch_global = true",
    );
    let mut all = BTreeSet::new();
    for line in [
        "quantize SAMPLE @OUT -f nvfp4 --search full --search-global --check-search",
        "quantize SAMPLE @MIXED --recipe @mixed.toml",
        "quantize SAMPLE @INPUTS -f nvfp4 --input-scale 8",
        "quantize SAMPLE @PARTS --part 1/1",
        "plan SAMPLE --bits 5",
        "merge SAMPLE @PARTS",
        "dequantize @OUT @BACK",
        "convert @OUT @CONVERTED --to modelopt",
        "convert @PARTS @CAST --to fp8-block --requantize",
        "doctor @OUT --against @MIXED",
        "compare SAMPLE @OUT",
        "inspect @OUT",
        "inspect @CAST",
    ] {
        let run = typed(&scratch, &format!("{line} --json -"));
        let json = serde_json::from_str(&run.stdout).unwrap_or_else(|why| panic!("{why}: {run:#?}"));
        keys(&json, &mut all);
    }
    assert!(all.len() > 70, "{all:?}");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md");
    let page = std::fs::read_to_string(page).unwrap();
    let missing: Vec<_> = all.iter().filter(|key| !page.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "docs/json.md has no {missing:?}");
}
