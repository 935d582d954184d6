//! Memory: every operation takes at most the stored bytes of a tensor and 512 MB.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use half::bf16;
use microscale_test_support::{Arg, Run, Scratch, command, header, program, raw_file};

use super::noise;

/// Maximum memory in addition to the stored bytes.
const BESIDE: u64 = 512 << 20;

/// Period of the values of a large tensor, in elements.
const PERIOD: usize = 1 << 20;

/// Writes a file with one tensor of bf16, 400 MB.
fn large(path: &Path, name: &str, shape: [usize; 3]) {
    let values = noise(PERIOD);
    let bytes: Vec<u8> = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    let periods = shape.iter().product::<usize>() / PERIOD;
    let end = (periods * bytes.len()).to_string();
    let text = header(&[(name, "BF16", &format!("{shape:?}"), "0", &end)]);
    let mut file = File::create(path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    (0..periods).for_each(|_| file.write_all(&bytes).unwrap());
}

/// Runs the program, and asserts that its peak memory is at most the files' bytes and 512 MB.
fn within(files: &[&Path], args: &[Arg<'_>]) {
    let stored: u64 = files.iter().map(|file| fs::metadata(file).unwrap().len()).sum();
    let mut command = command(args);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let ended = loop {
        // The kernel reports the peak only until the process ends.
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
        peak = peak.max(kilobytes.map_or(0, |number| number.parse::<u64>().unwrap() << 10));
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        sleep(Duration::from_millis(2));
    };
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(ended.success(), "{command:?}: {errors}");
    assert!(peak > 1 << 20, "{command:?}: no peak was seen");
    assert!(peak <= stored + BESIDE, "{command:?}: {peak} bytes in memory, of files with {stored}");
}

#[test]
#[ignore = "works on 400 MB: .ci/long does it, or cargo test-all"]
fn one_tensor_takes_its_bytes_and_little_more() {
    let scratch = Scratch::new();
    let [input, output, other, floats, report] =
        ["in", "out", "other", "floats", "report"].map(|name| scratch.path(format!("{name}.safetensors")));
    large(&input, "a.weight", [1, 12288, 16384]);
    within(&[&input], &[&"quantize", &input, &"--out", &output, &"--format", &"nvfp4", &"--report", &report]);
    within(&[&output], &[&"inspect", &output]);
    within(&[&output], &[&"doctor", &output]);
    within(&[&input, &output], &[&"doctor", &output, &"--against", &input]);
    within(&[&input, &output], &[&"compare", &input, &output]);
    within(&[&input], &[&"compare", &input, &"--format", &"nvfp4"]);
    within(&[&output], &[&"convert", &output, &"--to", &"modelopt", &"--out", &other]);
    within(&[&output], &[&"dequantize", &output, &"--dtype", &"f32", &"--out", &floats]);

    // All bands have the same result.
    let codes = fs::read(&output).unwrap();
    let codes = &codes[codes.len() - 12288 * 16384 / 2..];
    let first = &codes[..PERIOD / 2];
    assert!(codes.chunks(PERIOD / 2).all(|period| period == first), "the codes of some period differ");
    assert!(first.iter().any(|byte| *byte != first[0]));
}

#[test]
#[ignore = "works on 400 MB: .ci/long does it, or cargo test-all"]
fn transposes_take_little_more_too() {
    let scratch = Scratch::new();
    let [input, output] = ["in", "out"].map(|name| scratch.path(format!("{name}.safetensors")));
    large(&input, "model.layers.0.mlp.experts.down_proj", [2, 8192, 12288]);
    let gpt_oss = ["--to", "gpt-oss"];
    within(&[&input], &[&"quantize", &input, &"--out", &output, &gpt_oss[0], &gpt_oss[1]]);
    within(&[&input, &output], &[&"compare", &input, &output]);
    within(&[&input, &output], &[&"doctor", &output, &"--against", &input]);
}

#[test]
#[ignore = "works on 200 MB: .ci/long does it, or cargo test-all"]
fn codes_of_eight_bits_take_little_more_too() {
    let scratch = Scratch::new();
    let [input, output, kept] = ["in", "out", "kept"].map(|name| scratch.path(format!("{name}.safetensors")));
    let (rows, cols) = (12288usize, 16384usize);
    let codes: Vec<u8> = (0..PERIOD).map(|i| (i * 53 % 127) as u8 | (i % 3 / 2 * 0x80) as u8).collect();
    let scales = (0..rows / 128 * cols / 128).map(|i| 1e-3 * (1 + i % 7) as f32);
    let scales: Vec<u8> = scales.flat_map(f32::to_le_bytes).collect();
    let (end, all) = (rows * cols, rows * cols + scales.len());
    let grid = format!("[{},{}]", rows / 128, cols / 128);
    let text = header(&[
        ("a.weight", "F8_E4M3", &format!("[{rows},{cols}]"), "0", &end.to_string()),
        ("a.weight_scale_inv", "F32", &grid, &end.to_string(), &all.to_string()),
    ]);
    let mut file = File::create(&input).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    (0..end / PERIOD).for_each(|_| file.write_all(&codes).unwrap());
    file.write_all(&scales).unwrap();
    within(&[&input], &[&"quantize", &input, &"--out", &output, &"--format", &"nvfp4"]);
    within(&[&input], &[&"dequantize", &input, &"--out", &kept]);
    within(&[&input, &output], &[&"compare", &input, &output]);
    within(&[&input, &output], &[&"doctor", &output, &"--against", &input]);
}

#[test]
fn memory_that_cannot_be_had_is_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    // Rows are not divided, and one has 64 million elements. The file is sparse.
    let text = header(&[("a.weight", "BF16", "[2,67108864]", "0", "268435456")]);
    let input = scratch.write("in.safetensors", raw_file(text, &[]));
    let written = fs::metadata(&input).unwrap().len();
    File::options().write(true).open(&input).unwrap().set_len(written + 268_435_456).unwrap();
    let before = scratch.contents().into_keys().collect::<Vec<_>>();
    let out = scratch.path("out.safetensors");
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -v 1250000; exec \"$0\" \"$@\""]).arg(program());
    limited.args(["quantize", "--device", "cpu"]).arg(&input).arg("--out").arg(&out);
    limited.env("RAYON_NUM_THREADS", "2");
    Run::new(limited).fails_with(&["in.safetensors: tensor a.weight needs 1280 MiB of memory", "ulimit -v"]);
    assert_eq!(scratch.contents().into_keys().collect::<Vec<_>>(), before, "nothing is left");
}

