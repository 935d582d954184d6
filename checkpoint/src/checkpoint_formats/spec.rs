//! The description of a checkpoint format: facts in tables, and functions for the rest.

use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::layer_words::LayerWords;
use crate::read::shard::Shard;
use crate::read::tensor::Tensor;

/// A checkpoint format.
pub(crate) struct FormatSpec {
    pub(crate) name: CheckpointFormat,
    pub(crate) written: Written,
    /// One storage per format of tensors.
    pub(crate) stored: &'static [Storage],
    /// Further storages of its files, which are read-only.
    pub(crate) also_read: &'static [Storage],
    /// Writes to the JSON files of a checkpoint how its layers are stored, the largest group first,
    /// and which linear layers are not quantized. There is at least one group, unless `stored` is
    /// empty.
    pub(crate) describe: fn(&[Group], &[String], &mut Description),
    /// Returns whether a config with this method is of the checkpoint format.
    pub(crate) is_method: fn(&str) -> bool,
    /// Returns why the codes and scales of a tensor of this name are not the whole weight, if there
    /// is more to it.
    pub(crate) rescaled: fn(&Checkpoint, &str) -> Option<String>,
    /// Returns why codes that fit no [`Storage`] cannot be read, if they look like codes of this
    /// checkpoint format.
    pub(crate) unreadable: fn(&Checkpoint, &Tensor<'_>) -> Option<String>,
    /// Reads the words for the formats of layers, when a checkpoint is opened.
    pub(crate) read_metadata: fn(&[Shard]) -> Result<LayerWords>,
    /// Key of the metadata that has such words. It is not copied to outputs.
    pub(crate) metadata_key: Option<&'static str>,
}

impl FormatSpec {
    /// Creates a description with nothing but the table of storages.
    pub(crate) const fn new(name: CheckpointFormat, stored: &'static [Storage]) -> Self {
        Self {
            name,
            written: Written::Yes,
            stored,
            also_read: &[],
            describe: |_, _, _| {},
            is_method: |_| false,
            rescaled: |_, _| None,
            unreadable: |_, _| None,
            read_metadata: |_| Ok(LayerWords::new()),
            metadata_key: None,
        }
    }
}
