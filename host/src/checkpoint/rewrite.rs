//! Rewriting a checkpoint tensor by tensor: what quantizing and dequantizing share.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

use super::convention::Description;
use super::error::{Error, Result};
use super::output::Output;
use super::read::{Checkpoint, Tensor};
use super::write::{Outline, Writer};
use super::{Skipped, json, others};

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

/// What becomes of each tensor.
pub(super) trait Rewrite {
    /// The tensors that take one's place. None, if they are written together with another.
    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline>;

    /// Writes what [`outlines`](Self::outlines) announced.
    fn write(&mut self, tensor: &Tensor<'_>, writer: &mut Writer) -> Result<()>;

    /// Changes what the checkpoint's directory says about its weights.
    fn describe(&self, description: &mut Description);
}

/// The outline of a tensor that is copied.
pub(super) fn unchanged(tensor: &Tensor<'_>) -> Outline {
    Outline { name: tensor.name.into(), dtype: tensor.dtype, shape: tensor.shape.into() }
}

/// Writes the checkpoint to `out`, all of it or nothing, and returns what was left behind.
pub(super) fn rewrite(
    checkpoint: &Checkpoint,
    out: &Path,
    work: &mut dyn Rewrite,
    progress: &mut OnProgress<'_>,
) -> Result<Vec<Skipped>> {
    let output = Output::create(checkpoint, out)?;
    let mut meter =
        Meter { done: 0, total: checkpoint.tensors().map(|tensor| tensor.data.len() as u64).sum(), progress };
    let mut names: HashMap<&str, Vec<String>> = HashMap::new();
    let mut total_size = 0;
    for shard in &checkpoint.shards {
        let mut outlines = Vec::new();
        for tensor in shard.tensors() {
            let new = work.outlines(&tensor);
            total_size += new.iter().map(Outline::bytes).sum::<u64>();
            names.insert(tensor.name, new.iter().map(|outline| outline.name.clone()).collect());
            outlines.extend(new);
        }
        let mut writer = Writer::create(&output.place(&shard.name)?, shard.metadata.as_ref(), outlines)?;
        for tensor in shard.tensors() {
            meter.before(tensor.name)?;
            work.write(&tensor, &mut writer)?;
            meter.done += tensor.data.len() as u64;
        }
        writer.finish()?;
    }
    meter.before("")?;
    if let Some(index) = &checkpoint.index {
        let name = index.file.file_name().unwrap_or_default();
        json::write_object(&output.place(name.as_ref())?, &index.rewritten(&names, total_size))?;
    }
    if checkpoint.directory {
        let mut description = Description::of(checkpoint);
        work.describe(&mut description);
        for (name, json) in description.files() {
            json::write_object(&output.place(name.as_ref())?, json)?;
        }
    }
    let (files, skipped) = if checkpoint.directory { others::list(checkpoint)? } else { Default::default() };
    for file in files {
        others::copy(checkpoint, &file, &output)?;
        meter.before("")?;
    }
    output.commit()?;
    Ok(skipped)
}

struct Meter<'a, 'b> {
    done: u64,
    total: u64,
    progress: &'a mut OnProgress<'b>,
}

impl Meter<'_, '_> {
    fn before(&mut self, tensor: &str) -> Result<()> {
        let progress = Progress { tensor, done: self.done, total: self.total };
        if (self.progress)(progress).is_break() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
