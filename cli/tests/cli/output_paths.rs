//! Paths of outputs: no path to an input or another output overwrites it. Pipes and devices are
//! written directly.

use std::fs;
use std::path::Path;

use microscale_test_support::{Run, Scratch, TensorData, command, data_dir, run};
use safetensors::tensor::Dtype;

use super::parts::{files, input};
use super::{floats, gguf, noise, quantize, read_json};

/// Runs the program. `@name` in its command line is a path in the scratch directory.
fn run_in(scratch: &Scratch, line: &str) -> Run {
    let mut command = command(&[]);
    for word in line.split(' ') {
        match word.strip_prefix('@') {
            Some(name) => command.arg(scratch.path(name)),
            None => command.arg(word),
        };
    }
    Run::new(command)
}

/// Copies IN to a directory of this name.
fn copied(scratch: &Scratch, name: &str) {
    for (file, bytes) in files(&scratch.path("IN")) {
        scratch.write(Path::new(name).join(file), bytes);
    }
}

#[test]
fn a_directory_of_parts_that_is_not_ours_stays_as_it_is() {
    let scratch = Scratch::new();
    input(&scratch);
    copied(&scratch, "OUT.parts");
    scratch.write("FILE.parts/x", "x");
    scratch.write("DEVICE.parts", "x");
    let before = scratch.contents();
    let refused = |line: &str, part: &str| {
        run_in(&scratch, line).fails_with(&[part]);
        assert_eq!(before, scratch.contents(), "{line}");
    };
    refused("quantize @IN --out @OUT --part 1/1", "OUT.parts is there and was not made by");
    refused("quantize @OUT.parts --out @OUT --part 1/1", "OUT.parts is the input");
    refused("merge @OUT.parts --out @OUT", "OUT.parts is the input");
    refused("quantize @IN --out @FILE --part 1/1", "FILE.parts is there and was not made by");
    refused("quantize @IN --out @DEVICE --part 1/1", "cannot create");
    refused("quantize @IN/tokenizer/vocab.txt --out @OUT --part 1/1", "vocab.txt");
}

#[test]
fn a_file_named_like_one_of_another_container_is_refused() {
    let scratch = Scratch::new();
    let tensor: TensorData = ("a.weight", Dtype::F32, vec![4, 64], floats(&noise(256)));
    scratch.write_tensors("in.safetensors", &[tensor]);
    let pytorch = data_dir().join("tests/golden/pytorch/training.pt");
    scratch.write("in.bin", fs::read(pytorch).unwrap());
    scratch.write("in.gguf", gguf::file(&crate::gguf::metadata(), &crate::gguf::model()));
    run_in(&scratch, "quantize @in.safetensors --format nvfp4 --out @Q.safetensors").ok();
    let before = scratch.contents();
    let commands = [
        "quantize @in.safetensors",
        "quantize @in.bin",
        "dequantize @Q.safetensors",
        "convert @Q.safetensors --to modelopt",
    ];
    for command in commands {
        for name in ["x.gguf", "x.GGUF", "x.bin", "x.BIN", "x.Pth", "x.onnx", "x.h5"] {
            let stem = name.split('.').next().unwrap();
            let instead = format!("{stem}.safetensors");
            run_in(&scratch, &format!("{command} --out @{name}")).fails_with(&[
                name,
                "would be safetensors",
                &instead,
            ]);
        }
    }
    for name in ["x.safetensors", "x.bin"] {
        run_in(&scratch, &format!("quantize @in.gguf --out @{name}")).fails_with(&[
            name,
            "would be GGUF",
            "x.gguf",
        ]);
    }
    assert_eq!(before, scratch.contents());
    for name in ["x", "x.SafeTensors", "x.quantized"] {
        run_in(&scratch, &format!("quantize @in.safetensors --out @{name}")).ok();
    }
    run_in(&scratch, "quantize @in.gguf --out @y.GGUF").ok();
}

#[cfg(unix)]
#[test]
fn parts_do_not_follow_a_link_into_the_input() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let input = input(&scratch);
    symlink(&input, scratch.path("OUT.parts")).unwrap();
    symlink(input.join("tokenizer"), scratch.path("OUT2.parts")).unwrap();
    let before = scratch.contents();
    for (out, part) in [("OUT", "is the input"), ("OUT2", "lies inside the input")] {
        run_in(&scratch, &format!("quantize @IN --out @{out} --part 1/1")).fails_with(&[part]);
        run_in(&scratch, &format!("merge @IN --out @{out}")).fails_with(&[part]);
        assert_eq!(before, scratch.contents());
    }
    // A link to the user's own folder, for example on another disk, is allowed.
    fs::remove_file(scratch.path("OUT.parts")).unwrap();
    fs::create_dir(scratch.path("disk")).unwrap();
    symlink("disk", scratch.path("OUT.parts")).unwrap();
    run_in(&scratch, "quantize @IN --out @OUT --part 1/1").ok();
    run_in(&scratch, "merge @IN --out @OUT").ok();
    assert_eq!(files(&scratch.path("disk")).len(), 0);
    assert!(scratch.path("OUT/config.json").exists());
}

