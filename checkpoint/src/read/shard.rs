//! A shard: one file of tensors in either container, mapped, its header read and checked.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;

use memmap2::Mmap;
use safetensors::tensor::Metadata;

use crate::dtype::FileDtype;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::gguf::format::MAGIC;
use crate::gguf::header::{Header, TensorInfo, read as read_gguf};
use crate::read::header;
use crate::read::tensor::Tensor;

/// One file of tensors.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// The path relative to the checkpoint's directory.
    pub(crate) name: PathBuf,
    pub(crate) container: Container,
    /// The tensors in the order of their data.
    pub(crate) stored: Vec<Stored>,
    map: Mmap,
}

/// The container of a file, with its metadata.
pub(crate) enum Container {
    Safetensors(Option<HashMap<String, String>>),
    /// A GGUF file's header, with the tensors taken out of it.
    Gguf(Box<Header>),
}

/// A tensor in a file.
pub(crate) struct Stored {
    pub(crate) name: String,
    dtype: FileDtype,
    shape: Vec<usize>,
    /// Its bytes in the file: checked to be there.
    pub(crate) range: Range<usize>,
    /// The sizes of the model's parameter, of codes for which somebody asked that.
    model_shape: OnceLock<Vec<usize>>,
}

impl Stored {
    pub(crate) fn new(name: String, dtype: FileDtype, shape: Vec<usize>, range: Range<usize>) -> Self {
        Self { name, dtype, shape, range, model_shape: OnceLock::new() }
    }

    /// Keeps the sizes of the model's parameter that these codes are of, as long as the checkpoint is open.
    pub(crate) fn keep_shape(&self, shape: &[usize]) -> &[usize] {
        self.model_shape.get_or_init(|| shape.into())
    }
}

impl Shard {
    pub(crate) fn open(path: PathBuf, name: PathBuf) -> Result<Self> {
        // Opening a pipe would wait for its writer.
        let regular = fs::metadata(&path).map_err(Error::io("open", &path))?.is_file();
        if !regular {
            return Err(Error::File(FileError::Header {
                file: path,
                why: "it is not a regular file".into(),
            }));
        }
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        // Nobody may change the file while it is mapped. We never do: output goes to new files, never over the
        // input. That other programs leave it alone is asked of the user, as by every reader that maps; one
        // that truncates it ends the process with SIGBUS.
        // SAFETY: the map is private and read-only, nobody changes the file (as above), and the bytes are only
        // ever read as integers and floats, for which every bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
        header::check_kind(&path, &map)?;
        let by_name = path.extension().is_some_and(|extension| extension == "gguf");
        // No safetensors file starts so: its header would have a gigabyte.
        if by_name || map.starts_with(MAGIC) {
            let mut header = read_gguf(&path, &map)?;
            let stored = from_gguf(std::mem::take(&mut header.tensors));
            return Ok(Self { path, name, container: Container::Gguf(header.into()), stored, map });
        }
        let (header, data) = header::read(&path, &map)?;
        let container = Container::Safetensors(header.metadata().clone());
        let stored = from_safetensors(&header, data);
        Ok(Self { path, name, container, stored, map })
    }

    /// The file.
    pub(crate) fn mapped_bytes(&self) -> &[u8] {
        &self.map
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Lets go of what is in memory of a tensor's bytes, which are not needed for a while: or else all of a
    /// checkpoint counts as this program's memory by and by. The system may keep them for whoever reads them
    /// next.
    pub(crate) fn forget(&self, data: &[u8]) {
        #[cfg(unix)]
        {
            let start = data.as_ptr().addr().wrapping_sub(self.map.as_ptr().addr());
            if start > self.map.len() || data.len() > self.map.len() - start {
                return;
            }
            // SAFETY: the pages are a shared map of a file that is never written through it, so that whoever
            // reads them again has them from the file, the same bytes. That it stays unchanged is asked of
            // the user, as for the map itself.
            let forgotten = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, data.len())
            };
            // A system that does not want to keeps them.
            drop(forgotten);
        }
        #[cfg(not(unix))]
        let _ = data;
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.stored.iter().filter_map(|stored| self.mapped(stored))
    }

    pub(crate) fn tensor(&self, place: usize) -> Option<Tensor<'_>> {
        self.mapped(self.stored.get(place)?)
    }

    fn mapped<'a>(&'a self, stored: &'a Stored) -> Option<Tensor<'a>> {
        let Stored { name, dtype, shape, range, .. } = stored;
        let data = self.map.get(range.clone())?;
        Some(Tensor { name, dtype: *dtype, shape, data, file: &self.path, scaling: None })
    }
}

fn from_safetensors(header: &Metadata, data: usize) -> Vec<Stored> {
    let stored = header.offset_keys().into_iter().filter_map(|name| {
        let info = header.info(&name)?;
        let (start, end) = info.data_offsets;
        let (dtype, shape) = (info.dtype.into(), info.shape.clone());
        Some(Stored::new(name, dtype, shape, data + start..data + end))
    });
    stored.collect()
}

fn from_gguf(tensors: Vec<TensorInfo>) -> Vec<Stored> {
    let stored = tensors
        .into_iter()
        .map(|TensorInfo { name, shape, kind, range }| Stored::new(name, kind.into(), shape, range));
    stored.collect()
}
