//! Recipe files and presets: their effects, and the options that take precedence.

use std::path::Path;

use microscale_test_support::{Run, Scratch, command, run, sample};
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::parts::{files, input};
use super::{floats, noise, quantize, read_json, tensors};

/// Quantizes with a recipe file of this text.
pub(super) fn by(scratch: &Scratch, input: &Path, out: &str, text: &str, more: &[&str]) -> Run {
    let file = scratch.write("recipe.toml", text);
    quantize(scratch, input, out, &[&["--recipe", file.to_str().unwrap()], more].concat())
}

/// Returns the planned result of each tensor of the sample, from a dry run.
fn becomes(scratch: &Scratch, text: &str, more: &[&str]) -> Vec<(String, String)> {
    let json = scratch.path("plan.json");
    by(scratch, &sample(), "NONE", text, &[more, &["--dry-run", "--json", json.to_str().unwrap()]].concat())
        .ok();
    let plan = read_json(json);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let tensors = plan["tensors"].as_array().unwrap().iter();
    tensors
        .map(|tensor| (text(&tensor["name"]), text(&tensor["format"]) + &text(&tensor["copied"])))
        .collect()
}

/// Returns the planned result of one layer.
fn of_layer(becomes: &[(String, String)], layer: &str) -> String {
    becomes.iter().find(|(name, _)| name.contains(layer)).unwrap().1.clone()
}

#[test]
fn presets_are_the_options_that_they_stand_for() {
    let scratch = Scratch::new();
    let ends = ["--exclude", "*.layers.0.*", "--exclude", "*.layers.2.*"];
    for (preset, options) in [
        ("nvfp4", vec!["--format", "nvfp4"]),
        ("mxfp4", vec!["--format", "mxfp4"]),
        ("nvfp4-keep-ends", [&["--format", "nvfp4"], &ends[..]].concat()),
        ("mxfp4-keep-ends", [&["--format", "mxfp4"], &ends[..]].concat()),
        // The sample has no experts.
        ("nvfp4-mxfp4-experts", vec!["--format", "nvfp4"]),
    ] {
        let out = format!("{preset}-by-name");
        quantize(&scratch, &sample(), &out, &["--recipe", preset]).ok();
        quantize(&scratch, &sample(), preset, &options).ok();
        assert_eq!(files(&scratch.path(out)), files(&scratch.path(preset)), "{preset}");
        // The printed text is an equivalent recipe.
        let printed = run(&[&"recipes", &preset]).ok();
        let out = format!("{preset}-by-file");
        by(&scratch, &sample(), &out, &printed, &[]).ok();
        assert_eq!(files(&scratch.path(out)), files(&scratch.path(preset)), "{preset}");
        assert!(run(&[&"recipes"]).ok().contains(&format!("\n{preset} ")));
    }
}

#[test]
fn options_go_before_what_a_recipe_says_for_all_tensors() {
    let scratch = Scratch::new();
    let text =
        "format = \"mxfp4\"\nnumerics = \"ggml\"\nscale_rule = \"ceil\"\nties = \"away\"\nsearch = \"full\"";
    let all = ["--numerics", "ggml", "--scale-rule", "ceil", "--ties", "away", "--search", "full"];
    let mut cases: Vec<(&str, Vec<&str>, Vec<&str>)> = vec![(text, vec![], all.to_vec())];
    for (option, word) in
        [("--numerics", "ocp"), ("--scale-rule", "even"), ("--ties", "even"), ("--search", "none")]
    {
        let mut expected = all;
        expected[all.iter().position(|other| *other == option).unwrap() + 1] = word;
        cases.push((text, vec![option, word], expected.to_vec()));
    }
    // Another format drops the settings of the recipe's format.
    let nvfp4 = ["--format", "nvfp4", "--numerics", "modelopt"];
    cases.push((text, nvfp4.to_vec(), [&nvfp4[..], &["--search", "full"]].concat()));
    let text = "format = \"nvfp4\"\nglobal_scale = 1000\nto = \"modelopt\"\nexclude = \"*.0.*\"";
    let nvfp4 = ["--format", "nvfp4", "--global-scale", "1000", "--exclude", "*.0.*"];
    let modelopt = ["--to", "modelopt"];
    cases.push((text, vec![], [&nvfp4[..], &modelopt].concat()));
    cases.push((text, vec!["--to", "compressed-tensors"], nvfp4.to_vec()));
    // Patterns of options are added to the file's.
    let more = ["--exclude", "*down*", "--include", "lm_head*"];
    cases.push((text, more.to_vec(), [&nvfp4[..], &modelopt, &more].concat()));
    for (i, (text, more, expected)) in cases.into_iter().enumerate() {
        let [recipe, options] = ["recipe", "options"].map(|what| format!("{what}-{i}"));
        by(&scratch, &sample(), &recipe, text, &more).ok();
        quantize(&scratch, &sample(), &options, &expected).ok();
        assert_eq!(files(&scratch.path(recipe)), files(&scratch.path(options)), "{more:?} {expected:?}");
    }
}

