//! A checkpoint as a list of mapped tensors: a `.safetensors`, `.gguf` or PyTorch file, or a
//! directory in Hugging Face layout.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use microscale::device::Origin;

use crate::checkpoint_format::CheckpointFormat;
use crate::error::directory::DirectoryError;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::gguf::header::Header;
use crate::names::naming::Naming;
use crate::names::weight::WEIGHT;
use crate::read::config::{CONFIG_FILE, Config, HF_QUANT_CONFIG_FILE};
use crate::read::index::{Index, WHOLE, WHOLE_PICKLE};
use crate::read::indexed::{StaleIndex, Unread, follow, usable_index};
use crate::read::layer_words::{LayerWord, LayerWords};
use crate::read::position::Position;
use crate::read::shard::{Container, PICKLES, Shard, StoredTensor};
use crate::read::tensor::Tensor;

/// An open checkpoint. All headers are read and checked; the data is mapped and not read yet.
pub struct Checkpoint {
    pub(crate) path: PathBuf,
    pub(crate) directory: bool,
    pub(crate) shards: Vec<Shard>,
    pub(crate) index: Option<Index>,
    /// An index that is not read.
    pub(crate) stale_index: Option<StaleIndex>,
    /// Tensors of the shards that the index leaves out.
    pub(crate) unread: Vec<Unread>,
    pub(crate) config: Option<Config>,
    /// ModelOpt's hf_quant_config.json.
    pub(crate) hf_quant_config: Option<Config>,
    /// The roles of its layers and loaders' names for them, by config.json.
    pub(crate) naming: Naming,
    /// Words that its files have for the formats of layers.
    pub(crate) layer_words: LayerWords,
    /// Keys of file metadata that have such words. They are not copied to outputs.
    pub(crate) metadata_keys: Vec<&'static str>,
    /// Each tensor's shard, and its index there.
    pub(crate) places: HashMap<String, (usize, usize)>,
    pub(crate) options: OpenOptions,
    /// The sizes that the config gives blocks of codes under one scale, once they are asked for.
    pub(crate) scale_sizes: OnceLock<ScaleSizes>,
}

/// How a checkpoint is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Leaves files with other weights (PyTorch's, ONNX, consolidated ones) out of the files that
    /// are copied with a checkpoint.
    pub skip_other_weights: bool,
    /// Takes experts of a layer that lie in one tensor for tensors of their own, under the names
    /// that vLLM and SGLang look for: `experts.gate_up_proj` and `experts.down_proj`, as Qwen3.5
    /// and Llama 4 have them. No byte is copied.
    ///
    /// Parts that were made of split experts are merged with this option, too.
    pub split_experts: bool,
}

/// Sizes that a config gives blocks of codes under one scale.
pub(crate) struct ScaleSizes {
    /// Rows and columns of blocks.
    pub(crate) blocks: Vec<[usize; 2]>,
    /// Columns of groups within a row.
    pub(crate) groups: Vec<usize>,
}

