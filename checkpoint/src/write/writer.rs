//! Writing a file: the header first, then each tensor at its place, in whatever order they come. Safetensors
//! headers are written here, GGUF's in `gguf`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::TensorInfo;
use serde_json::json;

use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::read::bands::bands;
use crate::read::header::METADATA;
use crate::read::tensor::Tensor;
use crate::read::values::with_values;
use crate::sums::Sums;
use crate::write::outline::Outline;

/// A file being written, of either container: its header is there, and each tensor has its place.
pub(crate) struct Writer {
    path: PathBuf,
    file: File,
    /// The bytes of each tensor that are still to come.
    places: Places,
    /// The bytes of the whole file.
    length: u64,
}

/// Tensors' places in a file, by name.
pub(crate) type Places = HashMap<String, Place>;

/// The range of a tensor's bytes in a file.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Writer {
    /// Creates a file that begins with a header. If a length is given, what is not written reads as zeros up
    /// to there.
    pub(crate) fn create(path: &Path, header: &[u8], places: Places, length: Option<u64>) -> Result<Self> {
        let write = || {
            let mut file = File::create_new(path)?;
            file.write_all(header)?;
            length.map_or(Ok(()), |length| file.set_len(length))?;
            Ok(file)
        };
        let file = write().map_err(Error::io("write", path))?;
        let ends = places.values().map(|place| place.start.saturating_add(place.bytes));
        let length = ends.chain(length).fold(header.len() as u64, u64::max);
        Ok(Self { path: path.into(), file, places, length })
    }

    /// Creates a safetensors file.
    ///
    /// Tensors are laid out as the safetensors library does it, the widest dtype first and then by name, so
    /// that each is aligned to its dtype.
    pub(crate) fn safetensors(
        path: &Path,
        metadata: Option<&HashMap<String, String>>,
        tensors: Vec<Outline>,
    ) -> Result<Self> {
        let plain = tensors.into_iter().map(|tensor| match tensor.dtype.plain() {
            Some(dtype) => Ok((dtype, tensor)),
            None => {
                let Outline { name: tensor, dtype, .. } = tensor;
                Err(Error::File(FileError::NotInSafetensors { file: path.into(), tensor, dtype }))
            }
        });
        let mut tensors = plain.collect::<Result<Vec<_>>>()?;
        tensors.sort_by(|(a, first), (b, second)| b.cmp(a).then_with(|| first.name.cmp(&second.name)));
        let mut members = Vec::with_capacity(tensors.len() + 1);
        if let Some(metadata) = metadata {
            let sorted: BTreeMap<_, _> = metadata.iter().collect();
            members.push(format!("{}:{}", json!(METADATA), json!(sorted)));
        }
        let (mut places, mut end) = (Places::with_capacity(tensors.len()), 0);
        for (dtype, tensor) in tensors {
            let (start, bytes) = (end, tensor.bytes());
            end += bytes;
            let Outline { name, shape, .. } = tensor;
            let info = TensorInfo { dtype, shape, data_offsets: (start as usize, end as usize) };
            members.push(format!("{}:{}", json!(name), json!(info)));
            places.insert(name, Place { start, bytes });
        }
        let mut json = format!("{{{}}}", members.join(",")).into_bytes();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json);
        places.values_mut().for_each(|place| place.start += header.len() as u64);
        Self::create(path, &header, places, None)
    }

    /// Writes one tensor's data.
    pub(crate) fn write(&mut self, name: &str, data: &[u8]) -> Result<()> {
        match self.places.get(name) {
            Some(Place { bytes, .. }) if *bytes != data.len() as u64 => {
                let (found, expected) = (data.len(), bytes);
                Err(self.wrong(format!("{name} has {found} bytes, and {expected} in the header")))
            }
            _ => self.append(name, data),
        }
    }

    /// Writes what comes next of a tensor's data.
    pub(crate) fn append(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let Some(Place { start, bytes }) = self.places.get(name).copied() else {
            return Err(self.wrong(format!("{name} is not in the header")));
        };
        let Some(rest) = bytes.checked_sub(data.len() as u64) else {
            return Err(self.wrong(format!("{name} has more bytes than in the header")));
        };
        let mut write = || {
            self.file.seek(SeekFrom::Start(start))?;
            self.file.write_all(data)
        };
        write().map_err(Error::io("write", &self.path))?;
        // Only what is written is no longer missing.
        match rest {
            0 => self.places.remove(name),
            _ => self.places.insert(name.into(), Place { start: start + data.len() as u64, bytes: rest }),
        };
        Ok(())
    }

    /// Makes sure that everything is written, on the disk as well, and returns the bytes of the file.
    pub(crate) fn finish(self) -> Result<u64> {
        if let Some(name) = self.places.keys().min() {
            return Err(self.wrong(format!("{name} was not written")));
        }
        self.file.sync_all().map_err(Error::io("write", &self.path))?;
        Ok(self.length)
    }

    fn wrong(&self, what: String) -> Error {
        Error::io("write", &self.path)(io::Error::other(what))
    }
}

