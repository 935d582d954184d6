//! Opening a checkpoint: its headers, then everything that checkpoint formats read of them.

use std::path::Path;

use crate::checkpoint_formats::comfyui::may_be_comfyui;
use crate::checkpoint_formats::table::FORMATS;
use crate::error::Result;
use crate::read::checkpoint::{Checkpoint, OpenOptions};

impl Checkpoint {
    /// Opens a `.safetensors`, `.gguf` or PyTorch file (`.bin`, `.pt`, `.pth`), or a checkpoint
    /// directory.
    ///
    /// The weights of a directory are the first of these that exist:
    /// - the files in `model.safetensors.index.json`
    /// - `model.safetensors`
    /// - all `.safetensors` files
    /// - all `.gguf` files
    /// - the files in `pytorch_model.bin.index.json`
    /// - `pytorch_model.bin`
    /// - all PyTorch files
    ///
    /// Output made from PyTorch files is safetensors.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io), or an error that names file and tensor if a header, the
    /// index, a JSON file or metadata are invalid, or if index and shards disagree.
    pub fn open(path: &Path) -> Result<Self> {
        let mut checkpoint = Self::read(path)?;
        for format in FORMATS {
            checkpoint.layer_words.extend((format.read_metadata)(&checkpoint.shards)?);
            checkpoint.metadata_keys.extend(format.metadata_key);
        }
        Ok(checkpoint)
    }

    /// Warnings about the checkpoint: an index that loaders read otherwise, and NVFP4 that may be
    /// another library's.
    pub fn warnings(&self) -> Vec<String> {
        self.index_warnings().into_iter().chain(may_be_comfyui(self)).collect()
    }

    /// [`Self::open`] with options.
    ///
    /// # Errors
    /// The errors of [`Self::open`]; with [`OpenOptions::split_experts`]
    /// [`FormatError::NotSplit`](crate::FormatError::NotSplit) if experts have biases, are
    /// quantized, or do not fit the config's `hidden_size`, and
    /// [`FormatError::NothingToSplit`](crate::FormatError::NothingToSplit) if there are none.
    pub fn open_with(path: &Path, options: OpenOptions) -> Result<Self> {
        let mut checkpoint = Self { options, ..Self::open(path)? };
        if options.split_experts {
            checkpoint.split_experts()?;
        }
        Ok(checkpoint)
    }
}
