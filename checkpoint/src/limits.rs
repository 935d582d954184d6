//! Limits on what is read: far above what any model has, and low enough that a file that lies costs little
//! memory and time. Those of GGUF itself are in `gguf`; docs/limits.md lists these.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::file::FileError;
use crate::error::{Error, Result};

/// The most bytes of a header of safetensors, which is its library's limit, and of a JSON file. The largest
/// indexes have some tens of megabytes.
pub(crate) const HEADER_BYTES: u64 = 100_000_000;

/// The most tensors of a file or an index. Models have a few hundred thousand in all their files.
pub(crate) const TENSORS: usize = 1 << 20;

/// The most entries of a file's metadata. GGUF files have a few dozen, and safetensors fewer.
pub(crate) const METADATA_ENTRIES: u64 = 1 << 20;

/// The most bytes of a tensor's name, which errors and tables repeat. Names have some fifty.
pub(crate) const NAME_BYTES: usize = 1024;

/// The most dimensions of a tensor, as many as PyTorch has. Weights have up to five.
pub(crate) const DIMENSIONS: usize = 64;

/// The most bytes of the pickle in a PyTorch file. Pickles have some hundred bytes a tensor.
pub(crate) const PICKLE_BYTES: u64 = 1 << 25;

/// The most values of a pickle, with the entries of its memo and its open marks, each of up to some 40 bytes. Pickles have some
/// 25 a tensor.
pub(crate) const PICKLE_VALUES: usize = 1 << 23;

/// The most sizes of all tensors of a PyTorch file, which may share them. Tensors have up to five.
pub(crate) const SIZES: usize = 1 << 24;

/// The most bytes of all tensors of a PyTorch file, of which several may share a storage, in sizes of the file. Tied weights
/// come to twice of it.
pub(crate) const SHARED: u64 = 16;

/// The most patterns of a config's list of layers, and their bytes in all. Lists have up to a few hundred. Names are not counted.
pub(crate) const CONFIG_PATTERNS: usize = 1 << 11;
pub(crate) const CONFIG_PATTERN_BYTES: usize = 1 << 17;

/// The most bytes of a recipe. Recipes have a few dozen lines.
pub(crate) const RECIPE_BYTES: u64 = 1 << 20;

/// Makes sure that a name has no more bytes than are allowed, or says so.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.len() <= NAME_BYTES {
        return Ok(());
    }
    let (start, bytes) = (name.chars().take(20).collect::<String>(), name.len());
    Err(format!("the name {start:?}… has {bytes} bytes, more than the {NAME_BYTES} allowed"))
}

/// Makes sure that there are no more tensors than are allowed, or says so.
pub(crate) fn check_tensors(tensors: usize) -> Result<(), String> {
    let more = || format!("it has more than the {TENSORS} tensors allowed");
    if tensors <= TENSORS { Ok(()) } else { Err(more()) }
}

/// Makes sure that a tensor has no more dimensions than are allowed, or says so.
pub(crate) fn check_dimensions(dimensions: usize) -> Result<(), String> {
    let more = || format!("it has {dimensions} dimensions, more than the {DIMENSIONS} allowed");
    if dimensions <= DIMENSIONS { Ok(()) } else { Err(more()) }
}

/// The text of a recipe, which may come from a pipe.
///
/// # Errors
/// [`FileError::TooLong`](crate::FileError::TooLong), [`Error::Io`].
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
