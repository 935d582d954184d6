//! A shard: one mapped file of tensors in any container, with its header read and checked.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;
use safetensors::tensor::Metadata;

use crate::dtype::FileDtype;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::gguf::format::MAGIC;
use crate::gguf::header::{GgufTensor, Header, read as read_gguf};
use crate::gguf::imatrix;
use crate::pytorch::archive;
use crate::pytorch::strided::Copies;
use crate::pytorch::tensors::{PickleTensor, TensorData, read as read_pytorch};
use crate::read::columns::TransposedColumns;
use crate::read::header;
use crate::read::tensor::Tensor;

/// A file of tensors.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// The path relative to the checkpoint's directory.
    pub(crate) name: PathBuf,
    pub(crate) container: Container,
    /// The tensors in the order of their data.
    pub(crate) stored: Vec<StoredTensor>,
    map: Mmap,
    /// The file that is mapped, to recognize it when it is opened again.
    identity: fs::Metadata,
    /// The tensors of a PyTorch file that are not contiguous there.
    strided: Option<Mmap>,
}

/// The container of a file, with its metadata.
pub(crate) enum Container {
    Safetensors(Option<HashMap<String, String>>),
    /// The header of a GGUF file, without its tensors.
    Gguf(Box<Header>),
}

/// A tensor in a file.
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) dtype: FileDtype,
    pub(crate) shape: Vec<usize>,
    /// Its bytes in the file, checked to lie inside it.
    pub(crate) range: Range<usize>,
    /// True if the range is in the temporary file instead of the shard's.
    pub(crate) strided: bool,
    /// Set if the tensor is the transpose of columns of the matrix in these bytes.
    pub(crate) columns: Option<TransposedColumns>,
    /// The shape of the model's parameter, for codes, once it was computed.
    model_shape: OnceLock<Vec<usize>>,
}

impl StoredTensor {
    pub(crate) fn new(name: String, dtype: FileDtype, shape: Vec<usize>, range: Range<usize>) -> Self {
        Self { name, dtype, shape, range, strided: false, columns: None, model_shape: OnceLock::new() }
    }

    /// A tensor in a part of these bytes, or the transpose of columns of their matrix.
    pub(crate) fn part(
        &self,
        name: String,
        shape: Vec<usize>,
        range: Range<usize>,
        columns: Option<TransposedColumns>,
    ) -> Self {
        Self { strided: self.strided, columns, ..Self::new(name, self.dtype, shape, range) }
    }

    /// Stores the shape of the model's parameter for these codes, while the checkpoint is open.
    pub(crate) fn keep_shape(&self, shape: &[usize]) -> &[usize] {
        self.model_shape.get_or_init(|| shape.into())
    }
}

impl Shard {
    pub(crate) fn open(path: PathBuf, name: PathBuf) -> Result<Self> {
        // Opening a pipe would block until it has a writer.
        let identity = fs::metadata(&path).map_err(Error::io("open", &path))?;
        let regular = identity.is_file();
        if !regular {
            return Err(Error::File(FileError::Header {
                file: path,
                why: "it is not a regular file".into(),
            }));
        }
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        // The file must not change while it is mapped. microscale never changes it: output goes to
        // new files. Users must keep other programs from changing it, as for every reader that maps
        // files. A program that truncates it ends this process with SIGBUS.
        // SAFETY: the map covers the whole file, is read-only, and lives as long as the shard. The
        // file does not change (see above). The bytes are only read as integers and floats, for
        // which every bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
        header::check_kind(&path, &map)?;
        let by_name = path.extension().is_some_and(|extension| extension == "gguf");
        // No safetensors file has these first bytes: its header would have a gigabyte.
        if by_name || map.starts_with(MAGIC) {
            let mut header = read_gguf(&path, &map)?;
            let stored = from_gguf(std::mem::take(&mut header.tensors));
            let container = Container::Gguf(header.into());
            return Ok(Self { path, name, container, stored, map, identity, strided: None });
        }
        if map.starts_with(archive::MAGIC) || is_pickle(&path) {
            let (stored, strided) = from_pytorch(&path, &map)?;
            // The output is safetensors with PyTorch tensors.
            let metadata = HashMap::from([("format".into(), "pt".into())]);
            let container = Container::Safetensors(Some(metadata));
            return Ok(Self { path, name, container, stored, map, identity, strided });
        }
        // A safetensors header begins with a brace.
        let by_name =
            path.extension().is_some_and(|extension| extension == "dat") && map.get(8) != Some(&b'{');
        if by_name || imatrix::is_imatrix(&map) {
            let stored = from_imatrix(imatrix::read(&path, &map)?);
            let container = Container::Safetensors(None);
            return Ok(Self { path, name, container, stored, map, identity, strided: None });
        }
        let (header, data) = header::read(&path, &map)?;
        let container = Container::Safetensors(header.metadata().clone());
        let stored = from_safetensors(&header, data);
        Ok(Self { path, name, container, stored, map, identity, strided: None })
    }