/// Prints the path and the number of tensors.
impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut checkpoint = f.debug_struct("Checkpoint");
        checkpoint.field("path", &self.path).field("tensors", &self.places.len()).finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Reads everything that [`Checkpoint::open`] does, except for the words of layers.
    ///
    /// # Errors
    /// [`Error::Io`], or an error that names file and tensor if a header, the index or a JSON file
    /// is invalid, or if index and shards disagree.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let directory = fs::metadata(path).map_err(Error::io("open", path))?.is_dir();
        let mut stale_index = None;
        let (index, mut shards, config, hf_quant_config) = if directory {
            let files = files_of(path)?;
            let (index, stale) = usable_index(path, &files)?;
            stale_index = stale;
            let names = match &index {
                Some(index) => index.shards().into_iter().map(|(shard, _)| shard.into()).collect(),
                None => shard_names(path, &files)?,
            };
            let shards =
                names.into_iter().map(|name| Shard::open(path.join(&name), name)).collect::<Result<_>>()?;
            let config = Config::read(path, CONFIG_FILE)?;
            (index, shards, config, Config::read(path, HF_QUANT_CONFIG_FILE)?)
        } else {
            let name = PathBuf::from(path.file_name().unwrap_or(path.as_os_str()));
            (None, vec![Shard::open(path.into(), name)?], None, None)
        };
        check_written(&shards)?;
        let unread = match &index {
            Some(index) => follow(index, &mut shards)?,
            None => Vec::new(),
        };
        let places = places(&shards)?;
        let naming = config.as_ref().and_then(Config::model_type).map(Naming::of).unwrap_or_default();
        Ok(Self {
            path: path.into(),
            directory,
            shards,
            index,
            stale_index,
            unread,
            config,
            hf_quant_config,
            naming,
            layer_words: LayerWords::new(),
            metadata_keys: Vec::new(),
            places,
            options: OpenOptions::default(),
            scale_sizes: OnceLock::new(),
        })
    }

    /// The place of a stored tensor's bytes in its file, for devices that read it themselves.
    pub(crate) fn origin(&self, position: Position) -> Option<Origin<'_>> {
        let shard = self.shards.get(position.shard)?;
        let stored = shard.stored.get(position.tensor).filter(|stored| !stored.strided)?;
        Some(Origin { file: &shard.path, offset: stored.range.start as u64 })
    }

    /// Opens the file of a stored tensor again, as [`Shard::reopen`] does.
    pub(crate) fn reopen(&self, position: Position) -> Option<(File, u64)> {
        self.shards.get(position.shard)?.reopen(position.tensor)
    }

    /// Every stored tensor with its position, file by file, in the order of the data.
    pub(crate) fn positions(&self) -> impl Iterator<Item = (Position, Tensor<'_>)> {
        self.shards.iter().enumerate().flat_map(|(shard, file)| {
            file.tensors().enumerate().map(move |(tensor, stored)| (Position { shard, tensor }, stored))
        })
    }

    /// Releases the memory of a tensor's bytes, like [`Shard::forget`].
    pub(crate) fn forget(&self, tensor: &Tensor<'_>) {
        let scales = tensor.scaling.map(|scaling| (scaling.file, scaling.data));
        for (file, data) in [(tensor.file, tensor.data)].into_iter().chain(scales) {
            if let Some(shard) = self.shards.iter().find(|shard| shard.path == file) {
                shard.forget(data);
            }
        }
    }

    /// Releases the memory of several tensors.
    pub(crate) fn forget_all<'t>(&self, tensors: impl Iterator<Item = &'t Tensor<'t>>) {
        tensors.for_each(|tensor| self.forget(tensor));
    }

    /// Stores the shape of the model's parameter for a tensor of codes.
    pub(crate) fn keep_shape(&self, codes: &Tensor<'_>, shape: &[usize]) -> Option<&[usize]> {
        let (shard, place) = *self.places.get(codes.name)?;
        Some(self.shards[shard].stored.get(place)?.keep_shape(shape))
    }

    /// The path that it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of files with weights.
    pub fn files(&self) -> usize {
        self.shards.len()
    }

    /// All tensors, file by file, in the order of their data.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.shards.iter().flat_map(Shard::tensors)
    }

    /// The tensor with a name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let (shard, place) = *self.places.get(name)?;
        self.shards[shard].tensor(place)
    }

    /// Returns the word for the format of a layer, by the name of its weight.
    pub(crate) fn layer_word(&self, weight: &str) -> Option<&LayerWord> {
        self.layer_words.get(weight.strip_suffix(WEIGHT)?)
    }

    /// The checkpoint format to write quantized tensors in by default: the default of its
    /// container.
    pub fn own_format(&self) -> CheckpointFormat {
        let gguf = self.shards.iter().any(|shard| matches!(shard.container, Container::Gguf(_)));
        if gguf { CheckpointFormat::Gguf } else { CheckpointFormat::default() }
    }

    /// The `model_type` of its config.json, if that architecture is unknown.
    ///
    /// For unknown architectures names decide which layers are quantized.
    pub fn unknown_architecture(&self) -> Option<&str> {
        let config = self.config.as_ref().filter(|_| !self.naming.is_known())?;
        config.model_type()
    }

    /// The architecture of the model in a GGUF file.
    pub(crate) fn gguf_architecture(&self) -> Option<&str> {
        self.gguf_headers().map(|(_, header)| header.architecture()).find(|name| !name.is_empty())
    }

    /// The headers of GGUF files. In a split model the first file has metadata that the others
    /// lack.
    pub(crate) fn gguf_headers(&self) -> impl Iterator<Item = (&Shard, &Header)> {
        self.shards.iter().filter_map(|shard| match &shard.container {
            Container::Gguf(header) => Some((shard, &**header)),
            Container::Safetensors(_) => None,
        })
    }

    /// Checks that a checkpoint format uses the input's container.
    ///
    /// # Errors
    /// [`FormatError::OtherContainer`](crate::FormatError::OtherContainer) if it does not.
    pub(crate) fn check_container(&self, checkpoint_format: CheckpointFormat) -> Result<()> {
        let own = self.own_format();
        if (own == CheckpointFormat::Gguf) == (checkpoint_format == CheckpointFormat::Gguf) {
            return Ok(());
        }
        Err(Error::Format(FormatError::OtherContainer { path: self.path.clone(), checkpoint_format, own }))
    }
}

