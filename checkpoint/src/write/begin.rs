//! Beginning a shard's new file, in the container of the old one: its header is written, and its tensors get
//! their names and places.

use std::path::Path;

use crate::checkpoint_formats::table::metadata_keys;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::gguf::format::{SPLIT_COUNT, SPLIT_TENSORS};
use crate::gguf::metadata::{FileType, Metadata};
use crate::read::shard::{Container, Shard};
use crate::write::gguf;
use crate::write::outline::Outline;
use crate::write::work::{Renamed, Rewrite};
use crate::write::writer::Writer;

/// Creates a shard's file, which must not exist yet, and says what each tensor is called in it.
pub(crate) fn begin<R: Rewrite>(shard: &Shard, path: &Path, work: &R) -> Result<(Renamed, Writer)> {
    let (mut outlines, mut renamed) = (Vec::new(), Renamed::default());
    for tensor in shard.tensors() {
        let new = work.outlines(&tensor);
        renamed.bytes += new.iter().map(Outline::bytes).sum::<u64>();
        renamed.names.insert(tensor.name.into(), new.iter().map(|outline| outline.name.clone()).collect());
        outlines.extend(new);
    }
    let split = split_tensors(shard, outlines.len(), work)?;
    Ok((renamed, create(shard, path, outlines, work.file_type(), split)?))
}

/// The tensors that all files of a split model will have, which each of them states.
///
/// # Errors
/// [`FileError::PartOfGguf`](crate::FileError::PartOfGguf) if their number changes and the others are not
/// there.
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
    let after: u64 = checkpoint.tensors().map(|tensor| work.outlines(&tensor).len() as u64).sum();
    let read: u64 = checkpoint.tensors().map(|_| 1).sum();
    Ok(Some((before + after).saturating_sub(read)))
}

/// Creates a file of the same container as a shard, with its metadata.
fn create(
    shard: &Shard,
    path: &Path,
    outlines: Vec<Outline>,
    file_type: Option<FileType>,
    split: Option<u64>,
) -> Result<Writer> {
    let (header, bytes) = match &shard.container {
        Container::Safetensors(metadata) => {
            // The output describes its layers itself.
            let mut metadata = metadata.clone();
            for key in metadata_keys() {
                metadata.as_mut().map(|metadata| metadata.remove(key));
            }
            return Writer::safetensors(path, metadata.as_ref(), outlines);
        }
        Container::Gguf(header) => (header, shard.mapped_bytes()),
    };
    let mut metadata = Metadata::of(header, bytes);
    if let Some(file_type) = file_type {
        metadata.set_file_type(file_type);
    }
    if let Some(tensors) = split {
        metadata.set_split_tensors(tensors);
    }
    let outlines = outlines.into_iter().map(|Outline { name, dtype, shape }| {
        let refused =
            |why| Error::File(FileError::NotInGguf { file: path.into(), tensor: name.clone(), why });
        let kind = dtype.ggml().ok_or_else(|| refused(format!("it has no type for {dtype}")))?;
        Ok(gguf::Outline { name, shape, kind })
    });
    gguf::create(path, &metadata, &outlines.collect::<Result<Vec<_>>>()?)
}