#[test]
fn merging_removes_what_was_merged_and_nothing_else() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    run_in(&scratch, "quantize @IN --out @OUT --part 1/1").ok();
    scratch.write("OUT.parts/notes.txt", "mine");
    scratch.write("OUT.parts/deep/model-9-of-7.safetensors", "mine, too");
    let text = run(&[&"merge", &input, &"--out", &scratch.path("OUT")]).ok();
    assert!(text.contains("OUT.parts: it has files that are not of this merge"), "{text}");
    let left = files(&scratch.path("OUT.parts"));
    let left: Vec<_> = left.keys().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(left, [".microscale-parts", "deep/model-9-of-7.safetensors", "notes.txt"]);
    assert_eq!(fs::read(scratch.path("OUT.parts/notes.txt")).unwrap(), b"mine");
}

#[test]
fn reports_do_not_overwrite_what_is_read_or_written() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    quantize(&scratch, &input, "PACKED", &[]).ok();
    let shard = "model-0-of-7.safetensors";
    fs::copy(input.join(shard), scratch.path("one.safetensors")).unwrap();
    fs::hard_link(scratch.path("one.safetensors"), scratch.path("other-name")).unwrap();
    scratch.write("recipe.toml", "format = \"nvfp4\"\n");
    scratch.write("importance.safetensors", fs::read(input.join(shard)).unwrap());
    let before = scratch.contents();
    let refused = |line: String, part: &str| {
        let run = run_in(&scratch, &line);
        // Conflicting outputs are usage errors.
        let code = if part == "the same file" { 2 } else { 1 };
        assert!(run.code == Some(code) && run.stderr.contains(part), "{part}: {run:#?}");
        assert_eq!(before, scratch.contents(), "{line}");
    };
    for option in ["--json", "--report"] {
        for (file, part) in [
            (format!("@IN/{shard}"), "the input"),
            ("@IN/tokenizer/../config.json".into(), "is the input"),
            ("@IN/tokenizer/vocab.txt".into(), "vocab.txt is the input"),
            ("@recipe.toml".into(), "recipe.toml is the input"),
            ("@OUT".into(), "the same file"),
            ("@OUT/config.json".into(), "the same file"),
            ("@IN".into(), "the input"),
        ] {
            refused(format!("quantize @IN --out @OUT --recipe @recipe.toml {option} {file}"), part);
        }
        refused(format!("quantize @one.safetensors --out @OUT {option} @one.safetensors"), "is the input");
        refused(format!("quantize @one.safetensors --out @OUT {option} @OUT"), "the same file");
        refused(format!("quantize @IN --out @OUT --part 1/2 {option} @OUT.parts/x"), "the same file");
    }
    refused(format!("quantize @IN --dry-run --json @IN/{shard}"), "the input");
    refused("quantize @one.safetensors --dry-run --json @other-name".into(), "is the input");
    refused("quantize @IN --out @OUT --json @new --report @IN/../new".into(), "the same file");
    refused("merge @IN --out @OUT --json @IN/config.json".into(), "is the input");
    refused(format!("compare @IN @PACKED --plot @IN/{shard}"), "the input");
    refused(format!("compare @IN @PACKED --plot @PACKED/{shard}"), "the input");
    refused("compare @IN --format nf4 --plot @IN/config.json".into(), "is the input");
}

#[cfg(unix)]
#[test]
fn a_link_to_the_input_does_not_overwrite_it() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let input = input(&scratch);
    fs::create_dir(scratch.path("blobs")).unwrap();
    fs::rename(input.join("config.json"), scratch.path("blobs/1")).unwrap();
    symlink("../blobs/1", input.join("config.json")).unwrap();
    symlink("IN/config.json", scratch.path("link")).unwrap();
    symlink("OUT", scratch.path("to-output")).unwrap();
    let before = scratch.contents();
    for (json, part) in
        [("link", "is the input"), ("blobs/1", "is the input"), ("to-output", "the same file")]
    {
        let run = run_in(&scratch, &format!("quantize @IN --out @OUT --json @{json}"));
        assert!(run.code != Some(0) && run.stderr.contains(part), "{part}: {run:#?}");
        assert_eq!(before, scratch.contents());
    }
}

#[test]
fn a_report_in_the_folder_of_the_input_is_not_copied_with_it() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    run_in(&scratch, "quantize @IN --out @ONE").ok();
    run_in(&scratch, "quantize @IN --out @TWO --json @IN/x.json --report @IN/tokenizer/x.html").ok();
    assert_eq!(files(&scratch.path("ONE")), files(&scratch.path("TWO")));
    assert!(read_json(input.join("x.json"))["tensors"].is_array());
}

