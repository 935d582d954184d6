//! What can go wrong with checkpoint files. Every variant names the file, the tensor where there is one, and what to change.

use std::io;
use std::path::{Path, PathBuf};

use microscale::{Format, ScaleLayout, Search, Words};

use crate::{FileConvention, FileDtype, glob};

/// The result of the library's checkpoint operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint could not be read, rewritten or compared.
///
/// `Display` says one thing; the cause, where there is one, is the [`source`](std::error::Error::source).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },

    /// Not a safetensors file, or a damaged one.
    #[error("{} is not a valid safetensors file: {why}; download or write it again", .file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong with its header.
        why: String,
    },

    /// A header that describes a tensor wrongly.
    #[error("{} is not a valid safetensors file: tensor {tensor}: {why}; download or write it again", .file.display())]
    HeaderTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },

    /// Not a GGUF file, or a damaged one, or one that ggml would not read either.
    #[error("{} is not a valid GGUF file: {why}; download or write it again", .file.display())]
    Gguf {
        /// The file.
        file: PathBuf,
        /// What is wrong with its header, and with which metadata key if it is one.
        why: String,
    },

    /// A header of GGUF that describes a tensor wrongly.
    #[error("{} is not a valid GGUF file: tensor {tensor}: {why}; download or write it again", .file.display())]
    GgufTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },

    /// A tensor that a GGUF file cannot hold.
    #[error("{}: GGUF cannot hold tensor {tensor}: {why}; leave it as it is with --exclude, or rename it", .file.display())]
    NotInGguf {
        /// The file to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is in the way.
        why: String,
    },

    /// A tensor that a safetensors file cannot hold.
    #[error("{}: safetensors files cannot hold tensor {tensor}, which is {dtype}", .file.display())]
    NotInSafetensors {
        /// The file to be written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: FileDtype,
    },

    /// Output in another container than the input's.
    #[error("{} cannot be written as {}: names and metadata of GGUF files and of safetensors checkpoints are not each other's; choose {} \
         (llama.cpp's convert_hf_to_gguf makes GGUF files of checkpoints, quantized ones too)", .path.display(), .convention.word(),
         .own.word())]
    OtherContainer {
        /// The input.
        path: PathBuf,
        /// The convention asked for.
        convention: FileConvention,
        /// The one that the input's container has.
        own: FileConvention,
    },

    /// A block scale that the output cannot hold.
    #[error("{}: tensor {tensor}: block {block} has scale byte {byte:#04x}, which {} has for no number; quantize with --non-finite \
         error or saturate", .file.display(), .convention.word())]
    Unheld {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The block, counted from 0 over all rows.
        block: usize,
        /// Its scale.
        byte: u8,
        /// The convention asked for.
        convention: FileConvention,
    },

    /// A JSON file that is not JSON.
    #[error("{} is not valid JSON", .file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },

    /// A JSON file that holds something else than it should.
    #[error("{}: {why}", .file.display())]
    JsonContent {
        /// The file.
        file: PathBuf,
        /// What was expected.
        why: &'static str,
    },

    /// A directory without weights.
    #[error("{} holds no *.safetensors file; name a checkpoint directory or a .safetensors file", .path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
    },

    /// Two sets of weights in one directory.
    #[error("{} and {} both claim to be the weights; remove one of them", .first.display(), .second.display())]
    Ambiguous {
        /// One.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },

    /// An index that names a shard outside its directory.
    #[error(
        "{}: tensor {tensor} is said to be in {shard:?}, which is not a path inside the checkpoint; correct the index",
        .index.display()
    )]
    ShardPath {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The path that was refused.
        shard: String,
    },

    /// An index that names a shard that is not there.
    #[error("the shard {} is missing, and {} expects tensor {tensor} in it; complete the download",
        .shard.display(), .index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The first tensor that should be in the shard.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },

    /// An index that names a tensor that its shard lacks.
    #[error("{} lacks tensor {tensor}, which {} expects there; the index and the shard are of different checkpoints",
        .shard.display(), .index.display())]
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },

    /// A shard with a tensor that the index does not put there.
    #[error("{} holds tensor {tensor}, which {} {}; the index and the shard are of different checkpoints",
        .shard.display(), .index.display(), elsewhere(.assigned))]
    NotInIndex {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
        /// The shard that the index names for it.
        assigned: Option<String>,
    },

    /// The same tensor in two files.
    #[error("tensor {tensor} is both in {} and in {}; remove one of the files", .first.display(), .second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },

    /// The input is quantized already.
    #[error("{} has a quantization_config ({method}): the checkpoint is quantized already; dequantize it first, or \
         start from the original", .config.display())]
    AlreadyQuantized {
        /// The config.json.
        config: PathBuf,
        /// Its quant_method.
        method: String,
    },

    /// A name that the output needs is taken.
    #[error("{}: tensor {tensor} becomes {name}, but there is a tensor of that name; rename it, or leave {tensor} out \
         with --exclude", .file.display())]
    NameTaken {
        /// The file of the tensor.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name that is taken.
        name: String,
    },

    /// Packed codes without their scales, parts that do not fit each other, or a format that is not known.
    #[error("{}: tensor {tensor}: {why}", .file.display())]
    Packed {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        why: String,
    },

    /// A format that a convention of files lacks.
    #[error("{}, the convention of files, has no {format}; {}", .convention.word(), with_format(*.convention, *.format))]
    NotStored {
        /// The convention.
        convention: FileConvention,
        /// The format.
        format: Format,
    },

    /// Scales in another order than checkpoint files have.
    #[error("checkpoint files hold block scales in linear order, not {}; leave the recipe's scale layout linear",
        .layout.word())]
    ScaleLayout {
        /// The order asked for.
        layout: ScaleLayout,
    },

    /// A quantized tensor that another convention cannot hold as it is.
    #[error("{}: tensor {tensor}: gpt-oss stores a layer's parameter transposed, with blocks along its inputs, which {} does \
         not; dequantize, and quantize again with --out-convention {}", .file.display(), .to.word(), .to.word())]
    NotConverted {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The convention asked for.
        to: FileConvention,
    },

    /// A file of global scales that lacks one.
    #[error("{} has no global scale for tensor {tensor}; call it {tensor}, {tensor}_global_scale (a divisor) or \
         {tensor}_scale_2 (a multiplier), or leave {tensor} out with --exclude", .file.display())]
    NoGlobalScale {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },

    /// A file with two global scales for one tensor.
    #[error("{} has two global scales for tensor {tensor}, {first} and {second}; remove one", .file.display())]
    GlobalScaleTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of one.
        first: String,
        /// The name of the other.
        second: String,
    },

    /// Weights by column, and no search that they could weight.
    #[error(
        "importance weights the errors of a search for block scales; search for them with --search four-six, window or full"
    )]
    ImportanceUnused,

    /// A file with two vectors of weights for one tensor.
    #[error("{} has two vectors of importance for tensor {tensor}, {first} and {second}; remove one", .file.display())]
    ImportanceTwice {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name of one.
        first: String,
        /// The name of the other.
        second: String,
    },

    /// Weights by column that are no vector of floats with the tensor's columns.
    #[error(
        "{}: tensor {name} must be a vector of {columns} numbers (F32, F16 or BF16), one for each column of {tensor}, but is \
         {dtype} of shape {shape:?}; write one number a column, or leave it out", .file.display()
    )]
    ImportanceShape {
        /// The file.
        file: PathBuf,
        /// The tensor in it.
        name: String,
        /// The tensor that it is for.
        tensor: String,
        /// The columns of that.
        columns: usize,
        /// The dtype found.
        dtype: FileDtype,
        /// The shape found.
        shape: Vec<usize>,
    },

    /// A weight that is negative or not finite.
    #[error(
        "{}: tensor {name} has the number {weight} for column {column} of {tensor}; importance must be finite and not negative, \
         such as mean squared activations are", .file.display()
    )]
    ImportanceNumber {
        /// The file.
        file: PathBuf,
        /// The tensor in it.
        name: String,
        /// The tensor that it is for.
        tensor: String,
        /// The column, counted from 0.
        column: usize,
        /// The number found.
        weight: f32,
    },

    /// A search for global scales with a recipe that leaves nothing to search.
    #[error(
        "the global scale is searched for nvfp4, where it follows from amax and block scales are searched too, but {why}; choose \
         --format nvfp4 with --search four-six, window or full and without --global-scale, or leave out --search-global"
    )]
    NoGlobalSearch {
        /// What stands against it.
        why: String,
    },

    /// Checking a search that does not look for the best of all scales.
    #[error(
        "only a full search looks for the best of all scales, and this is {}; choose --search full, or leave out --check-search",
        .search.word()
    )]
    NothingToCheck {
        /// The search.
        search: Search,
    },

    /// Two checkpoints whose tensors of one name have different shapes.
    #[error("tensor {tensor} has shape {first_shape:?} in {} and {second_shape:?} in {}; compare checkpoints of the same model",
        .first.display(), .second.display())]
    ShapeMismatch {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// Its shape there.
        first_shape: Vec<usize>,
        /// The other file.
        second: PathBuf,
        /// Its shape there.
        second_shape: Vec<usize>,
    },

    /// A tensor that could not be quantized or dequantized.
    #[error("{}: tensor {tensor}", .file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why.
        source: Box<microscale::Error>,
    },

    /// Nothing was selected.
    #[error("{} has no tensor to quantize; select some with --include, and see with --dry-run why each is copied",
        .path.display())]
    NothingToQuantize {
        /// The input.
        path: PathBuf,
    },

    /// Nothing is quantized.
    #[error("{} has no quantized tensor under the names of a known convention ({}); there is nothing to {doing}",
        .path.display(), all_words::<FileConvention>())]
    NothingPacked {
        /// What was asked for.
        doing: &'static str,
        /// The input.
        path: PathBuf,
    },

    /// Shards that no part has made, or not to the end.
    #[error("{} of {of} shards are not in {}, or not complete: {}; run the parts again that make them, each with the same input \
         and options", .shards.len(), .directory.display(), first_of(.shards))]
    PartsMissing {
        /// Where they should be.
        directory: PathBuf,
        /// The shards.
        shards: Vec<PathBuf>,
        /// How many there should be.
        of: usize,
    },

    /// Shards of different plans.
    #[error("{}: {} and {} were made with different options, from different inputs or by different versions; remove the \
         directory and run all parts again", .directory.display(), .first.display(), .second.display())]
    PartsDiffer {
        /// Where they are.
        directory: PathBuf,
        /// One shard.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },

    /// The output is there already.
    #[error("{} exists; name an output that does not{}", .path.display(),
        if .path.is_dir() { ", or an empty directory" } else { "" })]
    OutputExists {
        /// The output.
        path: PathBuf,
    },

    /// A directory was asked for and a file given, or the other way round.
    #[error("{} is a directory, but the input is a file: the output must be a file too", .path.display())]
    OutputKind {
        /// The output.
        path: PathBuf,
    },

    /// The output's directory is not there.
    #[error("there is no directory {} to write {} into; create it first", .parent.display(), .path.display())]
    OutputParent {
        /// The output.
        path: PathBuf,
        /// The missing directory.
        parent: PathBuf,
    },

    /// Input and output are the same, or one holds the other.
    #[error("the output {} {} the input {}; name another output", .output.display(),
        overlap(.input, .output), .input.display())]
    Overlap {
        /// The input, with symbolic links resolved.
        input: PathBuf,
        /// The output, likewise.
        output: PathBuf,
    },

    /// A recipe file that is wrong, or whose settings do not go together.
    #[error("{place}: {why}")]
    RecipeFile {
        /// The file and the line.
        place: String,
        /// What is wrong, and what could stand there.
        why: String,
    },

    /// Settings of a command line that do not go together.
    #[error("{why}")]
    Settings {
        /// What is wrong, and what to choose.
        why: String,
    },

    /// A preset that there is not.
    #[error(
        "no recipe that comes with the program is called {name:?}; there are {}. A file ends with .toml or is named with its \
         directory, such as ./{name}",
        all_presets()
    )]
    NoPreset {
        /// What it was called.
        name: String,
    },

    /// Layers that engines make one of, with recipes that differ in more than one layer can have.
    #[error(
        "{}: serving engines make one layer of {first} ({}) and {second} ({}); give both the same recipe: match \
         {pattern:?} in one rule", .file.display(), .recipes[0], .recipes[1]
    )]
    FusedDiffer {
        /// The file of the second.
        file: PathBuf,
        /// One layer's weight.
        first: String,
        /// Another's.
        second: String,
        /// How each is to be quantized.
        recipes: Box<[String; 2]>,
        /// What matches both.
        pattern: String,
    },

    /// A pattern that is not a glob, or too long.
    #[error("{} is not a pattern of tensor names: {why}", glob::shown(.pattern))]
    Glob {
        /// The pattern.
        pattern: String,
        /// Why.
        why: String,
    },

    /// A GPU that works no more.
    #[error("the device cannot be made ready; choose another with --device")]
    Device(#[source] microscale::Error),

    /// The caller asked to stop.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl Error {
    /// A tensor that the library's tensor operations refused.
    pub(crate) fn tensor(file: &Path, tensor: &str, source: microscale::Error) -> Self {
        Self::Tensor { file: file.into(), tensor: tensor.into(), source: source.into() }
    }

    /// For `map_err`: what was tried with which path.
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_path_buf(), source }
    }
}

