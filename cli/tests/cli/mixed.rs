//! Checkpoints of several formats, made by recipes.

use std::fs;
use std::path::PathBuf;

use microscale_test_support::{Scratch, TensorData, run, sample};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::parts::files;
use super::recipes::by;
use super::{floats, noise, quantize, read_json, tensors};

/// NVFP4, with MXFP4 for down_proj, and a search for one layer's attention.
const MIXED: &str = r#"
    format = "nvfp4"
    [[tensors]]
    match = "*.down_proj.weight"
    format = "mxfp4"
    [[tensors]]
    match = "*.layers.1.self_attn.*"
    search = "full"
"#;

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
    // Three global scales fewer than with only NVFP4.
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
    // 96 · 352 blocks of 32 in total, the others of 16.
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
    // The same checkpoint format keeps everything. Checkpoint formats for one format refuse.
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

    // The doctor uses the targets of the groups.
    let spoil = |change: &dyn Fn(&mut Value), parts: &[&str]| {
        let mut config = config.clone();
        change(&mut config["quantization_config"]["config_groups"]);
        scratch.write("OUT/config.json", config.to_string());
        let found = run(&[&"doctor", &scratch.path("OUT"), &"--json", &"-"]);
        let json: Value = serde_json::from_str(&found.stdout).unwrap();
        let all = json["findings"].as_array().unwrap();
        assert_eq!(all.len(), parts.len(), "{json}");
        for (finding, part) in all.iter().zip(parts) {
            assert!(finding["what"].as_str().unwrap().contains(part), "{json}");
        }
    };
    let moved = |groups: &mut Value| {
        groups["group_0"]["targets"][0] = json!(down[0]);
        groups["group_1"]["targets"][0] = json!("nothing");
    };
    let parts =
        ["group_0, which applies to it, describes something else", "no target of config_groups matches it"];
    spoil(&moved, &parts);
    // A name takes precedence over an expression, and an expression over a class.
    let expressions = |groups: &mut Value| {
        groups["group_0"]["targets"] = json!(["Linear", r"re:.*layers\.\d+\.mlp\.(gate|up)_proj$"]);
        groups["group_1"]["targets"] = json!(["re:.*down_proj"]);
    };
    spoil(&expressions, &[]);
    spoil(&|groups| groups["group_0"]["targets"] = json!(["Linear", "re:.*proj"]), &[]);
    spoil(&|groups| groups["group_1"]["targets"] = json!([r"re:.*\.down_proj$", "re:.*o_proj"]), &[]);
    spoil(
        &|groups| {
            groups["group_1"]["targets"] =
                json!(["re:.*down_proj", down[0], "model.layers.0.self_attn.o_proj"])
        },
        &["group_1"],
    );
    spoil(
        &|groups| groups["group_1"]["weights"]["num_bits"] = json!(8),
        &["num_bits is 8, and must be 4 (2 tensors"],
    );
    spoil(&|groups| groups["group_1"]["format"] = json!("nvfp4-pack-quantized"), &["group_1"]);
    // A layer that no group names may have the format of any group.
    spoil(&|groups| groups["group_1"]["targets"] = json!(["re:(?!x)y"]), &[]);
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
    // The only finding: transformers ignores the global scales of experts.
    let found = run(&[&"doctor", &scratch.path("LAYERS")]);
    assert!(found.code == Some(1) && found.stderr.contains("9 defects were found"), "{found:#?}");
    assert!(found.stdout.starts_with("expert-global-scale\n"), "{found:#?}");
    let text = format!("{text}\nglobal_scale = \"none\"");
    by(&scratch, &input, "NONE", &text, &[]).ok();
    run(&[&"doctor", &scratch.path("NONE")]).ok();
}

#[test]
fn layers_that_are_fused_have_one_recipe() {
    let scratch = Scratch::new();
    let rule =
        |says: &str| format!("format = \"nvfp4\"\n[[tensors]]\nmatch = \"*.layers.1.*.q_proj.*\"\n{says}");
    let parts = ["layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight"];
    for (says, what) in [
        ("format = \"mxfp4\"", ["(nvfp4)", "(mxfp4)"]),
        ("numerics = \"modelopt\"", ["numerics compressed-tensors", "numerics modelopt"]),
        ("global_scale = 3", ["global scale from amax", "global scale 3"]),
        ("search = \"full\"\nsearch_global = true", ["search none", "search global 2688"]),
    ] {
        let refused = by(&scratch, &sample(), "NO", &rule(says), &[]);
        let pattern = "\"model.layers.1.self_attn.{q_proj,k_proj,v_proj}.weight\"";
        refused.fails_with(&[&parts[..], &what, &[pattern]].concat());
    }
    // The pattern in the error works. Different searches are allowed.
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