    /// Opens the file again for reads of a stored tensor, and returns the offset of its bytes.
    ///
    /// Returns `None` where the tensor must be read from the map: it is not in the file as it is,
    /// or the path leads to another file by now. Files are not kept open, because a checkpoint may
    /// have more shards than a process may open files.
    pub(crate) fn reopen(&self, tensor: usize) -> Option<(File, u64)> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let stored = self.stored.get(tensor).filter(|stored| !stored.strided)?;
            let file = File::open(&self.path).ok()?;
            let (found, known) = (file.metadata().ok()?, &self.identity);
            let same = (found.dev(), found.ino()) == (known.dev(), known.ino());
            same.then_some((file, stored.range.start as u64))
        }
        #[cfg(not(unix))]
        {
            let _ = (tensor, &self.identity);
            None
        }
    }

    /// The path of the output, relative to its directory. PyTorch files become safetensors, with
    /// the names that transformers uses for both.
    pub(crate) fn written_name(&self) -> PathBuf {
        if !is_pickle(&self.name) {
            return self.name.clone();
        }
        let stem = self.name.file_stem().unwrap_or_default().to_string_lossy();
        self.name.with_file_name(format!("{}.safetensors", stem.strip_prefix("pytorch_").unwrap_or(&stem)))
    }

    /// The bytes of the file.
    pub(crate) fn mapped_bytes(&self) -> &[u8] {
        &self.map
    }

    /// The size of the file in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Releases the memory of a tensor's bytes until they are read again.
    ///
    /// Otherwise all of a checkpoint would count as this process's memory in the end. The system
    /// may keep the pages in its cache.
    pub(crate) fn forget(&self, data: &[u8]) {
        #[cfg(unix)]
        {
            for map in [Some(&self.map), self.strided.as_ref()].into_iter().flatten() {
                let start = data.as_ptr().addr().wrapping_sub(map.as_ptr().addr());
                if start > map.len() || data.len() > map.len() - start {
                    continue;
                }
                // SAFETY: the range is inside `map`, which lives as long as `self`. The map is of a
                // file and was never written, so a later read gets the same bytes from the file.
                // Users keep the file unchanged, as for the map itself. The file of strided tensors
                // has no name, so no other process can change it.
                let forgotten = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, data.len())
                };
                // The system may ignore the advice.
                drop(forgotten);
            }
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

    /// A tensor of this file; `None` if its bytes are not in it.
    pub(crate) fn mapped<'a>(&'a self, stored: &'a StoredTensor) -> Option<Tensor<'a>> {
        let StoredTensor { name, dtype, shape, range, strided, columns, .. } = stored;
        let map = if *strided { self.strided.as_ref()? } else { &self.map };
        let data = map.get(range.clone())?;
        Some(Tensor { name, dtype: *dtype, shape, data, file: &self.path, scaling: None, columns: *columns })
    }
}

fn from_safetensors(header: &Metadata, data: usize) -> Vec<StoredTensor> {
    let stored = header.offset_keys().into_iter().filter_map(|name| {
        let info = header.info(&name)?;
        let (start, end) = info.data_offsets;
        let (dtype, shape) = (info.dtype.into(), info.shape.clone());
        Some(StoredTensor::new(name, dtype, shape, data + start..data + end))
    });
    stored.collect()
}

/// The extensions of PyTorch files.
pub(crate) const PICKLES: [&str; 3] = ["bin", "pt", "pth"];

/// Returns whether a file has the extension of a PyTorch file.
pub(crate) fn is_pickle(path: &Path) -> bool {
    path.extension().is_some_and(|found| PICKLES.iter().any(|known| found == *known))
}

/// The tensors of a PyTorch file, and a map of the ones that are not contiguous in it.
fn from_pytorch(path: &Path, bytes: &[u8]) -> Result<(Vec<StoredTensor>, Option<Mmap>)> {
    let failed =
        || Error::io("put tensors that are not contiguous into a temporary file, in TMPDIR, of", path);
    let (mut stored, mut copies) = (Vec::new(), None);
    for PickleTensor { name, dtype, shape, data } in read_pytorch(path, bytes)? {
        let (range, strided) = match data {
            TensorData::Mapped(range) => (range, false),
            TensorData::Strided(elements) => {
                let copies = match &mut copies {
                    Some(copies) => copies,
                    None => copies.insert(Copies::create().map_err(failed())?),
                };
                (copies.append(bytes, &elements).map_err(failed())?, true)
            }
        };
        stored.push(StoredTensor { strided, ..StoredTensor::new(name, dtype.into(), shape, range) });
    }
    let strided = copies.map(Copies::map).transpose().map_err(failed())?;
    Ok((stored, strided))
}

/// The tensors of an importance matrix, as its GGUF form would have them.
fn from_imatrix(entries: Vec<imatrix::ImatrixEntry>) -> Vec<StoredTensor> {
    let stored = entries.into_iter().flat_map(|imatrix::ImatrixEntry { name, chunks, sums }| {
        let columns = vec![sums.len() / 4];
        [
            StoredTensor::new(format!("{name}{}", imatrix::COUNTS), FileDtype::I32, vec![1], chunks),
            StoredTensor::new(format!("{name}{}", imatrix::SUMS), FileDtype::F32, columns, sums),
        ]
    });
    stored.collect()
}

fn from_gguf(tensors: Vec<GgufTensor>) -> Vec<StoredTensor> {
    let stored = tensors
        .into_iter()
        .map(|GgufTensor { name, shape, kind, range }| StoredTensor::new(name, kind.into(), shape, range));
    stored.collect()
}