/// The words of a type, in a list.
fn all_words<T: Words>() -> String {
    T::WORDS.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ")
}

/// The names of the presets, in a list.
fn all_presets() -> String {
    super::presets().iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ")
}

/// What can be chosen where a convention lacks a format.
fn with_format(convention: FileConvention, format: Format) -> String {
    let formats: Vec<_> = convention.formats().map(Words::word).collect();
    let others = FileConvention::WORDS.iter().filter(|(_, other)| other.formats().any(|has| has == format));
    let others: Vec<_> = others.map(|(word, _)| *word).collect();
    let others = match others.as_slice() {
        [] => "and no other has it (the library quantizes single tensors to it)".into(),
        others => format!("or a convention that has it: {}", others.join(", ")),
    };
    format!("choose among its formats ({}), {others}", formats.join(", "))
}

/// The first few of many paths.
fn first_of(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths.iter().take(3).map(|path| path.display().to_string()).collect();
    format!("{}{}", shown.join(", "), if paths.len() > 3 { ", …" } else { "" })
}

fn elsewhere(assigned: &Option<String>) -> String {
    assigned.as_ref().map_or("does not list".into(), |shard| format!("expects in {shard}"))
}

fn overlap(input: &Path, output: &Path) -> &'static str {
    if input == output {
        "is"
    } else if output.starts_with(input) {
        "lies inside"
    } else {
        "holds"
    }
}
