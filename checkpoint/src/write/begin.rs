//! Beginning a shard's new file, in the container of the old one: its header is written, and its tensors get
//! their names and places.

use std::path::Path;

use crate::error::file::FileError;
use crate::error::{Error, Result};
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
        let refused =
            |why| Error::File(FileError::NotInGguf { file: path.into(), tensor: name.clone(), why });
        let kind = dtype.ggml().ok_or_else(|| refused(format!("it has no type for {dtype}")))?;
        Ok(gguf::Outline { name, shape, kind })
    });
    gguf::create(path, &metadata, &outlines.collect::<Result<Vec<_>>>()?)
}
