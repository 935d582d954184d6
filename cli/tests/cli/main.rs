//! Tests of the program through its command line.

mod advice;
mod architectures;
mod checkpoint_formats;
mod comfyui;
mod comparison;
mod doctor;
mod exports;
mod fp8_pb_wo;
mod gguf;
mod gguf_loading;
mod global_scale;
mod hadamard;
mod imatrix;
mod input_scale;
mod interrupt;
mod loading;
mod manual;
mod measuring;
#[cfg(target_os = "linux")]
mod memory;
mod mixed;
#[cfg(feature = "models")]
mod models;
mod mxfp4_sources;
mod mxfp8;
mod nvfp4;
mod output_bytes;
mod output_dir;
mod output_paths;
mod packed;
mod parts;
mod plan;
mod pytorch;
mod recipes;
mod report;
mod reporting;
mod requantizing;
mod scaled;
#[cfg(target_os = "linux")]
mod scarce;
mod search;
#[cfg(unix)]
mod signals;
mod split_experts;
mod strays;
mod transforms;
mod typed;
mod usage_errors;
mod vanishing;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use microscale_test_support::{Run, Scratch, command};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;

/// Returns the tensors of a file or directory by name: dtype, shape, bytes, and their file.
pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>, String)>;

pub(crate) fn tensors(path: &Path) -> Tensors {
    let files: Vec<PathBuf> = if path.is_dir() {
        let files = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|extension| extension == "safetensors")).collect()
    } else {
        vec![path.into()]
    };
    let mut tensors = Tensors::new();
    for file in &files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let bytes = fs::read(file).unwrap();
        for (tensor, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let entry = (view.dtype(), view.shape().to_vec(), view.data().to_vec(), name.clone());
            assert!(tensors.insert(tensor, entry).is_none());
        }
    }
    tensors
}

pub(crate) fn read_json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap())
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn bf16s(bytes: &[u8]) -> Vec<bf16> {
    bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect()
}

pub(crate) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns values of both signs and many magnitudes, the same on every run.
pub(crate) fn noise(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.731).sin() * 2f32.powi(i as i32 % 11 - 5)).collect()
}

/// Runs `quantize INPUT --out OUT` with more arguments. OUT is in the scratch directory.
pub(crate) fn quantize(scratch: &Scratch, input: &Path, out: &str, more: &[&str]) -> Run {
    let mut command = command(&[&"quantize", &input, &"--out", &scratch.path(out)]);
    command.args(more);
    Run::new(command)
}

pub(crate) fn quantizable(name: &str) -> bool {
    name.contains("proj")
}
