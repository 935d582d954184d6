//! Quantizing in parts: together they equal the output of one run, and faulty parts are detected.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use microscale_test_support::{Run, Scratch, command, run, sample};
use safetensors::tensor::Dtype;

use super::{floats, noise, quantize, read_json};

const OPTIONS: [&str; 4] = ["--format", "nvfp4", "--search", "window"];

/// Writes seven shards of different sizes. Fused layers are in different shards.
pub(crate) fn input(scratch: &Scratch) -> PathBuf {
    let mut entries = Vec::new();
    for shard in 0..7usize {
        let (rows, file) = (8 << (shard % 3), &*format!("model-{shard}-of-7.safetensors").leak());
        let part = ["q_proj", "k_proj", "v_proj"][shard % 3];
        let name = &*format!("model.layers.{}.self_attn.{part}.weight", shard / 3).leak();
        let norm = &*format!("model.layers.{shard}.norm.weight").leak();
        scratch.write_tensors(
            format!("IN/{file}"),
            &[
                (name, Dtype::F32, vec![rows, 64], floats(&noise(rows * 64 + shard)[shard..])),
                (norm, Dtype::F32, vec![16], floats(&noise(16))),
            ],
        );
        entries.extend([(name, file), (norm, file)]);
    }
    scratch.write("IN/config.json", r#"{"architectures": ["LlamaForCausalLM"]}"#);
    scratch.write("IN/tokenizer/vocab.txt", "a b c");
    let entries: Vec<(&str, &str)> =
        entries.into_iter().map(|(name, file)| (name as &str, file as &str)).collect();
    scratch.write_index("IN", &entries);
    scratch.path("IN")
}

/// Returns the bytes of every file below a directory.
pub(crate) fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut open) = (BTreeMap::new(), vec![root.to_path_buf()]);
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.insert(path.strip_prefix(root).unwrap().into(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Returns the command of a part.
fn part(scratch: &Scratch, input: &Path, part: &str, more: &[&str]) -> std::process::Command {
    let mut command = command(&[&"quantize", &input, &"--out", &scratch.path("OUT"), &"--part", &part]);
    command.args(more);
    command
}

fn merge(scratch: &Scratch, input: &Path) -> Run {
    run(&[&"merge", &input, &"--out", &scratch.path("OUT")])
}

#[test]
fn parts_that_run_at_once_make_what_one_run_makes() {
    for n in [1, 3, 9] {
        let scratch = Scratch::new();
        let input = input(&scratch);
        quantize(&scratch, &input, "ONE", &OPTIONS).ok();
        let parts = (1..=n).map(|i| {
            part(&scratch, &input, &format!("{i}/{n}"), &OPTIONS).stdout(Stdio::null()).spawn().unwrap()
        });
        for mut part in parts.collect::<Vec<Child>>() {
            assert!(part.wait().unwrap().success());
        }
        assert!(!scratch.path("OUT").exists());
        let text =
            run(&[&"merge", &input, &"--out", &scratch.path("OUT"), &"--json", &scratch.path("J")]).ok();
        assert!(text.contains("7 shards") && text.contains("14 tensors"), "{text}");
        assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")), "{n} parts");
        assert_eq!(read_json(scratch.path("J"))["tensors"].as_array().unwrap().len(), 14);
        assert!(!scratch.path("OUT.parts").exists());
    }
    // A checkpoint of one file has one part with all the work.
    let scratch = Scratch::new();
    let one =
        scratch.write_tensors("x.safetensors", &[("a.weight", Dtype::F32, vec![2, 32], floats(&noise(64)))]);
    quantize(&scratch, &one, "ONE", &[]).ok();
    for i in ["1/2", "2/2"] {
        Run::new(part(&scratch, &one, i, &[])).ok();
    }
    merge(&scratch, &one).ok();
    assert_eq!(fs::read(scratch.path("OUT")).unwrap(), fs::read(scratch.path("ONE")).unwrap());
}

/// The order does not depend on which shard is complete first.
#[test]
fn a_part_reports_tensors_in_file_order() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    let [one, all] = ["one.json", "all.json"].map(|name| scratch.path(name));
    quantize(&scratch, &input, "ONE", &["--json", one.to_str().unwrap()]).ok();
    Run::new(part(&scratch, &input, "1/1", &["--json", all.to_str().unwrap()])).ok();
    let names = |json: PathBuf| {
        let json = read_json(json);
        let tensors = json["tensors"].as_array().unwrap().iter();
        tensors.map(|tensor| tensor["name"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(one), names(all));
}

#[test]
fn missing_and_incomplete_parts_are_made_again() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    quantize(&scratch, &input, "ONE", &OPTIONS).ok();
    let again = |i: &str| Run::new(part(&scratch, &input, i, &OPTIONS)).ok();
    assert!(again("1/2").contains("part    1 of 2: "));
    let refused = merge(&scratch, &input);
    refused.fails_with(&["of 7 shards are not in", "OUT.parts", "run the parts again"]);
    let text = again("2/2");
    assert!(text.contains("microscale merge") && text.contains("kept 0 of 7"), "{text}");
    assert!(again("1/1").contains("made 0 and kept 7 of 7 shards"));

    // Merge detects a changed byte, a truncated shard and a missing note, and the part is made
    // again.
    let shard = scratch.path("OUT.parts/model-3-of-7.safetensors");
    let spoilt: [&dyn Fn(); 3] = [
        &|| {
            let mut bytes = fs::read(&shard).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&shard, bytes).unwrap();
        },
        &|| fs::write(&shard, &fs::read(&shard).unwrap()[..100]).unwrap(),
        &|| fs::remove_file(scratch.path("OUT.parts/model-3-of-7.safetensors.note.json")).unwrap(),
    ];
    for spoil in spoilt {
        spoil();
        merge(&scratch, &input).fails_with(&["1 of 7 shards", "model-3-of-7.safetensors"]);
        assert!(!scratch.path("OUT").exists());
        assert!(again("1/1").contains("made 1 and kept 6 of 7 shards"));
    }
    merge(&scratch, &input).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
    merge(&scratch, &input).fails_with(&["OUT exists"]);
}

#[test]
fn parts_of_different_plans_are_not_mixed() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    Run::new(part(&scratch, &input, "1/2", &OPTIONS)).ok();
    Run::new(part(&scratch, &input, "2/2", &["--format", "nvfp4"])).ok();
    merge(&scratch, &input).fails_with(&["different options", "OUT.parts"]);
    // The same options make them again.
    Run::new(part(&scratch, &input, "2/2", &OPTIONS)).ok();
    merge(&scratch, &input).ok();
    assert!(scratch.path("OUT/config.json").exists());
}

