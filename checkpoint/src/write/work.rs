//! The work on each tensor of a checkpoint, in which quantizing, dequantizing and converting differ.

use std::collections::HashMap;

use microscale::Device;

use crate::error::Result;
use crate::gguf::metadata::FileType;
use crate::names::fused::Fused;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;
use crate::write::outline::Outline;
use crate::write::writer::Sink;

/// The operation on each tensor. Several workers call it at once.
pub(crate) trait Rewrite: Sync {
    /// The facts known of a tensor once it is written.
    type Done: Send;

    /// The input.
    fn checkpoint(&self) -> &Checkpoint;

    /// The tensors that take one's place. None, if they are written together with another.
    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline>;

    /// Bytes of a tensor's values where a device works on them.
    fn bytes(&self, tensor: &Tensor<'_>) -> usize {
        tensor.data.len()
    }

    /// The layer that a tensor is a part of, if its parts had better be on a device together. Where devices
    /// have memory of their own, the parts in a shard then are written together.
    fn layer(&self, _tensor: &Tensor<'_>) -> Option<Fused> {
        None
    }

    /// Writes what [`outlines`](Self::outlines) announced of one tensor, or of several of a layer.
    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Self::Done>>;

    /// The type of most weights that the metadata of a GGUF file gives; `None` to leave it unchanged.
    fn file_type(&self) -> Option<FileType>;

    /// Changes what the checkpoint's directory says about its weights.
    fn describe(&self, description: &mut Description);
}

/// The new names of tensors.
#[derive(Debug, Default)]
pub(crate) struct Renamed {
    /// The names that took each one's place.
    pub(crate) names: HashMap<String, Vec<String>>,
    /// Bytes of those, in all.
    pub(crate) bytes: u64,
}

impl Renamed {
    /// Takes those of another shard.
    pub(crate) fn extend(&mut self, other: Self) {
        self.names.extend(other.names);
        self.bytes += other.bytes;
    }
}
