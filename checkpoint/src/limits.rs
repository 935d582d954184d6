//! Limits on the input: far above real models, and low enough that an invalid file costs little.
//!
//! Limits specific to GGUF are in `gguf`. docs/limits.md lists the ones here.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::file::FileError;
use crate::error::{Error, Result};

/// Largest safetensors header, which is its library's limit, and largest JSON file, in bytes. The
/// largest real indexes have tens of megabytes.
pub(crate) const HEADER_BYTES: u64 = 100_000_000;

/// Most tensors in a file or an index. Models have a few hundred thousand in all files together.
pub(crate) const TENSORS: usize = 1 << 20;

/// Most metadata entries in a file. GGUF files have a few dozen, safetensors files fewer.
pub(crate) const METADATA_ENTRIES: u64 = 1 << 20;

/// Longest tensor name in bytes, because errors and tables repeat names. Real names have about
/// fifty.
pub(crate) const NAME_BYTES: usize = 1024;

/// Most dimensions of a tensor: PyTorch's limit. Weights have up to five.
pub(crate) const DIMENSIONS: usize = 64;

/// Longest pickle in a PyTorch file, in bytes. Pickles have about a hundred bytes per tensor.
pub(crate) const PICKLE_BYTES: u64 = 1 << 25;

/// Most values, memo entries and open marks of a pickle, of up to about 40 bytes each. Pickles have
/// about 25 per tensor.
pub(crate) const PICKLE_VALUES: usize = 1 << 23;

/// Most sizes of all tensors in a PyTorch file together. Pickles may share them. Tensors have up to
/// five.
pub(crate) const SIZES: usize = 1 << 24;

/// Most bytes of all tensors in a PyTorch file, in multiples of the file's size. Tensors may share
/// storages. Tied weights reach twice the file's size.
pub(crate) const SHARED: u64 = 16;

/// Most patterns in a config's list of layers, and their bytes. Lists have up to a few hundred.
/// Plain names are not limited.
pub(crate) const CONFIG_PATTERNS: usize = 1 << 11;
pub(crate) const CONFIG_PATTERN_BYTES: usize = 1 << 17;

/// Longest recipe in bytes. Recipes have a few dozen lines.
pub(crate) const RECIPE_BYTES: u64 = 1 << 20;

/// Returns a message if a name is too long.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.len() <= NAME_BYTES {
        return Ok(());
    }
    let (start, bytes) = (name.chars().take(20).collect::<String>(), name.len());
    Err(format!("the name {start:?}… has {bytes} bytes, more than the {NAME_BYTES} allowed"))
}

/// Returns a message if there are too many tensors.
pub(crate) fn check_tensors(tensors: usize) -> Result<(), String> {
    let more = || format!("it has more than the {TENSORS} tensors allowed");
    if tensors <= TENSORS { Ok(()) } else { Err(more()) }
}

/// Returns a message if a tensor has too many dimensions.
pub(crate) fn check_dimensions(dimensions: usize) -> Result<(), String> {
    let more = || format!("it has {dimensions} dimensions, more than the {DIMENSIONS} allowed");
    if dimensions <= DIMENSIONS { Ok(()) } else { Err(more()) }
}

/// Reads the text of a recipe, which may come from a pipe.
///
/// # Errors
/// [`FileError::TooLong`](crate::FileError::TooLong) if it exceeds [`RECIPE_BYTES`], and
/// [`Error::Io`] if the file cannot be read as UTF-8 text.
pub(crate) fn read_recipe(path: &Path) -> Result<String> {
    let mut text = String::new();
    let file = File::open(path).map_err(Error::io("read", path))?;
    let read = file.take(RECIPE_BYTES + 1).read_to_string(&mut text).map_err(Error::io("read", path))?;
    if read as u64 > RECIPE_BYTES {
        let (file, most) = (path.into(), RECIPE_BYTES);
        return Err(Error::File(FileError::TooLong { file, what: "a recipe", most }));
    }
    Ok(text)
}
