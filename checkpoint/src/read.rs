//! Reading: a `.safetensors` or `.gguf` file, or a directory in Hugging Face layout, as a list of mapped tensors.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use microscale::device::Origin;
use safetensors::tensor::Metadata;
use serde_json::{Map, Value};

use crate::convention::FileConvention;
use crate::description::CONFIG_FILE;
use crate::dtype::FileDtype;
use crate::error::{Error, Result};
use crate::index::Index;
use crate::{Values, gguf, header, json, modelopt};

/// An open checkpoint: every header is read and checked, the data is mapped and not read yet.
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) directory: bool,
    pub(crate) shards: Vec<Shard>,
    pub(crate) index: Option<Index>,
    pub(crate) config: Option<Config>,
    /// ModelOpt's hf_quant_config.json.
    pub(crate) hf_quant_config: Option<Config>,
    /// Each tensor's shard, and its place there.
    places: HashMap<String, (usize, usize)>,
}

/// A JSON file of a directory.
pub(crate) struct Config {
    pub(crate) file: PathBuf,
    pub(crate) json: Map<String, Value>,
}

/// One file of tensors.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// The path relative to the checkpoint's directory.
    pub(crate) name: PathBuf,
    pub(crate) container: Container,
    /// In the order of their data.
    stored: Vec<Stored>,
    map: Mmap,
}

/// What kind of file it is, and what it says of itself.
pub(crate) enum Container {
    Safetensors(Option<HashMap<String, String>>),
    /// With the tensors taken out of it.
    Gguf(Box<gguf::Header>),
}

/// A tensor in a file.
struct Stored {
    name: String,
    dtype: FileDtype,
    shape: Vec<usize>,
    /// Its bytes in the file: checked to be there.
    range: Range<usize>,
}

/// A tensor as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dtype in the file.
    pub dtype: FileDtype,
    /// Its sizes, slowest first.
    pub shape: &'a [usize],
    /// Its bytes, in the mapped file.
    pub data: &'a [u8],
    /// The file that it is in.
    pub file: &'a Path,
}

/// Elements of a shape. A header has been checked for as many as its file holds, but a size of 0 lets all others be any.
pub(crate) fn elements(shape: &[usize]) -> u64 {
    shape.iter().fold(1, |product: u64, size| product.saturating_mul(*size as u64))
}

impl<'a> Tensor<'a> {
    /// Elements.
    pub fn elements(&self) -> u64 {
        elements(self.shape)
    }

    /// As a matrix whose rows run along the last dimension: rows and columns.
    pub fn matrix(&self) -> (usize, usize) {
        match self.shape {
            [] => (1, 1),
            [rows @ .., cols] => (elements(rows) as usize, *cols),
        }
    }

