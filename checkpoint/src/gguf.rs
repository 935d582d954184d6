//! GGUF, the container of ggml and llama.cpp: metadata, tensors, and blocks that contain their
//! scales.
//!
//! | file | contents |
//! |---|---|
//! | `format` | the numbers and keys of the container |
//! | `cursor`, `value`, `header` | reading: every count, length and offset is checked before its use |
//! | `metadata` | writing metadata: another file's, with some keys replaced |
//! | `scales` | the global scales that llama.cpp applies |
//! | `imatrix` | importance matrices in the format that preceded GGUF |
//! | `q8_0` | Q8_0 blocks, for tensors that are not quantized to four bits |
//! | `blocks` | conversion between our codes and scales and ggml's blocks |
//!
//! Versions 2 and 3, little-endian, are supported. Files that ggml refuses are refused here too. So
//! are strings and alignments larger than any use.

pub(crate) mod blocks;
mod cursor;
pub(crate) mod format;
pub(crate) mod header;
pub(crate) mod imatrix;
pub(crate) mod metadata;
pub(crate) mod q8_0;
pub(crate) mod scales;
pub(crate) mod value;

#[cfg(test)]
mod draft;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod hostile_tests;
