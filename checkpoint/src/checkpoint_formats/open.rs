//! Opening a checkpoint: its headers, then everything that checkpoint formats read of them.

use std::path::Path;

use crate::checkpoint_formats::table::FORMATS;
use crate::error::Result;
use crate::read::checkpoint::Checkpoint;

impl Checkpoint {
    /// Opens a `.safetensors`, `.gguf` or PyTorch file (`.bin`, `.pt`, `.pth`), or a checkpoint
    /// directory.
    ///
    /// The weights of a directory are the files in its index (`model.safetensors.index.json`), or
    /// else `model.safetensors`, all its `.safetensors` files, all its `.gguf` files, the files in
    /// `pytorch_model.bin.index.json`, `pytorch_model.bin`, or all its PyTorch files. PyTorch files
    /// are written as safetensors.
    ///
    /// # Errors
    /// Every defect of headers, index and metadata. Errors name the file and the tensor.
    pub fn open(path: &Path) -> Result<Self> {
        let mut checkpoint = Self::read(path)?;
        for format in FORMATS {
            checkpoint.layer_words.extend((format.read_metadata)(&checkpoint.shards)?);
        }
        Ok(checkpoint)
    }
}