    /// The values, if the dtype is one that can be quantized.
    pub fn values(&self) -> Option<Values<'a>> {
        Values::new(self.dtype, self.data)
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` or `.gguf` file, or a checkpoint directory.
    ///
    /// A directory's weights are what its index lists (`model.safetensors.index.json`), or else `model.safetensors`, or
    /// else all its `.safetensors` files.
    ///
    /// # Errors
    /// Everything that is wrong with headers and index, naming file and tensor.
    pub fn open(path: &Path) -> Result<Self> {
        let directory = fs::metadata(path).map_err(Error::io("open", path))?.is_dir();
        let (index, shards, config, hf_quant_config) = if directory {
            let files = files_of(path)?;
            let index = Index::find(&files)?;
            let names = shard_names(path, &files, index.as_ref())?;
            let shards =
                names.into_iter().map(|name| Shard::open(path.join(&name), name)).collect::<Result<_>>()?;
            let config = Config::read(path, CONFIG_FILE)?;
            (index, shards, config, Config::read(path, modelopt::CONFIG_FILE)?)
        } else {
            let name = PathBuf::from(path.file_name().unwrap_or(path.as_os_str()));
            (None, vec![Shard::open(path.into(), name)?], None, None)
        };
        let places = places(&shards)?;
        let checkpoint =
            Self { path: path.into(), directory, shards, index, config, hf_quant_config, places };
        checkpoint.check_index()?;
        Ok(checkpoint)
    }

    /// Where a tensor's bytes are.
    pub(crate) fn origin(&self, tensor: &Tensor<'_>) -> Option<Origin<'_>> {
        let (shard, place) = *self.places.get(tensor.name)?;
        let shard = &self.shards[shard];
        let offset = shard.stored.get(place)?.range.start as u64;
        Some(Origin { file: &shard.path, offset })
    }

    /// Lets go of what is in memory of a tensor's bytes, as [`Shard::forget`] does.
    pub(crate) fn forget(&self, tensor: &Tensor<'_>) {
        if let Some((shard, _)) = self.places.get(tensor.name) {
            self.shards[*shard].forget(tensor.data);
        }
    }

    /// The path it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Files with weights.
    pub fn files(&self) -> usize {
        self.shards.len()
    }

    /// Every tensor, file by file, in the order of the data.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.shards.iter().flat_map(Shard::tensors)
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let (shard, place) = *self.places.get(name)?;
        self.shards[shard].tensor(place)
    }

    /// The convention that its quantized tensors are written by if nothing else is asked for: that of its container.
    pub fn own_convention(&self) -> FileConvention {
        let gguf = self.shards.iter().any(|shard| matches!(shard.container, Container::Gguf(_)));
        if gguf { FileConvention::Gguf } else { FileConvention::default() }
    }

    /// Makes sure that output by a convention is of the input's container.
    ///
    /// # Errors
    /// [`Error::OtherContainer`].
    pub(crate) fn check_container(&self, convention: FileConvention) -> Result<()> {
        let own = self.own_convention();
        if (own == FileConvention::Gguf) == (convention == FileConvention::Gguf) {
            return Ok(());
        }
        Err(Error::OtherContainer { path: self.path.clone(), convention, own })
    }

    /// Index and shards must list the same tensors in the same files.
    fn check_index(&self) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        let assigned: HashMap<_, _> = index.entries().collect();
        for shard in &self.shards {
            let (path, file) = (|| shard.path.clone(), || index.file.clone());
            for Stored { name, .. } in &shard.stored {
                let assigned = assigned.get(name.as_str());
                if assigned.is_none_or(|assigned| Path::new(assigned) != shard.name) {
                    let (tensor, assigned) = (name.clone(), assigned.map(|name| name.to_string()));
                    return Err(Error::NotInIndex { index: file(), tensor, shard: path(), assigned });
                }
            }
            let here = assigned.iter().filter(|(_, name)| Path::new(name) == shard.name);
            let in_shard: HashSet<&str> = shard.stored.iter().map(|stored| &*stored.name).collect();
            if let Some(missing) = here.map(|(name, _)| *name).filter(|name| !in_shard.contains(name)).min() {
                return Err(Error::NotInShard { index: file(), tensor: missing.into(), shard: path() });
            }
        }
        Ok(())
    }
}

impl Config {
    fn read(directory: &Path, name: &str) -> Result<Option<Self>> {
        let file = directory.join(name);
        Ok(if file.is_file() { Some(Self { json: json::read_object(&file)?, file }) } else { None })
    }
}

impl Shard {
    fn open(path: PathBuf, name: PathBuf) -> Result<Self> {
        // Opening a pipe would wait for its writer.
        let regular = fs::metadata(&path).map_err(Error::io("open", &path))?.is_file();
        if !regular {
            return Err(Error::Header { file: path, why: "it is not a regular file".into() });
        }
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        // SAFETY: the map is private and read-only, and the bytes are only ever read as integers and floats, for which
        // every bit pattern is valid. What remains is that nobody changes the file while it is mapped. We never do:
        // output goes to new files, never over the input. That other programs leave the file alone is asked of the
        // user, as by every reader that maps; one that truncates it ends the process with SIGBUS.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", &path))?;
        let by_name = path.extension().is_some_and(|extension| extension == "gguf");
        // No safetensors file starts so: its header would have a gigabyte.
        if by_name || map.starts_with(gguf::MAGIC) {
            let mut header = gguf::read(&path, &map)?;
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

    /// Lets go of what is in memory of a tensor's bytes, which are not needed for a while: or else all of a checkpoint
    /// counts as this program's memory by and by. The system may keep them for whoever reads them next.
    pub(crate) fn forget(&self, data: &[u8]) {
        #[cfg(unix)]
        {
            let start = data.as_ptr().addr().wrapping_sub(self.map.as_ptr().addr());
            if start > self.map.len() || data.len() > self.map.len() - start {
                return;
            }
            // SAFETY: the pages are a shared map of a file that is never written through it, so that whoever reads them
            // again has them from the file, the same bytes. That it stays unchanged is asked of the user,
            // as for the map itself.
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

    fn tensor(&self, place: usize) -> Option<Tensor<'_>> {
        self.mapped(self.stored.get(place)?)
    }

    fn mapped<'a>(&'a self, stored: &'a Stored) -> Option<Tensor<'a>> {
        let Stored { name, dtype, shape, range } = stored;
        let data = self.map.get(range.clone())?;
        Some(Tensor { name, dtype: *dtype, shape, data, file: &self.path })
    }
}

fn from_safetensors(header: &Metadata, data: usize) -> Vec<Stored> {
    let stored = header.offset_keys().into_iter().filter_map(|name| {
        let info = header.info(&name)?;
        let (start, end) = info.data_offsets;
        let (dtype, shape) = (info.dtype.into(), info.shape.clone());
        Some(Stored { name, dtype, shape, range: data + start..data + end })
    });
    stored.collect()
}

fn from_gguf(tensors: Vec<gguf::TensorInfo>) -> Vec<Stored> {
    let stored = tensors.into_iter().map(|gguf::TensorInfo { name, shape, kind, range }| Stored {
        name,
        dtype: kind.into(),
        shape,
        range,
    });
    stored.collect()
}

/// Where each tensor is. No two may have one name.
fn places(shards: &[Shard]) -> Result<HashMap<String, (usize, usize)>> {
    let mut places = HashMap::new();
    for (i, shard) in shards.iter().enumerate() {
        for (place, Stored { name, .. }) in shard.stored.iter().enumerate() {
            if let Some((first, _)) = places.insert(name.clone(), (i, place)) {
                let (first, second) = (shards[first].path.clone(), shard.path.clone());
                return Err(Error::Duplicate { tensor: name.clone(), first, second });
            }
        }
    }
    Ok(places)
}

/// The files directly in a directory, sorted.
fn files_of(directory: &Path) -> Result<Vec<PathBuf>> {
    let failed = || Error::io("list", directory);
    let entries = fs::read_dir(directory).map_err(failed())?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed())?.path();
        if !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The files with the weights, relative to the directory.
fn shard_names(directory: &Path, files: &[PathBuf], index: Option<&Index>) -> Result<Vec<PathBuf>> {
    let single = directory.join("model.safetensors");
    if let Some(index) = index {
        let shards = index.shards();
        let missing = shards.iter().find(|(shard, _)| !directory.join(shard).exists());
        if let Some((shard, tensor)) = missing {
            let (index, tensor, shard) = (index.file.clone(), tensor.to_string(), directory.join(shard));
            return Err(Error::MissingShard { index, tensor, shard });
        }
        // Loaders that look for the single file first would load that, unquantized, beside our output.
        if files.contains(&single) && !shards.iter().any(|(shard, _)| *shard == "model.safetensors") {
            return Err(Error::Ambiguous { first: index.file.clone(), second: single });
        }
        return Ok(shards.into_iter().map(|(shard, _)| shard.into()).collect());
    }
    let weights =
        files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    let weights: Vec<_> = weights.filter(|file| !files.contains(&single) || **file == single).collect();
    if weights.is_empty() {
        return Err(Error::NoWeights { path: directory.into() });
    }
    Ok(weights.into_iter().filter_map(|file| file.file_name()).map(PathBuf::from).collect())
}
