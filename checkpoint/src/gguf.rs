//! GGUF, the container of ggml and llama.cpp: one file with metadata, tensors, and blocks that hold their
//! scales.
//!
//! | file | what it knows |
//! |---|---|
//! | `format` | the numbers and keys of the container |
//! | `cursor`, `value`, `header` | reading: every count, length and offset is checked before it is believed |
//! | `metadata` | the metadata of a file to be written: as it was |
//! | `scales` | the global scales that llama.cpp multiplies with |
//! | `imatrix` | importance matrices of the time before they were GGUF files too |
//! | `q8_0` | the values of another type, and its blocks, for what stays out of four bits |
//! | `blocks` | MXFP4 and NVFP4 between our codes and scales and ggml's blocks |
//!
//! Versions 2 and 3, little-endian. What ggml refuses is refused here too, and so is what would not be worth
//! its danger: strings and alignments beyond any use.

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
