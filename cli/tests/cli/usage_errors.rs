//! Refused and aborted commands, which leave no files.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use microscale_test_support::{Run, Scratch, TensorData, command, run, sample};
use safetensors::tensor::Dtype;
use serde_json::json;

use super::{floats, noise, quantize, read_json, tensors};

#[test]
fn output_over_input_is_refused() {
    let scratch = Scratch::new();
    let tensor: TensorData = ("a.weight", Dtype::F32, vec![4, 32], vec![0; 512]);
    scratch.write_tensors("in/sub/model.safetensors", &[tensor]);
    let (input, file) = (scratch.path("in/sub"), scratch.path("in/sub/model.safetensors"));
    fs::create_dir(scratch.path("in/sub/empty")).unwrap();
    let before = scratch.contents();
    quantize(&scratch, &input, "in/sub", &[]).fails_with(&["is the input"]);
    quantize(&scratch, &input, "in/../in/sub", &[]).fails_with(&["is the input"]);
    quantize(&scratch, &input, "in/sub/OUT", &[]).fails_with(&["lies inside the input"]);
    quantize(&scratch, &input, "in/sub/empty", &[]).fails_with(&["lies inside the input"]);
    quantize(&scratch, &input, "in", &[]).fails_with(&["holds the input"]);
    quantize(&scratch, &file, "in/sub/model.safetensors", &[]).fails_with(&["is the input"]);
    quantize(&scratch, &file, "in/sub/empty", &[]).fails_with(&["is a directory"]);
    assert_eq!(before, scratch.contents());

    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&input, scratch.path("link")).unwrap();
        std::os::unix::fs::symlink(scratch.path("nowhere"), scratch.path("dangling")).unwrap();
        let before = scratch.contents();
        quantize(&scratch, &input, "link", &[]).fails_with(&["is the input"]);
        quantize(&scratch, &scratch.path("link"), "in/sub", &[]).fails_with(&["is the input"]);
        quantize(&scratch, &input, "link/OUT", &[]).fails_with(&["lies inside the input"]);
        quantize(&scratch, &input, "dangling", &[]).fails_with(&["dangling exists"]);
        assert_eq!(before, scratch.contents());
    }
}

