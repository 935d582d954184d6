//! Beginning a shard's new file, in the container of the old one: its header is written, and its
//! tensors get their names and places.

use std::collections::HashMap;
use std::path::Path;

use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::gguf::format::{SPLIT_COUNT, SPLIT_TENSORS};
use crate::gguf::metadata::Metadata;
use crate::read::shard::{Container, Shard};
use crate::write::gguf::{self, GgufOutline};
use crate::write::job::{Job, of_shard};
use crate::write::outline::Outline;
use crate::write::work::{Renamed, Rewrite};
use crate::write::writer::Writer;

/// Creates a shard's file, which must not exist yet, with room for the outputs of its jobs, in
/// their order. Returns the new names of the shard's tensors as well.
pub(crate) fn begin<R: Rewrite>(shard: usize, path: &Path, work: &R) -> Result<(Renamed, Writer)> {
    let (jobs, file) = (of_shard(work.jobs(), shard), &work.checkpoint().shards[shard]);
    let mut renamed = Renamed { names: HashMap::new(), bytes: jobs.iter().map(Job::bytes_after).sum() };
    let mut next = jobs.iter().peekable();
    for (number, stored) in file.stored.iter().enumerate() {
        // A tensor without a job, such as the scales of another, is written with that.
        let job = next.next_if(|job| job.position.tensor == number);
        let names = job.iter().flat_map(|job| &job.outputs).map(|output| output.name.clone());
        renamed.names.insert(stored.name.clone(), names.collect());
    }
    let outputs = jobs.iter().map(|job| job.outputs.len()).sum();
    let split = split_tensors(file, outputs, work)?;
    let outlines = jobs.iter().flat_map(|job| &job.outputs);
    Ok((renamed, create(work, file, path, outlines, split)?))
}

/// The tensors that all files of a split model will have, which each of them states.
///
/// # Errors
/// [`FileError::PartOfGguf`](crate::FileError::PartOfGguf) if their number changes and the others
/// are not there.
fn split_tensors<R: Rewrite>(shard: &Shard, here: usize, work: &R) -> Result<Option<u64>> {
    let Container::Gguf(header) = &shard.container else { return Ok(None) };
    let (Some(parts), Some(before)) = (header.number(SPLIT_COUNT), header.number(SPLIT_TENSORS)) else {
        return Ok(None);
    };
    let checkpoint = work.checkpoint();
    if parts > 1 && !checkpoint.directory && here != shard.stored.len() {
        let file = shard.path.clone();
        return Err(Error::File(FileError::PartOfGguf {
            file,
            parts,
            before: shard.stored.len(),
            after: here,
        }));
    }
    let after: u64 = work.jobs().iter().map(|job| job.outputs.len() as u64).sum();
    let read: u64 = checkpoint.shards.iter().map(|shard| shard.stored.len() as u64).sum();
    Ok(Some((before + after).saturating_sub(read)))
}

/// Creates a file of the same container as a shard, with its metadata.
fn create<'o, R: Rewrite>(
    work: &R,
    shard: &Shard,
    path: &Path,
    outlines: impl Iterator<Item = &'o Outline>,
    split: Option<u64>,
) -> Result<Writer> {
    let (header, bytes) = match &shard.container {
        Container::Safetensors(metadata) => {
            // The output describes its layers itself.
            let mut metadata = metadata.clone();
            for key in &work.checkpoint().metadata_keys {
                metadata.as_mut().map(|metadata| metadata.remove(*key));
            }
            return Writer::safetensors(path, metadata.as_ref(), outlines);
        }
        Container::Gguf(header) => (header, shard.mapped_bytes()),
    };
    let mut metadata = Metadata::of(header, bytes);
    if let Some(file_type) = work.file_type() {
        metadata.set_file_type(file_type);
    }
    if let Some(tensors) = split {
        metadata.set_split_tensors(tensors);
    }
    let outlines = outlines.map(|Outline { name, dtype, shape }| {
        let refused =
            |why| Error::File(FileError::NotInGguf { file: path.into(), tensor: name.clone(), why });
        let kind = dtype.ggml().ok_or_else(|| refused(format!("it has no type for {dtype}")))?;
        Ok(GgufOutline { name: name.clone(), shape: shape.clone(), kind })
    });
    gguf::create(path, &metadata, &outlines.collect::<Result<Vec<_>>>()?)
}