/// The destination of a worker's tensors: the file of their shard, which others write to as well.
pub(crate) struct Sink<'a> {
    writer: &'a Mutex<Writer>,
    interrupted: &'a AtomicBool,
}

impl<'a> Sink<'a> {
    /// A sink that takes nothing more once the operation is interrupted.
    pub(crate) fn new(writer: &'a Mutex<Writer>, interrupted: &'a AtomicBool) -> Self {
        Self { writer, interrupted }
    }

    /// Says whether to go on in the middle of a tensor.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub(crate) fn go_on(&self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Writes one tensor's data.
    pub(crate) fn write(&self, name: &str, data: &[u8]) -> Result<()> {
        self.go_on()?;
        // File systems let one thread write to a file at a time anyway. A panic ends the whole operation.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).write(name, data)
    }

    /// Writes what comes next of a tensor's data.
    pub(crate) fn append(&self, name: &str, data: &[u8]) -> Result<()> {
        self.go_on()?;
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).append(name, data)
    }

    /// Writes a tensor as it is, and says what that came to. One that is the transpose of what is stored goes band by band.
    pub(crate) fn copy(&self, tensor: &Tensor<'_>) -> Result<Sums> {
        let mut bytes = 0;
        if tensor.columns.is_none() {
            self.write(tensor.name, tensor.data)?;
            bytes = tensor.data.len() as u64;
        } else {
            for band in bands(tensor.elements() as usize) {
                let values = tensor.values_in(band);
                let values =
                    values.ok_or_else(|| tensor.unreadable(format!("{} has no values", tensor.dtype)))?;
                with_values!(&values, values => {
                    self.append(tensor.name, bytemuck::cast_slice(values))?;
                    bytes += size_of_val(&values[..]) as u64;
                });
            }
        }
        let mut sums = Sums::default();
        sums.add(tensor.elements(), bytes, bytes);
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::dtype::FileDtype;

    fn outline(name: &str, dtype: FileDtype, shape: &[usize]) -> Outline {
        Outline { name: name.into(), dtype, shape: shape.into() }
    }

    #[test]
    fn tensors_may_come_in_any_order_and_are_laid_out_as_the_safetensors_library_does_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.safetensors");
        let outlines = vec![
            outline("bytes", FileDtype::U8, &[3]),
            outline("b", FileDtype::F32, &[1]),
            outline("a", FileDtype::F32, &[2]),
            outline("none", FileDtype::F64, &[0]),
        ];
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let mut writer = Writer::safetensors(&path, Some(&metadata), outlines).unwrap();
        for (name, data) in [("bytes", &[9u8; 3][..]), ("none", &[]), ("a", &[1; 8]), ("b", &[2; 4])] {
            writer.write(name, data).unwrap();
        }
        writer.finish().unwrap();

        let written = std::fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&written).unwrap();
        assert_eq!(written, safetensors::serialize(read.iter(), Some(metadata)).unwrap());
        assert_eq!(read.tensor("b").unwrap().data(), [2; 4]);
        assert_eq!(read.tensor("bytes").unwrap().data(), [9; 3]);
    }

    #[test]
    fn what_the_header_does_not_say_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.safetensors");
        let mut writer = Writer::safetensors(&path, None, vec![outline("a", FileDtype::U8, &[4])]).unwrap();
        assert!(writer.write("b", &[0; 4]).is_err());
        assert!(writer.write("a", &[0; 4]).is_ok());
        assert!(writer.write("a", &[0; 4]).is_err(), "twice");
        assert!(Writer::safetensors(&path, None, vec![]).is_err(), "the file is there already");
        let unfinished =
            Writer::safetensors(&path.with_extension("y"), None, vec![outline("a", FileDtype::U8, &[4])]);
        assert!(unfinished.unwrap().finish().is_err());
    }
}
