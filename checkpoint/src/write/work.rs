//! The trait of the operations that write a checkpoint: quantizing, dequantizing and converting.

use std::collections::HashMap;

use crate::error::Result;
use crate::gguf::metadata::FileType;
use crate::pipeline::Worker;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::write::job::Job;
use crate::write::sink::Sink;

/// An operation that writes a checkpoint anew. Several threads call it at once.
pub(crate) trait Rewrite: Sync {
    /// The plan of a tensor.
    type Plan: Sync;
    /// The outcome of a tensor.
    type Outcome: Send;

    /// The input.
    fn checkpoint(&self) -> &Checkpoint;

    /// The jobs, in the order of the files. A tensor without a job is written with another.
    fn jobs(&self) -> &[Job<'_, Self::Plan>];

    /// Bytes that a job's values take in the memory of a device.
    fn device_bytes(&self, job: &Job<'_, Self::Plan>) -> usize {
        job.tensor.data.len()
    }

    /// The number of the fused layer that a job belongs to. The jobs of a layer that are in the
    /// same shard are carried out together.
    fn layer(&self, _job: &Job<'_, Self::Plan>) -> Option<usize> {
        None
    }

    /// Carries out the jobs of a unit, `jobs()[unit[0]]` first, each into its sink.
    fn write<'env>(
        &'env self,
        unit: &[usize],
        worker: &Worker<'_, 'env>,
        sinks: &[Sink],
    ) -> Result<Vec<Self::Outcome>>;

    /// The type of most weights that the metadata of a GGUF file gives; `None` to leave it
    /// unchanged.
    fn file_type(&self) -> Option<FileType>;

    /// Updates the description of the weights in the checkpoint's directory.
    fn describe(&self, description: &mut Description);
}

/// The new names of tensors.
#[derive(Debug, Default)]
pub(crate) struct Renamed {
    /// The names that took each one's place.
    pub(crate) names: HashMap<String, Vec<String>>,
    /// Bytes of the renamed tensors.
    pub(crate) bytes: u64,
}

impl Renamed {
    /// Adds the names of another shard.
    pub(crate) fn extend(&mut self, other: Self) {
        self.names.extend(other.names);
        self.bytes += other.bytes;
    }
}
