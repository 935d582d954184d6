//! Hostile input: the functions that the targets of `fuzz/` run on their bytes. `tests/tests/corpus.rs` runs
//! them on the kept inputs.
//!
//! A target takes any bytes. It must come back, whatever they are: with an error or a success inside, which
//! are both fine, without a panic, and with nothing written but where output was asked for. Some of them make
//! files of the bytes by a grammar, because raw bytes would seldom pass the first check.

mod checkpoints;
mod directory;
mod draw;
mod everything;
mod gguf;
mod imatrix;
mod packed;
mod parts;
mod ptx;
mod pytorch;
mod recipe;
mod safetensors;
mod tensors;

pub use checkpoints::HEADER_WORDS;

/// A target of the fuzzer, and what it does with an input.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its folder in `fuzz/corpus/`.
    pub name: &'static str,
    /// Goes through everything that reads such input.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "safetensors", run: safetensors::run },
    Target { name: "gguf", run: gguf::run },
    Target { name: "imatrix", run: imatrix::run },
    Target { name: "pytorch", run: pytorch::run },
    Target { name: "directory", run: directory::run },
    Target { name: "packed", run: packed::run },
    Target { name: "parts", run: parts::run },
    Target { name: "ptx", run: ptx::run },
    Target { name: "tensors", run: tensors::run },
    Target { name: "recipe", run: recipe::run },
];

/// Does what a target does.
///
/// # Panics
/// If there is no such target, and if the input shows a defect.
pub fn run(target: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|known| known.name == target);
    (found.unwrap_or_else(|| panic!("no target {target}")).run)(bytes);
}
