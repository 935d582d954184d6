//! Metadata for an output file: another file's, with some keys replaced.

use std::borrow::Cow;

#[cfg(test)]
use super::format::{ARCHITECTURE, DEFAULT_ALIGNMENT};
use super::format::{FILE_TYPE, QUANTIZATION_VERSION, SPLIT_TENSORS};
use super::header::Header;
use super::value::ValueType;

/// The type of most weights of a model, by llama.cpp's numbers. The tensor types have other
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum FileType {
    /// `ALL_F32`.
    F32 = 0,
    /// `MOSTLY_F16`.
    F16 = 1,
    /// `MOSTLY_BF16`.
    Bf16 = 32,
    /// `MOSTLY_MXFP4_MOE`.
    Mxfp4 = 38,
    /// `MOSTLY_NVFP4`.
    Nvfp4 = 39,
}

/// ggml's version of the quantized types. Files with quantized tensors must have it.
const VERSION_OF_QUANTIZED: u32 = 2;

/// Metadata to write, in order.
#[derive(Clone, Debug)]
pub(crate) struct Metadata<'a> {
    pub(crate) alignment: u64,
    pub(crate) entries: Vec<RawEntry<'a>>,
}

#[derive(Clone, Debug)]
pub(crate) struct RawEntry<'a> {
    key: &'a str,
    /// The bytes of key, type and value as in a file.
    pub(crate) raw: Cow<'a, [u8]>,
}

impl<'a> Metadata<'a> {
    #[cfg(test)]
    /// The metadata of a model with a known architecture. llama.cpp loads no file without one.
    pub(crate) fn new(architecture: &str) -> Self {
        let mut new = Self { alignment: DEFAULT_ALIGNMENT, entries: Vec::new() };
        let length = (architecture.len() as u64).to_le_bytes();
        new.set(ARCHITECTURE, ValueType::String, &[&length, architecture.as_bytes()].concat());
        new
    }

    /// The metadata of another file, copied byte for byte.
    pub(crate) fn of(header: &'a Header, bytes: &'a [u8]) -> Self {
        let raw =
            |range: &std::ops::Range<usize>| Cow::Borrowed(bytes.get(range.clone()).unwrap_or_default());
        let entries = header.entries.iter().map(|entry| RawEntry { key: &entry.key, raw: raw(&entry.raw) });
        Self { alignment: header.alignment, entries: entries.collect() }
    }

    /// Sets the type that most weights are quantized to.
    pub(crate) fn set_file_type(&mut self, file_type: FileType) {
        self.set(FILE_TYPE, ValueType::U32, &(file_type as u32).to_le_bytes());
        self.set(QUANTIZATION_VERSION, ValueType::U32, &VERSION_OF_QUANTIZED.to_le_bytes());
    }

    /// Sets the total number of tensors in all files of a split model.
    pub(crate) fn set_split_tensors(&mut self, tensors: u64) {
        let tensors = i32::try_from(tensors).unwrap_or(i32::MAX);
        self.set(SPLIT_TENSORS, ValueType::I32, &tensors.to_le_bytes());
    }

    /// Replaces the value of a key, or appends the entry.
    fn set(&mut self, key: &'static str, kind: ValueType, value: &[u8]) {
        let length = (key.len() as u64).to_le_bytes();
        let raw = [&length, key.as_bytes(), &kind.id().to_le_bytes(), value].concat().into();
        match self.entries.iter_mut().find(|entry| entry.key == key) {
            Some(entry) => entry.raw = raw,
            None => self.entries.push(RawEntry { key, raw }),
        }
    }
}