/// Checks that no two shards have the same output name.
fn check_written(shards: &[Shard]) -> Result<()> {
    let mut written = HashMap::new();
    for shard in shards {
        if let Some(first) = written.insert(shard.written_name(), shard) {
            let (first, second) = (first.path.clone(), shard.path.clone());
            return Err(Error::Directory(DirectoryError::Ambiguous { first, second }));
        }
    }
    Ok(())
}

/// The shard and index of each tensor, by name. Names must be unique.
pub(crate) fn places(shards: &[Shard]) -> Result<HashMap<String, (usize, usize)>> {
    let mut places = HashMap::new();
    for (i, shard) in shards.iter().enumerate() {
        for (place, StoredTensor { name, .. }) in shard.stored.iter().enumerate() {
            if let Some((first, _)) = places.insert(name.clone(), (i, place)) {
                let (first, second) = (shards[first].path.clone(), shard.path.clone());
                return Err(Error::Directory(DirectoryError::Duplicate {
                    tensor: name.clone(),
                    first,
                    second,
                }));
            }
        }
    }
    Ok(places)
}

/// Name prefixes of PyTorch files without weights, which training programs write.
const NO_WEIGHTS: [&str; 5] = ["training_args", "optimizer", "scheduler", "scaler", "rng_state"];

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

/// The files with weights, relative to the directory, without an index.
fn shard_names(directory: &Path, files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let single = directory.join(WHOLE);
    let called = |extension: &'static str| {
        files.iter().filter(move |file| file.extension().is_some_and(|found| found == extension))
    };
    let weights = called("safetensors").filter(|file| !files.contains(&single) || **file == single);
    let mut weights: Vec<_> = weights.collect();
    if weights.is_empty() {
        // A split model has several files.
        weights = called("gguf").collect();
    }
    if weights.is_empty() {
        let of_training = |file: &Path| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            NO_WEIGHTS.iter().any(|start| name.starts_with(start))
        };
        let single = directory.join(WHOLE_PICKLE);
        let pickles = PICKLES.iter().flat_map(|extension| called(extension));
        let pickles = pickles.filter(|file| !files.contains(&single) || **file == single);
        weights = pickles.filter(|file| !of_training(file)).collect();
    }
    if weights.is_empty() {
        return Err(Error::Directory(DirectoryError::NoWeights { path: directory.into() }));
    }
    Ok(weights.into_iter().filter_map(|file| file.file_name()).map(PathBuf::from).collect())
}
