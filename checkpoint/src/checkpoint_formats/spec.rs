//! A checkpoint format: how it stores formats, and functions for what no table can say.

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::storage::Storage;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;

/// A checkpoint format.
pub(crate) struct FormatSpec {
    pub(crate) name: CheckpointFormat,
    /// True if it is written, and not only read.
    pub(crate) written: bool,
    /// The storage of each format that it has.
    pub(crate) stored: &'static [Storage],
    /// Says in the JSON files of a checkpoint how its layers are stored, the largest group first, and which
    /// linear layers are not quantized. There is one group at least.
    pub(crate) describe: fn(&[Group], &[String], &mut Description),
    /// True if a config that names this method is of the convention.
    pub(crate) is_method: fn(&str) -> bool,
    /// The reason why the codes and scales of a tensor of this name alone would be the wrong weights, if they
    /// would.
    pub(crate) rescaled: fn(&Checkpoint, &str) -> Option<String>,
    /// The reason why codes that no [`Storage`] fits cannot be read, if they look like some of the
    /// convention's.
    pub(crate) unreadable: fn(&Checkpoint, &Tensor<'_>) -> Option<String>,
}

impl FormatSpec {
    /// One that has nothing to say beyond tables.
    pub(crate) const fn new(name: CheckpointFormat, stored: &'static [Storage]) -> Self {
        Self {
            name,
            written: true,
            stored,
            describe: |_, _, _| {},
            is_method: |_| false,
            rescaled: |_, _| None,
            unreadable: |_, _| None,
        }
    }
}
