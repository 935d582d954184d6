//! Hostile input: the functions that the targets of `fuzz/` run on their bytes.
//!
//! `tests/tests/corpus.rs` runs them on the stored inputs. A target accepts any bytes and must
//! return, with either success or an error inside. It must not panic, and it may write only to its
//! output. Some targets build files from the bytes by a grammar, because raw bytes would rarely
//! pass the first check.

mod checkpoints;
mod directory;
mod draw;
mod everything;
mod gguf;
mod imatrix;
mod input_scales;
mod packed;
mod parts;
mod ptx;
mod pytorch;
mod recipe;
mod safetensors;
mod tensors;

pub use checkpoints::HEADER_WORDS;
pub use parts::note_text;

/// A fuzz target and its function.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and the name of its folder in `fuzz/corpus/`.
    pub name: &'static str,
    /// Calls every function that reads such input.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "safetensors", run: safetensors::run },
    Target { name: "gguf", run: gguf::run },
    Target { name: "imatrix", run: imatrix::run },
    Target { name: "input_scales", run: input_scales::run },
    Target { name: "pytorch", run: pytorch::run },
    Target { name: "directory", run: directory::run },
    Target { name: "packed", run: packed::run },
    Target { name: "parts", run: parts::run },
    Target { name: "ptx", run: ptx::run },
    Target { name: "tensors", run: tensors::run },
    Target { name: "recipe", run: recipe::run },
];

/// Runs a target.
///
/// # Panics
/// Panics if there is no such target, or if the input reveals a defect.
pub fn run(target: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|known| known.name == target);
    (found.unwrap_or_else(|| panic!("no target {target}")).run)(bytes);
}
