//! Recipe files and presets: what they say, what goes before them, and checkpoints of several formats.

use std::fs;
use std::path::{Path, PathBuf};

use microscale_tests::{Run, Scratch, TensorData, command, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::parts::{files, input};
use super::{floats, noise, quantize, read_json, tensors};

/// NVFP4, but MXFP4 for the way down, and one layer's attention searched.
const MIXED: &str = r#"
    format = "nvfp4"
    [[tensors]]
    match = "*.down_proj.weight"
    format = "mxfp4"
    [[tensors]]
    match = "*.layers.1.self_attn.*"
    search = "full"
"#;

/// Quantizes by a recipe file with this text.
fn by(scratch: &Scratch, input: &Path, out: &str, text: &str, more: &[&str]) -> Run {
    let file = scratch.write("recipe.toml", text);
    quantize(scratch, input, out, &[&["--recipe", file.to_str().unwrap()], more].concat())
}

/// What a dry run says that becomes of each tensor of the sample.
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

/// The same for a layer of it.
fn of_layer(becomes: &[(String, String)], layer: &str) -> String {
    becomes.iter().find(|(name, _)| name.contains(layer)).unwrap().1.clone()
}

/// A mixture of experts without its attention.
fn experts(scratch: &Scratch) -> PathBuf {
    let names = (0..2).flat_map(|layer| {
        let layer = format!("model.layers.{layer}");
        let expert = |i| ["gate_proj", "up_proj", "down_proj"].map(|part| format!("mlp.experts.{i}.{part}"));
        let of_layer =
            (0..3).flat_map(expert).chain(["self_attn.o_proj".into(), "mlp.shared_experts.up_proj".into()]);
        of_layer.map(|name| format!("{layer}.{name}.weight")).collect::<Vec<_>>()
    });
    let data: Vec<TensorData> = names
        .enumerate()
        .map(|(i, name)| (&*name.leak(), Dtype::F32, vec![8, 64], floats(&noise(8 * 64 + i)[i..])))
        .collect();
    scratch.write_tensors("IN/model.safetensors", &data);
    scratch.write("IN/config.json", "{}");
    scratch.path("IN")
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
        // What is printed is a recipe that does the same.
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
    let text = "format = \"mxfp4\"\nconvention = \"ggml\"\nscale_rule = \"ceil\"\nties = \"away\"\nsearch = \"full\"";
    let all = ["--convention", "ggml", "--scale-rule", "ceil", "--ties", "away", "--search", "full"];
    let mut cases: Vec<(&str, Vec<&str>, Vec<&str>)> = vec![(text, vec![], all.to_vec())];
    for (option, word) in
        [("--convention", "ocp"), ("--scale-rule", "even"), ("--ties", "even"), ("--search", "none")]
    {
        let mut expected = all;
        expected[all.iter().position(|other| *other == option).unwrap() + 1] = word;
        cases.push((text, vec![option, word], expected.to_vec()));
    }
    // Another format leaves behind what is about the one.
    let nvfp4 = ["--format", "nvfp4", "--convention", "modelopt"];
    cases.push((text, nvfp4.to_vec(), [&nvfp4[..], &["--search", "full"]].concat()));
    let text = "format = \"nvfp4\"\nglobal_scale = 1000\nout_convention = \"modelopt\"\nexclude = \"*.0.*\"";
    let nvfp4 = ["--format", "nvfp4", "--global-scale", "1000", "--exclude", "*.0.*"];
    let modelopt = ["--out-convention", "modelopt"];
    cases.push((text, vec![], [&nvfp4[..], &modelopt].concat()));
    cases.push((text, vec!["--out-convention", "compressed-tensors"], nvfp4.to_vec()));
    // Patterns are added to those of the file.
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
fn each_tensor_of_several_formats_is_that_of_its_format_alone() {
    let scratch = Scratch::new();
    let json = scratch.path("facts.json");
    let report = scratch.path("report.html");
    let more = ["--json", json.to_str().unwrap(), "--report", report.to_str().unwrap()];
    let text = by(&scratch, &sample(), "MIXED", MIXED, &more).ok();
    quantize(&scratch, &sample(), "NVFP4", &["--format", "nvfp4"]).ok();
    quantize(&scratch, &sample(), "FULL", &["--format", "nvfp4", "--search", "full"]).ok();
    quantize(&scratch, &sample(), "MXFP4", &["--format", "mxfp4"]).ok();
    let alone = ["NVFP4", "FULL", "MXFP4"].map(|out| tensors(&scratch.path(out)));
    let of = |name: &str| match name {
        _ if name.contains("down_proj") => 2,
        _ if name.contains("layers.1.self_attn") => 1,
        _ => 0,
    };
    let mixed = tensors(&scratch.path("MIXED"));
    for (name, (dtype, shape, data, _)) in &mixed {
        let (other_dtype, other_shape, other, _) = &alone[of(name)][name];
        assert_eq!((dtype, shape, data), (other_dtype, other_shape, other), "{name}");
    }
    // Three global scales fewer than with NVFP4 alone.
    assert_eq!(mixed.len(), alone[0].len() - 3);

    let facts = read_json(json);
    assert_eq!((facts.get("format"), &facts["files"]), (None, &json!("compressed-tensors")));
    let recipes: Vec<_> = facts["recipes"].as_array().unwrap().iter().collect();
    let words: Vec<_> =
        recipes.iter().map(|recipe| (recipe["format"].clone(), recipe["search"].clone())).collect();
    let expected = [("nvfp4", "none"), ("mxfp4", "none"), ("nvfp4", "full")];
    assert_eq!(words, expected.map(|(format, search)| (json!(format), json!(search))));
    assert_eq!(recipes[1]["used_for"]["tensors"], json!(3));
    for tensor in facts["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["copied"].is_null()) {
        let recipe = tensor["recipe"].as_u64().unwrap() as usize;
        let name = tensor["name"].as_str().unwrap();
        assert_eq!(recipe, [0, 2, 1][of(name)], "{name}");
        assert_eq!(tensor["format"], recipes[recipe]["format"]);
    }
    // 96 · 352 blocks of 32 in all, and the rest of 16.
    let (down, all) = (3 * 128 * 352, 552_960);
    let blocks = down / 32 + (all - down) / 16;
    let blocks = format!("0 of {},{:03} blocks", blocks / 1000, blocks % 1000);
    let searched = (128 * 128 * 2 + 64 * 128 * 2) / 16;
    for part in [
        &blocks,
        "\nnvfp4           18 ",
        "\nmxfp4            3 ",
        "\nquantized       21 ",
        " (14 tensors)\n",
        " (3 tensors)\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(text.contains(&format!(" of {},{:03}\n", searched / 1000, searched % 1000)), "{text}");
    let page = fs::read_to_string(report).unwrap();
    for part in ["Quantized to NVFP4 and MXFP4", "Block scales of MXFP4", "16·i (nvfp4) or 32·i (mxfp4)"] {
        assert!(page.contains(part), "{part}");
    }

    run(&[&"doctor", &scratch.path("MIXED"), &"--against", &sample()]).ok();
    let compared = run(&[&"compare", &sample(), &scratch.path("MIXED")]).ok();
    assert!(compared.contains("down_proj"), "{compared}");
    run(&[&"dequantize", &scratch.path("MIXED"), &"--out", &scratch.path("BACK")]).ok();
    for (out, i) in [("NVFP4", 0), ("FULL", 1), ("MXFP4", 2)] {
        let back = format!("{out}-BACK");
        run(&[&"dequantize", &scratch.path(out), &"--out", &scratch.path(&back)]).ok();
        let (back, mixed) = (tensors(&scratch.path(back)), tensors(&scratch.path("BACK")));
        for (name, tensor) in mixed.iter().filter(|(name, _)| of(name) == i) {
            assert_eq!(tensor.2, back[name].2, "{name}");
        }
    }
    // Another way to the same convention keeps everything, and conventions of one format refuse.
    let convert = |to: &str, out: &str| {
        run(&[&"convert", &scratch.path("MIXED"), &"--to", &to, &"--out", &scratch.path(out)])
    };
    convert("compressed-tensors", "AGAIN").ok();
    assert_eq!(files(&scratch.path("AGAIN")), files(&scratch.path("MIXED")));
    convert("modelopt", "NO").fails_with(&["modelopt", "has no mxfp4"]);
}

#[test]
fn a_config_says_which_layers_are_in_which_format() {
    let scratch = Scratch::new();
    by(&scratch, &sample(), "OUT", MIXED, &["--exclude", "*.layers.0.mlp.down*"]).ok();
    let config = read_json(scratch.path("OUT/config.json"));
    let quantization = &config["quantization_config"];
    assert_eq!(quantization["format"], "mixed-precision");
    assert_eq!(quantization["ignore"], json!(["lm_head", "model.layers.0.mlp.down_proj"]));
    let groups = quantization["config_groups"].as_object().unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups["group_0"]["format"], "nvfp4-pack-quantized");
    assert_eq!(groups["group_0"]["targets"].as_array().unwrap().len(), 18);
    assert_eq!(groups["group_1"]["format"], "mxfp4-pack-quantized");
    assert_eq!(groups["group_1"]["weights"]["group_size"], 32);
    let down = [1, 2].map(|layer| format!("model.layers.{layer}.mlp.down_proj"));
    assert_eq!(groups["group_1"]["targets"], json!(down));

    // The doctor goes by the groups' targets.
    let spoil = |change: &dyn Fn(&mut Value), findings: usize, part: &str| {
        let mut config = config.clone();
        change(&mut config["quantization_config"]["config_groups"]);
        scratch.write("OUT/config.json", config.to_string());
        let found = run(&[&"doctor", &scratch.path("OUT"), &"--json"]);
        let json: Value = serde_json::from_str(&found.stdout).unwrap();
        let all = json["findings"].as_array().unwrap();
        assert_eq!(all.len(), findings, "{json}");
        assert!(all.iter().all(|finding| finding["what"].as_str().unwrap().contains(part)), "{json}");
    };
    let moved = |groups: &mut Value| {
        groups["group_0"]["targets"][0] = json!(down[0]);
        groups["group_1"]["targets"][0] = json!("nothing");
    };
    spoil(&moved, 1, "group_0, which is about it, says something else");
    // A name goes before an expression, and that before a class.
    let expressions = |groups: &mut Value| {
        groups["group_0"]["targets"] = json!(["Linear", r"re:.*layers\.\d+\.mlp\.(gate|up)_proj$"]);
        groups["group_1"]["targets"] = json!(["re:.*down_proj"]);
    };
    spoil(&expressions, 0, "");
    spoil(&|groups| groups["group_0"]["targets"] = json!(["Linear", "re:.*proj"]), 0, "");
    spoil(&|groups| groups["group_1"]["targets"] = json!([r"re:.*\.down_proj$", "re:.*o_proj"]), 0, "");
    spoil(
        &|groups| {
            groups["group_1"]["targets"] =
                json!(["re:.*down_proj", down[0], "model.layers.0.self_attn.o_proj"])
        },
        1,
        "group_1",
    );
    spoil(&|groups| groups["group_1"]["weights"]["num_bits"] = json!(8), 2, "group_1");
    spoil(&|groups| groups["group_1"]["format"] = json!("nvfp4-pack-quantized"), 2, "group_1");
    // What nothing is about may be as any group says.
    spoil(&|groups| groups["group_1"]["targets"] = json!(["re:(?!x)y"]), 0, "");
}

#[test]
fn experts_of_a_layer_have_one_format() {
    let scratch = Scratch::new();
    let input = experts(&scratch);
    quantize(&scratch, &input, "OUT", &["--recipe", "nvfp4-mxfp4-experts"]).ok();
    let groups = &read_json(scratch.path("OUT/config.json"))["quantization_config"]["config_groups"];
    assert_eq!(groups["group_0"]["format"], "mxfp4-pack-quantized");
    assert_eq!(groups["group_0"]["targets"], json!([r"re:(.*\.)?layers\.\d+\.mlp\.experts\.\d+\."]));
    assert_eq!(groups["group_1"]["targets"].as_array().unwrap().len(), 4);
    run(&[&"doctor", &scratch.path("OUT")]).ok();
    let text = "[[tensors]]\nmatch = \"*.layers.0.mlp.experts.1.down*\"\nformat = \"nvfp4\"";
    let refused = by(&scratch, &input, "NO", text, &[]);
    refused.fails_with(&[
        "experts.0.",
        "mxfp4",
        "experts.1.down_proj.weight",
        "nvfp4",
        "\"model.layers.0.mlp.experts.*\"",
    ]);
    let text = "[[tensors]]\nmatch = \"*.layers.0.mlp.experts.*\"\nformat = \"nvfp4\"";
    by(&scratch, &input, "LAYERS", text, &[]).ok();
    let groups = &read_json(scratch.path("LAYERS/config.json"))["quantization_config"]["config_groups"];
    assert_eq!(groups["group_1"]["targets"], json!([r"re:(.*\.)?layers\.0\.mlp\.experts\.\d+\."]));
    run(&[&"doctor", &scratch.path("LAYERS")]).ok();
}

#[test]
fn layers_that_are_fused_have_one_recipe() {
    let scratch = Scratch::new();
    let rule =
        |says: &str| format!("format = \"nvfp4\"\n[[tensors]]\nmatch = \"*.layers.1.*.q_proj.*\"\n{says}");
    let parts = ["layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight"];
    for (says, what) in [
        ("format = \"mxfp4\"", ["(nvfp4)", "(mxfp4)"]),
        ("convention = \"modelopt\"", ["convention compressed-tensors", "convention modelopt"]),
        ("global_scale = 3", ["global scale from amax", "global scale 3"]),
        ("search = \"full\"\nsearch_global = true", ["search none", "search global 2688"]),
    ] {
        let refused = by(&scratch, &sample(), "NO", &rule(says), &[]);
        let pattern = "\"model.layers.1.self_attn.{q_proj,k_proj,v_proj}.weight\"";
        refused.fails_with(&[&parts[..], &what, &[pattern]].concat());
    }
    // The pattern that the error names does it. A search of one's own harms nobody.
    let text = "format = \"nvfp4\"\n[[tensors]]\nmatch = \"model.layers.1.self_attn.{q_proj,k_proj,v_proj}.weight\"\nformat = \"mxfp4\"";
    by(&scratch, &sample(), "YES", text, &[]).ok();
    by(&scratch, &sample(), "SEARCHED", &rule("search = \"full\""), &[]).ok();
    run(&[&"doctor", &scratch.path("YES")]).ok();
    run(&[&"doctor", &scratch.path("SEARCHED")]).ok();
}

#[test]
fn a_dry_run_shows_the_plan_with_sizes() {
    let scratch = Scratch::new();
    let json = scratch.path("plan.json");
    let text = by(&scratch, &sample(), "OUT", MIXED, &["--dry-run", "--json", json.to_str().unwrap()]).ok();
    let line = |name: &str| -> Vec<&str> {
        text.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().skip(1).collect()
    };
    let sizes = |becomes: &[&'static str], before, after| {
        [&["BF16"], becomes, &[before, "KiB", after, "KiB"]].concat()
    };
    assert_eq!(line("model.layers.0.mlp.down_proj.weight"), sizes(&["128×352", "mxfp4"], "88.0", "23.4"));
    assert_eq!(line("model.layers.0.mlp.up_proj.weight"), sizes(&["352×128", "nvfp4"], "88.0", "24.8"));
    let searched = sizes(&["128×128", "nvfp4,", "search", "full"], "32.0", "9.00");
    assert_eq!(line("model.layers.1.self_attn.q_proj.weight"), searched);
    assert_eq!(line("nvfp4")[..2], ["18", "417,792"]);
    assert_eq!(line("mxfp4")[..2], ["3", "135,168"]);
    assert!(
        text.contains("scales searched: full (4 tensors)") && text.ends_with("nothing was written\n"),
        "{text}"
    );
    assert!(!scratch.path("OUT").exists());
    let plan = read_json(json);
    let sum: u64 = plan["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tensor| tensor["bytes_after"].as_u64().unwrap())
        .sum();
    by(&scratch, &sample(), "OUT", MIXED, &[]).ok();
    let written: usize = tensors(&scratch.path("OUT")).values().map(|(_, _, data, _)| data.len()).sum();
    assert_eq!(sum, written as u64);
    let used: Vec<_> = plan["recipes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|recipe| recipe["used_for"]["tensors"].clone())
        .collect();
    assert_eq!(used, [14, 3, 4]);
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
fn what_looks_like_a_mistake_is_said() {
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
            &format!("{nvfp4}convention = \"ocp\""),
            &["recipe.toml:2: convention: nvfp4 has no convention ocp", "modelopt"],
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
            &format!(
                "{nvfp4}out_convention = \"modelopt\"\n[[tensors]]\nmatch = \"*o_proj*\"\nformat = \"mxfp4\""
            ),
            &["recipe.toml:5: format: modelopt", "has no mxfp4"],
        ),
        (
            &format!("out_convention = \"gpt-oss\"\n{nvfp4}"),
            &["recipe.toml:2: format: gpt-oss", "has no nvfp4"],
        ),
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
    // What is wrong with the command line says so.
    for (more, part) in [
        (&["--recipe", "nvfp5"][..], "there are nvfp4, mxfp4, nvfp4-keep-ends"),
        (&["--recipe", "nvfp4", "--ties", "away"], "--ties is for mxfp4"),
        (&["--recipe", "nvfp4", "--convention", "ggml"], "nvfp4 has no convention ggml"),
    ] {
        let refused = quantize(&scratch, &sample(), "OUT", more);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains(part), "{refused:#?}");
    }
    let refused = run(&[&"recipes", &"nvfp5"]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
}