#[test]
fn later_rules_win_and_exclude_has_the_last_word() {
    let scratch = Scratch::new();
    let of = |text: &str, more: &[&str]| becomes(&scratch, text, more);
    let text = r#"
        exclude = "*.layers.2.self_attn.*"
        include = "lm_head.*"
        keep_first_layers = 1
        [[tensors]]
        match = ["*down_proj*", "*up_proj*", "*gate_proj*"]
        format = "nvfp4"
        [[tensors]]
        match = "*.layers.1.mlp.down*"
        format = "mxfp8-e4m3"
        [[tensors]]
        match = "*.mlp.*"
        non_finite = "saturate"
        [[tensors]]
        match = "*.layers.2.mlp.*"
        keep = true
        [[tensors]]
        match = ["*.layers.2.mlp.down*", "*.layers.0.*o_proj*", "*.layers.2.self_attn.o*", "*embed*"]
        keep = false
    "#;
    let found = of(text, &[]);
    for (layer, expected) in [
        ("lm_head", "mxfp4"),
        ("embed_tokens", "mxfp4"),
        ("model.norm", "norm"),
        ("layers.0.input_layernorm", "norm"),
        ("layers.0.mlp.down_proj", "of the first layer"),
        ("layers.0.self_attn.o_proj", "mxfp4"),
        ("layers.1.self_attn.q_proj", "mxfp4"),
        ("layers.1.mlp.up_proj", "nvfp4"),
        ("layers.1.mlp.down_proj", "mxfp8-e4m3"),
        ("layers.2.mlp.up_proj", "kept by a rule for \"*.layers.2.mlp.*\""),
        ("layers.2.mlp.down_proj", "nvfp4"),
        ("layers.2.self_attn.o_proj", "excluded by \"*.layers.2.self_attn.*\""),
    ] {
        assert_eq!(of_layer(&found, layer), expected, "{layer}");
    }
    let more = of(text, &["--exclude", "lm_head*", "--format", "nvfp4"]);
    assert_eq!(of_layer(&more, "lm_head"), "excluded by \"lm_head*\"");
    assert_eq!(of_layer(&more, "layers.1.self_attn.q_proj"), "nvfp4");
    assert_eq!(of_layer(&more, "layers.1.mlp.down_proj"), "mxfp8-e4m3");
    let ends = of("keep_first_layers = 1\nkeep_last_layers = 1", &[]);
    let quantized: Vec<_> = ends.iter().filter(|(_, what)| what == "mxfp4").map(|(name, _)| name).collect();
    assert!(quantized.len() == 7 && quantized.iter().all(|name| name.contains("layers.1.")), "{quantized:?}");
}

#[test]
fn parts_by_a_recipe_make_what_one_run_makes() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    let text = "format = \"nvfp4\"\n[[tensors]]\nmatch = \"*.layers.1.*\"\nformat = \"mxfp4\"";
    let file = scratch.write("recipe.toml", text);
    let part = |i: &str| {
        Run::new(command(&[
            &"quantize",
            &input,
            &"--out",
            &scratch.path("OUT"),
            &"--part",
            &i,
            &"--recipe",
            &file,
        ]))
    };
    let merge = || run(&[&"merge", &input, &"--out", &scratch.path("OUT")]);
    quantize(&scratch, &input, "ONE", &["--recipe", file.to_str().unwrap()]).ok();
    part("1/2").ok();
    // A rule that changes one tensor changes the plan.
    scratch.write("recipe.toml", format!("{text}\nsearch = \"window\""));
    part("2/2").ok();
    merge().fails_with(&["different options", "OUT.parts"]);
    scratch.write("recipe.toml", format!("# The same in other words.\n{text}"));
    part("2/2").ok();
    merge().ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
}

#[test]
fn importance_and_global_scales_are_for_the_tensors_that_use_them() {
    let scratch = Scratch::new();
    let weight = |name| (name, Dtype::F32, vec![8, 64], floats(&noise(512)));
    let input =
        scratch.write_tensors("x.safetensors", &[weight("a.weight"), weight("b.weight"), weight("c.weight")]);
    let one = |name| (name, Dtype::F32, vec![1], floats(&[1000.0]));
    let scales = scratch.write_tensors("scales.safetensors", &[one("a.weight_global_scale")]);
    let importance: Vec<f32> = (0..64).map(|i| (i % 3) as f32).collect();
    let vector = ("b.weight.importance", Dtype::F32, vec![64], floats(&importance));
    let importance = scratch.write_tensors("importance.safetensors", &[vector]);
    let text = r#"
        format = "nvfp4"
        [[tensors]]
        match = "b*"
        format = "mxfp4"
        search = "full"
        [[tensors]]
        match = "c*"
        global_scale = 500
    "#;
    let more = ["--global-scale", scales.to_str().unwrap(), "--importance", importance.to_str().unwrap()];
    let run = by(&scratch, &input, "OUT", text, &[&more[..], &["--check-search"]].concat());
    assert_eq!(run.stderr, "");
    run.ok();
    let mixed = tensors(&scratch.path("OUT"));
    let scale = |name: &str| f32::from_le_bytes(mixed[name].2[..].try_into().unwrap());
    assert_eq!((scale("a.weight_global_scale"), scale("c.weight_global_scale")), (1000.0, 500.0));
    let options = ["--search", "full", "--importance", importance.to_str().unwrap()];
    quantize(&scratch, &input, "ALONE", &options).ok();
    assert_eq!(mixed["b.weight_scale"].2, tensors(&scratch.path("ALONE"))["b.weight_scale"].2);
}

