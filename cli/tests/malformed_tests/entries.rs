//! Directory entries that are not regular files: circular links, links to other directories, pipes
//! and devices. Reading them never blocks, and nothing is written through them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use microscale_test_support::{Scratch, make_pipe, run};

use super::{refused, sharded};

const INDEX: &str = "model.safetensors.index.json";

/// Writes a checkpoint in two shards.
fn good() -> Scratch {
    sharded(&[("a.weight", "one.safetensors"), ("b.weight", "two.safetensors")])
}

/// Writes a valid checkpoint and replaces one of its files.
fn with(name: &str, put: impl FnOnce(&Path)) -> Scratch {
    let scratch = good();
    let path = scratch.path("in").join(name);
    if path.exists() {
        fs::remove_file(&path).unwrap();
    }
    put(&path);
    scratch
}

/// Returns the files that `quantize` writes, and asserts that it reports each of `left` as left
/// out.
#[track_caller]
fn quantized(scratch: &Scratch, left: &[&str]) -> Vec<String> {
    let before = scratch.contents();
    let text = run(&[&"quantize", &scratch.path("in"), &"--out", &scratch.path("OUT")]).ok();
    assert!(left.iter().all(|left| text.contains(left)), "{text}");
    let mut after = scratch.contents();
    let out = scratch.path("OUT");
    let written = after.keys().filter_map(|path| path.strip_prefix(&out).ok());
    let written: Vec<_> = written.map(|path| path.to_str().unwrap().to_string()).collect();
    assert!(written.iter().all(|file| !out.join(file).is_symlink()), "{written:?}");
    after.retain(|path, _| !path.starts_with(&out));
    assert_eq!(before, after);
    written
}

#[cfg(target_os = "linux")]
#[test]
fn pipes_and_devices_do_not_block() {
    let puts: [&dyn Fn(&Path); 3] =
        [&|path| make_pipe(path), &|path| symlink("/dev/zero", path).unwrap(), &|path| {
            symlink("/dev/tty", path).unwrap()
        }];
    for put in puts {
        for name in [INDEX, "one.safetensors"] {
            let scratch = with(name, put);
            refused(&scratch, &scratch.path("in"), &[name, "not a regular file"]);
            refused(&scratch, &scratch.path("in").join(name), &[name, "not a regular file"]);
        }
        // Two candidates for the weights. One is not a file.
        let scratch = with("model.safetensors", put);
        refused(&scratch, &scratch.path("in"), &["model.safetensors", "both claim"]);
        fs::remove_file(scratch.path("in").join(INDEX)).unwrap();
        refused(&scratch, &scratch.path("in"), &["model.safetensors", "not a regular file"]);
        for name in ["config.json", "hf_quant_config.json", "tokenizer.json"] {
            let scratch = with(name, put);
            assert!(!quantized(&scratch, &[name]).contains(&name.to_string()));
        }
    }
}

#[test]
fn links_in_circles_end() {
    for (name, target) in
        [("self", "."), ("up", ".."), ("loop", "loop"), ("there", "back"), ("deep/up", "..")]
    {
        let scratch = good();
        fs::create_dir(scratch.path("in/deep")).unwrap();
        symlink("there", scratch.path("in/back")).unwrap();
        symlink(target, scratch.path("in").join(name)).unwrap();
        let written = quantized(&scratch, &[name]);
        assert!(!written.iter().any(|file| file.contains(name)), "{written:?}");
    }
    for name in [INDEX, "one.safetensors"] {
        let scratch = with(name, |path| symlink(name, path).unwrap());
        let before = scratch.contents();
        run(&[&"inspect", &scratch.path("in")]).fails_with(&[name]);
        run(&[&"quantize", &scratch.path("in"), &"--out", &scratch.path("OUT")]).fails_with(&[name]);
        assert_eq!(before, scratch.contents());
    }
    let scratch = with("config.json", |path| symlink("config.json", path).unwrap());
    quantized(&scratch, &["config.json"]);
}

/// Hugging Face's cache consists of such links. They are read, and the output has files in their
/// place.
#[test]
fn links_out_are_read_and_not_followed_when_writing() {
    let scratch = good();
    fs::create_dir(scratch.path("blobs")).unwrap();
    for name in ["one.safetensors", INDEX] {
        fs::rename(scratch.path("in").join(name), scratch.path("blobs").join(name)).unwrap();
        symlink(format!("../blobs/{name}"), scratch.path("in").join(name)).unwrap();
    }
    let written = quantized(&scratch, &[]);
    assert_eq!(written, ["", INDEX, "one.safetensors", "two.safetensors"]);

    // A link to a folder of shards: the output has a folder in its place.
    let scratch = sharded(&[("a.weight", "one.safetensors"), ("b.weight", "sub/two.safetensors")]);
    fs::create_dir(scratch.path("blobs")).unwrap();
    fs::rename(scratch.path("in/two.safetensors"), scratch.path("blobs/two.safetensors")).unwrap();
    symlink("../blobs", scratch.path("in/sub")).unwrap();
    assert!(quantized(&scratch, &[]).contains(&"sub/two.safetensors".to_string()));
}
