//! Writing a file: the header first, then each tensor at its place, in any order and by any thread.
//! This module writes the headers of safetensors files, and [`gguf`](crate::write::gguf) the
//! headers of GGUF files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::tensor::TensorInfo;
use serde_json::json;

use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::read::header::METADATA;
use crate::write::outline::Outline;

/// A file that threads write: its header is there, and each tensor has its place.
pub(crate) struct Writer {
    path: PathBuf,
    file: File,
    tensors: Vec<Room>,
    /// The bytes of the whole file.
    length: u64,
}

/// The room of a tensor in a file.
pub(crate) struct Room {
    name: String,
    start: u64,
    bytes: u64,
    /// The bytes that are still to be written.
    missing: AtomicU64,
}

impl Room {
    pub(crate) fn new(name: String, start: u64, bytes: u64) -> Self {
        Self { name, start, bytes, missing: bytes.into() }
    }
}

impl Writer {
    /// Creates a file that begins with a header and has room for tensors, whose offsets count from
    /// `data`. If a length is given, unwritten bytes read as zeros up to it.
    pub(crate) fn create(
        path: &Path,
        header: &[u8],
        mut tensors: Vec<Room>,
        data: u64,
        length: Option<u64>,
    ) -> Result<Self> {
        tensors.iter_mut().for_each(|tensor| tensor.start = tensor.start.saturating_add(data));
        let write = || {
            let mut file = File::create_new(path)?;
            file.write_all(header)?;
            length.map_or(Ok(()), |length| file.set_len(length))?;
            Ok(file)
        };
        let file = write().map_err(Error::io("write", path))?;
        let ends = tensors.iter().map(|tensor| tensor.start.saturating_add(tensor.bytes));
        let length = ends.chain(length).fold(header.len() as u64, u64::max);
        Ok(Self { path: path.into(), file, tensors, length })
    }

    /// Creates a safetensors file, whose tensors are numbered in the order given.
    ///
    /// The data are in the order of the safetensors library, the widest dtype first and then by
    /// name, so that each tensor is aligned to its dtype.
    pub(crate) fn safetensors<'o>(
        path: &Path,
        metadata: Option<&HashMap<String, String>>,
        outlines: impl Iterator<Item = &'o Outline>,
    ) -> Result<Self> {
        let plain = outlines.enumerate().map(|(number, outline)| match outline.dtype.plain() {
            Some(dtype) => Ok((dtype, outline, number)),
            None => {
                let (file, tensor, dtype) = (path.into(), outline.name.clone(), outline.dtype);
                Err(Error::File(FileError::NotInSafetensors { file, tensor, dtype }))
            }
        });
        let mut sorted = plain.collect::<Result<Vec<_>>>()?;
        sorted.sort_by(|(a, first, _), (b, second, _)| b.cmp(a).then_with(|| first.name.cmp(&second.name)));
        let mut members = Vec::with_capacity(sorted.len() + 1);
        if let Some(metadata) = metadata {
            let sorted: BTreeMap<_, _> = metadata.iter().collect();
            members.push(format!("{}:{}", json!(METADATA), json!(sorted)));
        }
        let (mut tensors, mut end) = (Vec::with_capacity(sorted.len()), 0);
        for (dtype, outline, number) in sorted {
            let (start, bytes) = (end, outline.bytes());
            end += bytes;
            let shape = outline.shape.clone();
            let info = TensorInfo { dtype, shape, data_offsets: (start as usize, end as usize) };
            members.push(format!("{}:{}", json!(outline.name), json!(info)));
            tensors.push((number, Room::new(outline.name.clone(), start, bytes)));
        }
        tensors.sort_by_key(|(number, _)| *number);
        let tensors = tensors.into_iter().map(|(_, tensor)| tensor).collect();
        let mut json = format!("{{{}}}", members.join(",")).into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json);
        Self::create(path, &header, tensors, header.len() as u64, None)
    }

    /// Reserves `bytes` bytes of a tensor for the caller, and returns their position in the file.
    ///
    /// # Errors
    /// [`Error::Io`] if the header has no such bytes, or they were reserved before.
    pub(crate) fn reserve(&self, tensor: usize, offset: u64, bytes: usize) -> Result<u64> {
        let Some(room) = self.tensors.get(tensor) else {
            return Err(self.wrong("a tensor is not in the header".into()));
        };
        let bytes = bytes as u64;
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= room.bytes);
        let left = room
            .missing
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |missing| missing.checked_sub(bytes));
        match left {
            Ok(_) if fits => Ok(room.start + offset),
            _ => Err(self.wrong(format!("{} has more bytes than in the header", room.name))),
        }
    }

    /// Writes bytes at a position that [`Self::reserve`] returned.
    pub(crate) fn write_at(&self, position: u64, data: &[u8]) -> Result<()> {
        write_all_at(&self.file, data, position).map_err(Error::io("write", &self.path))
    }

    /// Makes sure that everything is written, on the disk as well, and returns the bytes of the
    /// file.
    pub(crate) fn finish(&self) -> Result<u64> {
        let missing = self.tensors.iter().filter(|room| room.missing.load(Ordering::Relaxed) > 0);
        if let Some(room) = missing.min_by_key(|room| &room.name) {
            return Err(self.wrong(format!("{} was not written", room.name)));
        }
        self.file.sync_all().map_err(Error::io("write", &self.path))?;
        Ok(self.length)
    }

    fn wrong(&self, what: String) -> Error {
        Error::io("write", &self.path)(io::Error::other(what))
    }
}

