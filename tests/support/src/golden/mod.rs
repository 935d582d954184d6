//! Reads the files of `tests/golden`, which other libraries made. The README there describes them.

mod mx;
mod nvfp4;

use std::collections::HashMap;
use std::path::PathBuf;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::from_str;

use crate::data_dir;

pub use mx::{Block, Golden, Group};
pub use nvfp4::{Case, CaseBlock, Nvfp4};

/// Returns the folder of a format's files, or of the layouts.
pub fn folder(name: &str) -> PathBuf {
    data_dir().join("tests/golden").join(name)
}

/// Returns the names of a folder's files without extension, sorted.
///
/// # Panics
/// Panics if the folder is missing or contains another kind of file.
pub fn files(name: &str) -> Vec<String> {
    let folder = folder(name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|why| panic!("{}: {why}", folder.display()));
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .map(|file| file.strip_suffix(".safetensors").unwrap_or_else(|| panic!("what is {file}?")).to_owned())
        .collect();
    names.sort();
    names
}

/// Input or output values of a library.
#[derive(Debug)]
pub enum Input {
    /// binary32.
    F32(Vec<f32>),
    /// binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Input {
    /// Returns the type's name and the number of values.
    pub fn what(&self) -> (&'static str, usize) {
        match self {
            Self::F32(values) => ("f32", values.len()),
            Self::F16(values) => ("f16", values.len()),
            Self::Bf16(values) => ("bf16", values.len()),
        }
    }
}

/// A file: its metadata, and its tensors by name.
#[derive(Debug)]
pub struct Tensors {
    name: String,
    metadata: HashMap<String, String>,
    tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Tensors {
    /// Reads a file.
    ///
    /// # Panics
    /// Panics if the file is missing or is not a safetensors file. The other methods panic too if
    /// the file has unexpected contents.
    pub fn read(folder: &str, name: &str) -> Self {
        let path = self::folder(folder).join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let of = |view: safetensors::tensor::TensorView<'_>| {
            (view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        Self {
            name: name.to_owned(),
            metadata: header.metadata().clone().expect("metadata"),
            tensors: tensors.tensors().into_iter().map(|(name, view)| (name, of(view))).collect(),
        }
    }

    /// Returns the tensors' names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns whether the file has a tensor.
    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Returns an entry of the metadata.
    pub fn word(&self, key: &str) -> &str {
        self.metadata.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.name))
    }

    /// Parses a metadata entry as JSON.
    pub fn json<T: serde::de::DeserializeOwned>(&self, key: &str) -> T {
        from_str(self.word(key)).unwrap_or_else(|why| panic!("{}, {key}: {why}", self.name))
    }

    fn get(&self, tensor: &str) -> &(Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get(tensor).unwrap_or_else(|| panic!("{} has no {tensor}", self.name))
    }

    /// Returns a tensor's shape.
    pub fn shape(&self, tensor: &str) -> &[usize] {
        &self.get(tensor).1
    }

    /// Returns a tensor of bytes.
    pub fn bytes(&self, tensor: &str) -> &[u8] {
        let (dtype, _, bytes) = self.get(tensor);
        assert_eq!(*dtype, Dtype::U8, "{}, {tensor}", self.name);
        bytes
    }

    /// Returns a tensor of floats.
    pub fn input(&self, tensor: &str) -> Input {
        let (dtype, _, bytes) = self.get(tensor);
        match dtype {
            Dtype::F32 => Input::F32(words(bytes, f32::from_le_bytes)),
            Dtype::F16 => Input::F16(words(bytes, f16::from_le_bytes)),
            Dtype::BF16 => Input::Bf16(words(bytes, bf16::from_le_bytes)),
            other => panic!("{}, {tensor}: of {other:?}", self.name),
        }
    }

    /// Returns a tensor of f32.
    pub fn f32s(&self, tensor: &str) -> Vec<f32> {
        match self.input(tensor) {
            Input::F32(values) => values,
            other => panic!("{}, {tensor}: of {}", self.name, other.what().0),
        }
    }

    /// Returns a tensor of f64.
    pub fn f64s(&self, tensor: &str) -> Vec<f64> {
        let (dtype, _, bytes) = self.get(tensor);
        assert_eq!(*dtype, Dtype::F64, "{}, {tensor}", self.name);
        words(bytes, f64::from_le_bytes)
    }
}

/// Returns `ml_dtypes`' tables of a format.
pub fn tables(folder: &str) -> Tensors {
    Tensors::read(folder, "ml_dtypes-0.6.0-tables")
}

fn words<const N: usize, T>(bytes: &[u8], word: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (words, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "{} bytes are no whole words", bytes.len());
    words.iter().copied().map(word).collect()
}
