//! Shared test support: locations of data, running the program, and scratch directories.

pub mod activations;
pub mod arithmetic;
pub mod cases;
pub mod epilogue;
pub mod golden;
pub mod hessians;
pub mod hostile;
pub mod inputs;
pub mod operands;
pub mod oracle;
pub mod order;
mod program;
mod scratch;
mod torch_file;
pub mod weights;

use std::path::PathBuf;

pub use program::{Arg, Run, command, program, run};
pub use scratch::{Scratch, TensorData, header, make_pipe, raw_file};
pub use torch_file::{TorchTensor, torch_file, torch_pickle};

/// Returns the folder with `sample/`, `tests/golden/` and `fuzz/corpus/`.
///
/// `MICROSCALE_TEST_DATA` names it for tests that run on another machine than they were built on.
/// The default is the repository's root.
pub fn data_dir() -> PathBuf {
    let root = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("MICROSCALE_TEST_DATA").map_or_else(root, PathBuf::from)
}

/// Returns the checkpoint that the repository contains.
pub fn sample() -> PathBuf {
    data_dir().join("sample/tiny-llama")
}

// Compiles the examples of the repository's README and of the library guide. A published crate must
// not include files from outside its folder.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct LibraryGuide;