#[test]
fn non_finite_values_are_refused_or_counted() {
    let scratch = Scratch::new();
    let mut values = noise(4 * 64);
    (values[64 + 3], values[64 + 5], values[3 * 64 + 40]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let tensors_in = [("good.weight", noise(4 * 64)), ("poisoned.weight", values)];
    let input = tensors_in.map(|(name, values)| (name, Dtype::F32, vec![4, 64], floats(&values)));
    scratch.write_tensors("in/model.safetensors", &input);
    let (input, facts) = (scratch.path("in"), scratch.path("facts.json"));
    let before = scratch.contents();
    let json = ["--json", facts.to_str().unwrap()];
    let parts =
        ["model.safetensors", "poisoned.weight", "1 NaN", "2 infinite", "row 1, column 3", "propagate"];
    quantize(&scratch, &input, "OUT", &json).fails_with(&parts);
    assert_eq!(before, scratch.contents());

    let run_with = |policy: &str| {
        quantize(&scratch, &input, policy, &[&["--non-finite", policy], &json[..]].concat()).ok();
        let loss = &read_json(facts.clone())["loss"];
        assert_eq!((&loss["nan"], &loss["infinite"]), (&json!(1), &json!(2)), "{policy}");
        tensors(&scratch.path(policy))["poisoned.weight_scale"].2.clone()
    };
    let nan = |scales: Vec<u8>| scales.iter().map(|scale| *scale == 255).collect::<Vec<_>>();
    assert_eq!(nan(run_with("propagate")), [false, false, true, false, false, false, false, true]);
    assert_eq!(nan(run_with("saturate")), [false; 8]);

    let (out, back) = (scratch.path("propagate"), scratch.path("BACK"));
    let text = run(&[&"dequantize", &out, &"--out", &back, &"--dtype", &"f32"]).ok();
    assert!(text.contains("2 blocks have a NaN scale"), "{text}");
    let (dtype, _, data, _) = tensors(&back).remove("poisoned.weight").unwrap();
    let values: Vec<f32> = data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(dtype, Dtype::F32);
    assert!(
        values
            .chunks(32)
            .map(|block| block.iter().filter(|v| v.is_nan()).count())
            .eq([0, 0, 32, 0, 0, 0, 0, 32])
    );
    let comparison = run(&[&"compare", &input, &back]).ok();
    assert!(comparison.contains("left out: 64 of 512 values, not finite"), "{comparison}");
}

#[test]
fn wrong_command_lines_are_usage_errors() {
    for args in [
        &["quantize"][..],
        &["quantize", "x"],
        &["quantize", "x", "--out", "y", "--format", "mxfp5"],
        &["quantize", "x", "--out", "y", "--device", "tpu"],
        &["quantize", "x", "--out", "y", "--include", "[a"],
        &["quantize", "x", "--out", "y", "--ties", "odd"],
        &["dequantize", "x", "--out", "y", "--dtype", "f64"],
        &["frobnicate"],
        &[],
    ] {
        let mut command = command(&[]);
        command.args(args);
        let run = Run::new(command);
        assert_eq!(run.code, Some(2), "{run:#?}");
    }
    // Patterns may be long while they take moderate memory.
    for option in ["--include", "--exclude"] {
        let with = |bytes| run(&[&"quantize", &"x", &"--out", &"y", &option, &"?".repeat(bytes)]);
        let refused = with(1025);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        for part in [option, "1025 bytes, more than the 1024 allowed"] {
            assert!(refused.stderr.contains(part), "{refused:#?}");
        }
        with(1024).fails_with(&["cannot open x"]);
    }
    // The words come from the library's lists.
    let help = run(&[&"quantize", &"--help"]).ok();
    for word in ["mxfp4", "nvfp4", "floor", "rceil", "away", "compressed-tensors", "saturate"] {
        assert!(help.contains(word), "{help}");
    }
    // Formats without a checkpoint format are not offered for output files.
    let wrong = run(&[&"quantize", &"x", &"--out", &"y", &"--format", &"fp3"]).stderr;
    assert!(wrong.contains("mxfp8-e4m3"), "{wrong}");
    for word in ["mxfp8-e5m2", "nf4", "mxfp4-e3m0"] {
        assert!(!help.contains(word) && !wrong.contains(word), "{help}{wrong}");
        assert!(run(&[&"compare", &"--help"]).ok().contains(word));
    }
}

#[test]
fn options_that_do_not_go_together_are_usage_errors_that_say_so() {
    let scratch = Scratch::new();
    let before = scratch.contents();
    for (args, parts) in [
        (
            "--format nvfp4 --numerics ocp",
            &["nvfp4 has no numerics ocp", "compressed-tensors", "torchao"][..],
        ),
        ("--format nvfp4 --numerics ggml", &["nvfp4 has no numerics ggml"]),
        ("--format mxfp4 --numerics transformer-engine", &["mxfp4 has no numerics transformer-engine"]),
        ("--format mxfp8-e4m3 --numerics modelopt", &["mxfp8-e4m3 has no numerics modelopt", "ocp"]),
        ("--format mxfp8-e5m2", &["has no mxfp8-e5m2", "mxfp8-e4m3"]),
        ("--format nvfp4 --scale-rule floor", &["--scale-rule", "nvfp4"]),
        ("--format nvfp4 --ties away", &["--ties is for mxfp4", "nvfp4"]),
        ("--format mxfp8-e4m3 --ties away", &["--ties is for mxfp4", "mxfp8-e4m3"]),
        ("--format mxfp4 --global-scale 3", &["mxfp4 has no global scale"]),
        ("--format mxfp8-e4m3 --global-scale none", &["mxfp8-e4m3 has no global scale"]),
        ("--global-scale x.safetensors", &["mxfp4 has no global scale"]),
        ("--format nvfp4 --global-scale 0", &["global scale of 0 as a divisor", "out of range"]),
        ("--format nvfp4 --global-scale=-1", &["global scale of -1 as a divisor"]),
        ("--format nvfp4 --global-scale nan", &["global scale of NaN"]),
        ("--format nvfp4 --global-scale 1e39", &["global scale of inf"]),
        ("--format nvfp4 --global-scale 1e-37", &["out of range"]),
        ("--format nvfp4 --numerics torchao --global-scale 1e37", &["as a multiplier", "out of range"]),
    ] {
        let run = quantize(&scratch, &sample(), "OUT", &args.split(' ').collect::<Vec<_>>());
        assert_eq!(run.code, Some(2), "{run:#?}");
        let messages = run.messages();
        let line = messages.lines().last().unwrap_or_default();
        assert!(line.starts_with("error: ") && parts.iter().all(|part| line.contains(part)), "{run:#?}");
    }
    assert_eq!(before, scratch.contents());
}

#[test]
fn an_instruction_set_that_is_not_there_is_a_usage_error() {
    for (word, code) in [("portable", 0), ("avx1024", 2), ("", 2)] {
        let mut command = command(&[&"devices"]);
        command.env("MICROSCALE_CPU", word);
        let run = Run::new(command);
        assert_eq!(run.code, Some(code), "{run:#?}");
        assert!(code == 0 || run.stderr.contains("portable"), "the choice is named: {run:#?}");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_and_leaves_nothing() {
    let scratch = Scratch::new();
    let before = scratch.contents();
    let run = quantize(&scratch, &sample(), "OUT", &["--device", "cuda:999"]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("GPU"), "{run:#?}");
    assert_eq!(before, scratch.contents());
    assert!(microscale_test_support::run(&[&"devices"]).ok().contains("CPU"));
}

#[test]
fn json_that_cannot_be_written_is_noticed_before_the_work() {
    let scratch = Scratch::new();
    let before = scratch.contents();
    let nowhere = scratch.path("nowhere/facts.json");
    quantize(&scratch, &sample(), "OUT", &["--json", nowhere.to_str().unwrap()])
        .fails_with(&["cannot write", "facts.json"]);
    assert_eq!(before, scratch.contents());
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child =
        command(&[&"inspect", &sample()]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    assert_eq!(stderr, "");
}

/// Terminals interpret control characters as commands, such as renaming the window or typing input.
#[test]
fn control_characters_in_names_are_escaped() {
    let scratch = Scratch::new();
    let name = "a\u{1b}]0;owned\u{7}\u{202e}.weight";
    let tensors = [(name, Dtype::F32, vec![2, 32], floats(&noise(64)))];
    let input = scratch.write_tensors("in\u{1b}[2J.safetensors", &tensors);
    let out = scratch.path("out\u{1b}[2J.safetensors");
    let runs = [
        run(&[&"quantize", &input, &"--dry-run"]),
        run(&[&"quantize", &input, &"--out", &out]),
        run(&[&"inspect", &out]),
        run(&[&"compare", &input, &out]),
        run(&[&"doctor", &out]),
        run(&[&"inspect", &scratch.path("missing\u{1b}[2J")]),
        run(&[&"quantize", &input, &"--out", &out]),
    ];
    let mut shown = 0;
    for run in runs {
        for text in [&run.stdout, &run.stderr] {
            assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{run:#?}");
            shown += usize::from(text.contains("\\u{1b}"));
        }
    }
    assert_eq!(shown, 6, "the names are there, and say what they are; doctor has nothing to name");
}

#[test]
fn files_of_another_kind_are_called_by_their_names() {
    let scratch = Scratch::new();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let refused = |file: &str, bytes: &[u8], parts: &[&str]| {
        let path = scratch.write(file, bytes);
        quantize(&scratch, &path, "OUT", &[])
            .fails_with(&[&[file, "no tensors that are read here"], parts].concat());
    };
    refused("a.safetensors", pointer.as_bytes(), &["a Git LFS pointer", "git lfs pull"]);
    refused("a.gguf", pointer.as_bytes(), &["a Git LFS pointer", "git lfs pull"]);
    refused("old.pt", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P", &["a PyTorch file", "save_pretrained"]);
    refused("b.safetensors", b"<!doctype html><html>Not found</html>", &["a web page", "download"]);
}

#[test]
fn quantized_input_is_detected_in_any_config() {
    let method = json!({ "quant_method": "compressed-tensors" });
    for config in [
        json!({ "quantization_config": method }),
        json!({ "text_config": { "quantization_config": method } }),
        json!({ "compression_config": method }),
        json!({ "quantization_config": null, "text_config": { "quantization_config": method } }),
    ] {
        let scratch = Scratch::new();
        let tensor: TensorData = ("a.weight", Dtype::F32, vec![4, 32], vec![0; 512]);
        scratch.write_tensors("IN/model.safetensors", &[tensor]);
        scratch.write("IN/config.json", config.to_string());
        quantize(&scratch, &scratch.path("IN"), "OUT", &[])
            .fails_with(&["compressed-tensors", "quantized already"]);
    }
    // Dequantized weights have none of them.
    let scratch = Scratch::new();
    quantize(&scratch, &sample(), "Q", &[]).ok();
    let mut config = read_json(scratch.path("Q/config.json"));
    let quantization = config.as_object_mut().unwrap().shift_remove("quantization_config").unwrap();
    config["compression_config"] = quantization.clone();
    config["text_config"] = json!({ "quantization_config": quantization, "a": 1 });
    scratch.write("Q/config.json", config.to_string());
    run(&[&"dequantize", &scratch.path("Q"), &"--out", &scratch.path("BACK")]).ok();
    let back = read_json(scratch.path("BACK/config.json"));
    assert!(back.get("compression_config").is_none() && back["text_config"] == json!({ "a": 1 }), "{back}");
}