/// Writes a model of many small tensors: experts of 90 layers.
fn many(path: &Path) {
    let (values, bytes) = (noise(16 * 32), 2 * 16 * 32);
    let data: Vec<u8> = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    let names = (0..90 * 256).flat_map(|expert| {
        let (layer, expert) = (expert / 256, expert % 256);
        ["gate_proj", "up_proj", "down_proj"]
            .map(|part| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight"))
    });
    let entries = names.enumerate().map(|(number, name)| {
        let (start, end) = (number * bytes, (number + 1) * bytes);
        format!("\"{name}\":{{\"dtype\":\"BF16\",\"shape\":[16,32],\"data_offsets\":[{start},{end}]}}")
    });
    let text = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut file = File::create(path).unwrap();
    file.write_all(&(text.len() as u64).to_le_bytes()).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    (0..90 * 256 * 3).for_each(|_| file.write_all(&data).unwrap());
}

#[test]
#[ignore = "quantizes 69,120 tensors: .ci/long does it, or cargo test-all"]
fn many_tensors_stay_within_the_memory_of_one() {
    let scratch = Scratch::new();
    let (input, out) = (scratch.path("in.safetensors"), scratch.path("out.safetensors"));
    many(&input);
    let (json, report) = (scratch.path("facts.json"), scratch.path("report.html"));
    let quantize: [Arg<'_>; 10] =
        [&"quantize", &input, &"--format", &"nvfp4", &"--out", &out, &"--json", &json, &"--report", &report];
    within(&[&input], &quantize[..6]);
    fs::remove_file(&out).unwrap();
    within(&[&input], &quantize);
}
