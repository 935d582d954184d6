//! Things that the tests share: the places of the data, running the program, and scratch directories.

pub mod cases;
pub mod epilogue;
pub mod golden;
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

/// The repository's root, which holds `sample/`, `tests/golden/` and `fuzz/corpus/`; or what
/// `MICROSCALE_TEST_DATA` names, for tests that run on another machine than they were built on.
pub fn data_dir() -> PathBuf {
    let root = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("MICROSCALE_TEST_DATA").map_or_else(root, PathBuf::from)
}

/// The checkpoint that is shipped with the repository.
pub fn sample() -> PathBuf {
    data_dir().join("sample/tiny-llama")
}

// The examples of the repository's README and of the guide to the library are compiled here, as no crate that
// is published may need a file outside of its folder.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/library.md")]
struct LibraryGuide;
