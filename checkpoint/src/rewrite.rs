//! Rewriting a checkpoint tensor by tensor: what quantizing, dequantizing and converting share. `workers` has who does it.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

use microscale::Device;

use crate::description::Description;
use crate::error::{Error, Result};
use crate::fused::Fused;
use crate::gguf::{self, FileType, Metadata};
use crate::output::Output;
use crate::read::{Checkpoint, Container, Shard, Tensor};
use crate::workers::{Job, write_shards};
use crate::write::{Outline, Sink, Writer};
use crate::{Skipped, json, others};

/// How far an operation is, in bytes of the input's tensors.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor that comes next; empty at the end.
    pub tensor: &'a str,
    /// Bytes that are done.
    pub done: u64,
    /// All bytes.
    pub total: u64,
}

/// Is told about progress before each tensor, and may break off: [`Error::Interrupted`].
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// What becomes of each tensor. Several workers ask at once.
pub(crate) trait Rewrite: Sync {
    /// What is known of a tensor once it is written.
    type Done: Send;

    /// The tensors that take one's place. None, if they are written together with another.
    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline>;

    /// The layer that a tensor is a part of, if its parts had better be on a device together. Where devices have memory
    /// of their own, the parts in a shard then are written together.
    fn layer(&self, _tensor: &Tensor<'_>) -> Option<Fused> {
        None
    }

    /// Writes what [`outlines`](Self::outlines) announced of one tensor, or of several of a layer.
    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Self::Done>>;

    /// What the metadata of a GGUF file says that most weights are; `None` if that stays.
    fn file_type(&self) -> Option<FileType>;

    /// Changes what the checkpoint's directory says about its weights.
    fn describe(&self, description: &mut Description);
}

/// The outline of a tensor that is copied.
pub(crate) fn unchanged(tensor: &Tensor<'_>) -> Outline {
    Outline { name: tensor.name.into(), dtype: tensor.dtype, shape: tensor.shape.into() }
}

/// Writes the checkpoint to `out`, all of it or nothing, and returns what became of its tensors, in their order, and
/// what was left behind.
pub(crate) fn rewrite<R: Rewrite>(
    checkpoint: &Checkpoint,
    out: &Path,
    work: &R,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<(Vec<R::Done>, Vec<Skipped>)> {
    let output = Output::create(checkpoint, out)?;
    let mut meter = Meter::new(checkpoint.tensors(), progress);
    // A shard may hold scales alone, which are written with their codes, in other shards: no index names it any more.
    let is_left = |shard: &&Shard| {
        checkpoint.index.is_none() || shard.tensors().any(|tensor| !work.outlines(&tensor).is_empty())
    };
    let left = checkpoint.shards.iter().filter(is_left);
    let jobs = left.map(|shard| Ok(Job { shard, path: output.place(&shard.name)? }));
    let jobs = jobs.collect::<Result<Vec<_>>>()?;
    let mut renamed = Renamed::default();
    let done = write_shards(&jobs, work, device, &mut meter, |_, names, _| {
        renamed.extend(names);
        Ok(())
    })?;
    meter.before("")?;
    let mut description = Description::of(checkpoint);
    work.describe(&mut description);
    let skipped = write_rest(checkpoint, &output, &renamed, &description, &mut meter)?;
    output.commit()?;
    Ok((done, skipped))
}

/// What became of tensors.
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

/// Creates a shard's file, which must not exist yet, and says what each tensor is called in it.
pub(crate) fn begin<R: Rewrite>(shard: &Shard, path: &Path, work: &R) -> Result<(Renamed, Writer)> {
    let (mut outlines, mut renamed) = (Vec::new(), Renamed::default());
    for tensor in shard.tensors() {
        let new = work.outlines(&tensor);
        renamed.bytes += new.iter().map(Outline::bytes).sum::<u64>();
        renamed.names.insert(tensor.name.into(), new.iter().map(|outline| outline.name.clone()).collect());
        outlines.extend(new);
    }
    Ok((renamed, create(shard, path, outlines, work.file_type())?))
}

/// Creates a file of the same container as a shard, with its metadata.
fn create(shard: &Shard, path: &Path, outlines: Vec<Outline>, file_type: Option<FileType>) -> Result<Writer> {
    let (header, bytes) = match &shard.container {
        Container::Safetensors(metadata) => {
            return Writer::safetensors(path, metadata.as_ref(), outlines);
        }
        Container::Gguf(header) => (header, shard.mapped_bytes()),
    };
    let mut metadata = Metadata::of(header, bytes);
    if let Some(file_type) = file_type {
        metadata.set_file_type(file_type);
    }
    let outlines = outlines.into_iter().map(|Outline { name, dtype, shape }| {
        let refused = |why| Error::NotInGguf { file: path.into(), tensor: name.clone(), why };
        let kind = dtype.ggml().ok_or_else(|| refused(format!("it has no type for {dtype}")))?;
        Ok(gguf::Outline { name, shape, kind })
    });
    gguf::create(path, &metadata, &outlines.collect::<Result<Vec<_>>>()?)
}

/// Writes everything but the shards, and returns what is left behind.
pub(crate) fn write_rest(
    checkpoint: &Checkpoint,
    output: &Output,
    renamed: &Renamed,
    description: &Description,
    meter: &mut Meter<'_, '_>,
) -> Result<Vec<Skipped>> {
    if let Some(index) = &checkpoint.index {
        let name = index.file.file_name().unwrap_or_default();
        json::write_object(&output.place(name.as_ref())?, &index.rewritten(&renamed.names, renamed.bytes))?;
    }
    if !checkpoint.directory {
        return Ok(Vec::new());
    }
    for (name, json) in description.files() {
        json::write_object(&output.place(name.as_ref())?, json)?;
    }
    let (files, skipped) = others::list(checkpoint)?;
    for file in files {
        others::copy(checkpoint, &file, output)?;
        meter.before("")?;
    }
    Ok(skipped)
}

/// Counts bytes, and asks whether to go on.
pub(crate) struct Meter<'a, 'b> {
    pub(crate) done: u64,
    total: u64,
    progress: &'a mut OnProgress<'b>,
}

impl<'a, 'b> Meter<'a, 'b> {
    /// For these tensors of the input.
    pub(crate) fn new<'t>(
        tensors: impl Iterator<Item = Tensor<'t>>,
        progress: &'a mut OnProgress<'b>,
    ) -> Self {
        Self { done: 0, total: tensors.map(|tensor| tensor.data.len() as u64).sum(), progress }
    }

    /// Tells what comes next.
    pub(crate) fn before(&mut self, tensor: &str) -> Result<()> {
        let progress = Progress { tensor, done: self.done, total: self.total };
        if (self.progress)(progress).is_break() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