#[test]
fn a_part_that_is_killed_leaves_nothing_that_counts() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    quantize(&scratch, &input, "ONE", &OPTIONS).ok();
    for wait in 0..25u64 {
        let mut child = part(&scratch, &input, "1/1", &OPTIONS).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait * 2));
        child.kill().unwrap();
        child.wait().unwrap();
        if let Some(finished) = merge_if_complete(&scratch, &input) {
            assert_eq!(finished, files(&scratch.path("ONE")));
            fs::remove_dir_all(scratch.path("OUT")).unwrap();
        }
        assert!(!scratch.path("OUT").exists());
    }
    Run::new(part(&scratch, &input, "1/1", &OPTIONS)).ok();
    merge(&scratch, &input).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
}

/// Merges the parts. Returns `None` if `merge` refuses.
fn merge_if_complete(scratch: &Scratch, input: &Path) -> Option<BTreeMap<PathBuf, Vec<u8>>> {
    let merged = merge(scratch, input);
    if merged.code == Some(0) {
        return Some(files(&scratch.path("OUT")));
    }
    merged.fails_with(&["shards are not in"]);
    None
}

/// A merge takes exactly the files that it checked. scripts/outputs/merge_races.py runs longer.
#[test]
fn merging_while_parts_are_made_again_mixes_nothing() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let scratch = Scratch::new();
    let input = input(&scratch);
    let options = [["--format", "mxfp4"], ["--format", "nvfp4"]];
    let wholes = options.map(|options| {
        quantize(&scratch, &input, options[1], &options).ok();
        files(&scratch.path(options[1]))
    });
    let stop = AtomicBool::new(false);
    let again = |part_of: &str, first: usize| {
        for turn in first.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // Refused if an output exists.
            Run::new(part(&scratch, &input, part_of, &options[turn % 2]));
        }
    };
    let (merged, mixed, failed) = std::thread::scope(|scope| {
        scope.spawn(|| again("1/2", 0));
        scope.spawn(|| again("2/2", 1));
        let start = std::time::Instant::now();
        let (mut merged, mut mixed, mut failed) = (0, 0, 0);
        for tried in 0.. {
            if (tried >= 100 && merged > 0) || start.elapsed().as_secs() > 60 {
                break;
            }
            if merge(&scratch, &input).code == Some(0) {
                merged += 1;
                mixed += usize::from(!wholes.contains(&files(&scratch.path("OUT"))));
                fs::remove_dir_all(scratch.path("OUT")).unwrap();
            }
            if scratch.path("OUT").exists() {
                failed += 1;
                fs::remove_dir_all(scratch.path("OUT")).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
        (merged, mixed, failed)
    });
    assert!(merged > 0, "no merge came between");
    assert_eq!((mixed, failed), (0, 0), "outputs of both options; failures with a complete output");
}

/// One path is relative, another absolute: machines may mount the input at different paths.
#[test]
fn parts_may_know_the_input_by_different_paths() {
    let scratch = Scratch::new();
    let input = input(&scratch);
    quantize(&scratch, &input, "ONE", &OPTIONS).ok();
    Run::new(part(&scratch, &input, "1/2", &OPTIONS)).ok();
    let mut relative = part(&scratch, Path::new("IN"), "2/2", &OPTIONS);
    relative.current_dir(scratch.path(""));
    Run::new(relative).ok();
    merge(&scratch, &input).ok();
    assert_eq!(files(&scratch.path("OUT")), files(&scratch.path("ONE")));
}

/// Another user may merge, so notes have the permissions of shards.
#[cfg(unix)]
#[test]
fn notes_have_the_mode_of_shards() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    let input = input(&scratch);
    Run::new(part(&scratch, &input, "1/1", &OPTIONS)).ok();
    let mode = |name: &str| {
        let file = scratch.path("OUT.parts").join(name);
        fs::metadata(file).unwrap().permissions().mode()
    };
    let shard = "model-3-of-7.safetensors";
    assert_eq!(mode(&format!("{shard}.note.json")), mode(shard));
    assert_eq!(mode(shard) & 0o400, 0o400);
}

#[test]
fn shards_may_have_names_as_long_as_the_system_allows() {
    let scratch = Scratch::new();
    let name = &*format!("{}.safetensors", "x".repeat(243)).leak();
    let tensor = ("a.weight", Dtype::F32, vec![2, 32], floats(&noise(64)));
    scratch.write_tensors(format!("IN/{name}"), &[tensor]);
    scratch.write_index("IN", &[("a.weight", name)]);
    Run::new(part(&scratch, &scratch.path("IN"), "1/1", &[])).ok();
    merge(&scratch, &scratch.path("IN")).ok();
    assert!(scratch.path("OUT").join(name).exists() && !scratch.path("OUT.parts").exists());
}

#[test]
fn invalid_part_numbers_are_usage_errors() {
    let scratch = Scratch::new();
    for wrong in ["0/2", "3/2", "1", "x/y"] {
        let refused = Run::new(part(&scratch, &sample(), wrong, &[]));
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains("I/N, where I goes from 1 to N"), "{refused:#?}");
    }
}