#[cfg(unix)]
#[test]
fn links_stay_and_their_targets_are_written() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let scratch = Scratch::new();
    input(&scratch);
    let old = scratch.write("elsewhere/old.json", "old");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o600)).unwrap();
    symlink("elsewhere/old.json", scratch.path("old")).unwrap();
    symlink("elsewhere/new.json", scratch.path("new")).unwrap();
    for (name, target) in [("old", "elsewhere/old.json"), ("new", "elsewhere/new.json")] {
        run_in(&scratch, &format!("quantize @IN --dry-run --json @{name}")).ok();
        assert_eq!(fs::read_link(scratch.path(name)).unwrap(), Path::new(target));
        assert!(read_json(scratch.path(target))["tensors"].is_array());
    }
    assert_eq!(fs::metadata(&old).unwrap().permissions().mode() & 0o777, 0o600);
}

#[cfg(target_os = "linux")]
#[test]
fn pipes_and_devices_are_written_to() {
    use std::os::unix::fs::FileTypeExt;
    use std::process::Command;
    let scratch = Scratch::new();
    input(&scratch);
    let pipe = scratch.path("pipe");
    microscale_test_support::make_pipe(&pipe);
    let reader = Command::new("cat").arg(&pipe).stdout(std::process::Stdio::piped()).spawn().unwrap();
    run_in(&scratch, "quantize @IN --dry-run --json @pipe").ok();
    let read = reader.wait_with_output().unwrap().stdout;
    assert!(serde_json::from_slice::<serde_json::Value>(&read).unwrap()["tensors"].is_array());
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());

    // A pipe without a path, as shells make for `>(cat)`.
    let mut shell = Command::new("bash");
    let program = microscale_test_support::command(&[]).get_program().to_os_string();
    let script = r#"exec "$0" quantize "$1" --dry-run --json >(cat > "$2")"#;
    shell.args(["-c", script]).arg(program).arg(scratch.path("IN")).arg(scratch.path("got"));
    assert!(shell.stdout(std::process::Stdio::null()).status().unwrap().success());
    let complete = || serde_json::from_slice::<serde_json::Value>(&fs::read(scratch.path("got")).ok()?).ok();
    let since = std::time::Instant::now();
    while complete().is_none() {
        assert!(since.elapsed().as_secs() < 20, "the pipe was not written to");
        std::thread::yield_now();
    }

    // A device in the user's own folder, where it could be replaced, as root could replace
    // /dev/null.
    let null = scratch.path("null");
    let made = Command::new("mknod").args([null.to_str().unwrap(), "c", "1", "3"]).output().unwrap();
    let null = if made.status.success() && fs::read(&null).is_ok() { "@null" } else { "/dev/null" };
    let line = format!("quantize @IN --out @OUT --json {null} --report {null}");
    run_in(&scratch, &line).ok();
    let path = null.strip_prefix('@').map_or("/dev/null".into(), |name| scratch.path(name));
    assert!(fs::metadata(path).unwrap().file_type().is_char_device());

    // Stdout is a file: JSON and table follow each other.
    let both = scratch.path("both");
    let mut command = command(&[&"quantize", &scratch.path("IN"), &"--dry-run", &"--json", &"/dev/stdout"]);
    assert!(command.stdout(fs::File::create(&both).unwrap()).status().unwrap().success());
    let both = fs::read_to_string(both).unwrap();
    let (json, table) = both.split_once("\n}\n").unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&format!("{json}}}")).unwrap()["tensors"].is_array());
    assert!(table.contains("model.layers.0"), "{table}");
}

#[cfg(unix)]
#[test]
fn links_out_of_a_checkpoint_get_a_warning() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let input = input(&scratch);
    scratch.write("secret", "key");
    symlink("../secret", input.join("tokenizer.json")).unwrap();
    symlink("tokenizer/vocab.txt", input.join("inside.txt")).unwrap();
    run_in(&scratch, "quantize @IN --out @PARTS --part 1/1").ok();
    for line in ["quantize @IN --out @A", "merge @IN --out @PARTS"] {
        let told = run_in(&scratch, line);
        assert!(
            told.stderr.contains("tokenizer.json is a link to a file outside of the checkpoint"),
            "{told:#?}"
        );
        assert!(told.stderr.contains("secret") && !told.stderr.contains("inside.txt"), "{told:#?}");
        told.ok();
    }
    let quiet = run_in(&scratch, "quantize @IN --out @B --follow-links");
    assert_eq!(quiet.stderr, "");
    quiet.ok();
    assert_eq!(files(&scratch.path("A")), files(&scratch.path("B")));
}