#[test]
fn probable_mistakes_get_a_warning() {
    let scratch = Scratch::new();
    let warnings = |text: &str| by(&scratch, &sample(), "NONE", text, &["--dry-run"]).stderr;
    let found = warnings(
        "exclude = \"nobody*\"\n[[tensors]]\nmatch = [\"*q_proj*\", \"*w_proj*\"]\nnon_finite = \"saturate\"",
    );
    assert!(found.contains("warning: no tensor is called \"nobody*\""), "{found}");
    assert!(
        found.contains("recipe.toml:2: no tensor is called \"*w_proj*\"") && !found.contains("q_proj"),
        "{found}"
    );
    let found = warnings("[[tensors]]\nmatch = [\"lm_head*\"]\nformat = \"mxfp8-e4m3\"");
    assert!(
        found.contains("recipe.toml:1: all tensors called \"lm_head*\" are copied; keep = false"),
        "{found}"
    );
    assert_eq!(warnings("[[tensors]]\nmatch = \"lm_head*\"\nformat = \"mxfp8-e4m3\"\nkeep = false"), "");
    let one =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![1, 32], floats(&noise(32)))]);
    let found = by(&scratch, &one, "NONE", "keep_last_layers = 2", &["--dry-run"]).stderr;
    assert!(found.contains("no tensor is of a layer with a number"), "{found}");
}

#[test]
fn wrong_recipes_are_refused() {
    let scratch = Scratch::new();
    let nvfp4 = "format = \"nvfp4\"\n";
    for (text, parts) in [
        ("format = \"mxfp5\"", &["recipe.toml:1: format is \"mxfp5\"", "\"mxfp4\", \"nvfp4\""][..]),
        ("\nformt = 1", &["recipe.toml:2: a recipe has no key \"formt\"", "format"]),
        ("format", &["recipe.toml:1: this is not TOML"]),
        (
            &format!("{nvfp4}numerics = \"ocp\""),
            &["recipe.toml:2: numerics: nvfp4 has no numerics ocp", "modelopt"],
        ),
        (
            &format!("{nvfp4}[[tensors]]\nmatch = \"*\"\nties = \"even\""),
            &["recipe.toml:4: ties is for mxfp4"],
        ),
        (
            "search = \"full\"\n[[tensors]]\nmatch = \"*\"\nformat = \"mxfp8-e4m3\"",
            &["recipe.toml:1: search: ", "mxfp8-e4m3 cannot be searched"],
        ),
        (
            "[[tensors]]\nmatch = \"*o_proj*\"\nformat = \"mxfp8-e5m2\"",
            &["recipe.toml:3: format: ", "has no mxfp8-e5m2"],
        ),
        (
            &format!("{nvfp4}to = \"modelopt\"\n[[tensors]]\nmatch = \"*o_proj*\"\nformat = \"mxfp4\""),
            &["recipe.toml:5: format: modelopt", "has no mxfp4"],
        ),
        (&format!("to = \"gpt-oss\"\n{nvfp4}"), &["recipe.toml:2: format: gpt-oss", "has no nvfp4"]),
        (
            &format!("{nvfp4}search_global = true"),
            &["recipe.toml:2: search_global: ", "block scales are not searched"],
        ),
    ] {
        by(&scratch, &sample(), "OUT", text, &[]).fails_with(parts);
        assert!(!scratch.path("OUT").exists());
    }
    scratch.write("recipe.toml", [0xFF, 0xFE]);
    let file = scratch.path("recipe.toml");
    quantize(&scratch, &sample(), "OUT", &["--recipe", file.to_str().unwrap()])
        .fails_with(&["cannot read", "recipe.toml"]);
    quantize(&scratch, &sample(), "OUT", &["--recipe", "nowhere.toml"])
        .fails_with(&["cannot read nowhere.toml"]);
    // An error in the command line is a usage error.
    for (more, part) in [
        (&["--recipe", "nvfp5"][..], "there are nvfp4, mxfp4, nvfp4-keep-ends"),
        (&["--recipe", "nvfp4", "--ties", "away"], "--ties is for mxfp4"),
        (&["--recipe", "nvfp4", "--numerics", "ggml"], "nvfp4 has no numerics ggml"),
    ] {
        let refused = quantize(&scratch, &sample(), "OUT", more);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains(part), "{refused:#?}");
    }
    let refused = run(&[&"recipes", &"nvfp5"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
}