#[cfg(unix)]
fn write_all_at(file: &File, data: &[u8], position: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, data, position)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut data: &[u8], mut position: u64) -> io::Result<()> {
    while !data.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, data, position)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => (data, position) = (&data[written..], position + written as u64),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::dtype::FileDtype;

    fn outline(name: &str, dtype: FileDtype, shape: &[usize]) -> Outline {
        Outline { name: name.into(), dtype, shape: shape.into() }
    }

    fn write(writer: &Writer, tensor: usize, offset: u64, data: &[u8]) -> Result<()> {
        writer.write_at(writer.reserve(tensor, offset, data.len())?, data)
    }

    #[test]
    fn tensors_in_any_order_are_laid_out_like_the_safetensors_library() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.safetensors");
        let outlines = [
            outline("bytes", FileDtype::U8, &[3]),
            outline("b", FileDtype::F32, &[1]),
            outline("a", FileDtype::F32, &[2]),
            outline("none", FileDtype::F64, &[0]),
        ];
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let writer = Writer::safetensors(&path, Some(&metadata), outlines.iter()).unwrap();
        for (tensor, offset, data) in
            [(0, 0, &[9u8; 3][..]), (3, 0, &[]), (2, 4, &[1; 4]), (1, 0, &[2; 4]), (2, 0, &[1; 4])]
        {
            assert!(writer.finish().is_err());
            write(&writer, tensor, offset, data).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), std::fs::metadata(&path).unwrap().len());

        let written = std::fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&written).unwrap();
        assert_eq!(written, safetensors::serialize(read.iter(), Some(metadata)).unwrap());
        assert_eq!(read.tensor("b").unwrap().data(), [2; 4]);
        assert_eq!(read.tensor("a").unwrap().data(), [1; 8]);
        assert_eq!(read.tensor("bytes").unwrap().data(), [9; 3]);
    }

    #[test]
    fn bytes_outside_of_the_header_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.safetensors");
        let outlines = [outline("a", FileDtype::U8, &[4])];
        let writer = Writer::safetensors(&path, None, outlines.iter()).unwrap();
        assert!(write(&writer, 1, 0, &[0; 4]).is_err(), "no such tensor");
        assert!(write(&writer, 0, 0, &[0; 5]).is_err(), "too many bytes");
        assert!(writer.finish().is_err());
        let writer = Writer::safetensors(&path.with_extension("y"), None, outlines.iter()).unwrap();
        assert!(write(&writer, 0, 1, &[0; 4]).is_err(), "beyond the end");
        let writer = Writer::safetensors(&path.with_extension("z"), None, outlines.iter()).unwrap();
        assert!(write(&writer, 0, 0, &[0; 4]).is_ok());
        assert!(write(&writer, 0, 0, &[0; 4]).is_err(), "twice");
        assert!(writer.finish().is_ok());
        assert!(Writer::safetensors(&path, None, std::iter::empty()).is_err(), "the file exists");
    }
}
