//! Errors of storage: unreadable tensors, and requests that no checkpoint format can store.

use std::path::PathBuf;

use microscale::{Dtype, Format, Position, ScaleLayout, Words};

use crate::checkpoint_format::CheckpointFormat;
use crate::dtype::FileDtype;
use crate::reason::Reason;

/// A tensor is stored in an unknown way, or a checkpoint format cannot store it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The checkpoint format needs another container than the input's.
    #[error(
        "{} cannot be written as {}: names and metadata of GGUF files and of safetensors checkpoints are \
         not each other's; choose {} (llama.cpp's convert_hf_to_gguf makes GGUF files of checkpoints, \
         quantized ones too)",
        .path.display(), .checkpoint_format.word(), .own.word()
    )]
    OtherContainer {
        /// The input.
        path: PathBuf,
        /// The requested checkpoint format.
        checkpoint_format: CheckpointFormat,
        /// The checkpoint format of the input's container.
        own: CheckpointFormat,
    },

    /// Q8_0 cannot represent a value.
    #[error(
        "{}: tensor {tensor} has the value {found} in row {row}, column {col}, which q8_0 has no number for; leave the tensor as it \
         is with --exclude",
        .file.display()
    )]
    NotInQ8_0 {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The row, counted from 0.
        row: usize,
        /// The column, counted from 0.
        col: usize,
        /// The value: NaN, an infinity, or a magnitude of at least 8,321,040.
        found: f32,
    },

    /// Values are not finite in the dtype that they are written in.
    #[error(
        "{}: tensor {tensor}: in {}, whose largest number is {most}, {} of its values are infinite and {} are NaN, the first in row {}, \
         column {}; choose another dtype, or let `quantize` or `dequantize` write them with --non-finite saturate or propagate",
        .file.display(), .dtype.word(), .infinite, .nan, .first.row, .first.col
    )]
    NotFinite {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The dtype.
        dtype: Dtype,
        /// The largest number of the dtype.
        most: f32,
        /// The first value that is not finite.
        first: Position,
        /// The number of infinite values in the tensor.
        infinite: u64,
        /// The number of NaN in the tensor.
        nan: u64,
    },

    /// The checkpoint format cannot store a block scale.
    #[error(
        "{}: tensor {tensor}: block {block} has scale byte {byte:#04x}, which {} has for no number; \
         quantize with --non-finite error or saturate",
        .file.display(), .checkpoint_format.word()
    )]
    Unheld {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The block, counted from 0 over all rows.
        block: usize,
        /// The scale byte.
        byte: u8,
        /// The requested checkpoint format.
        checkpoint_format: CheckpointFormat,
    },

    /// Packed codes lack their scales, parts do not fit each other, or the format is unknown.
    #[error("{}: tensor {tensor}: {why}", .file.display())]
    Packed {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },

    /// Weights or activations are transformed, and the result of an operation would not say so.
    #[error("{}: {what} says that layers are stored or computed under a transform, which {doing} would lose; {instead}", .file.display())]
    Transformed {
        /// The file that declares the transform.
        file: PathBuf,
        /// The entry or the tensor that declares it.
        what: String,
        /// The operation, in words.
        doing: String,
        /// The alternative, in words.
        instead: String,
    },

    /// The checkpoint format does not have the format.
    #[error("{}, the checkpoint format, has no {format}; {instead}", .checkpoint_format.word())]
    NotStored {
        /// The checkpoint format.
        checkpoint_format: CheckpointFormat,
        /// The format.
        format: Format,
        /// The alternatives, in words.
        instead: String,
    },

    /// Scales are not in the linear order that checkpoint files use.
    #[error(
        "checkpoint files hold block scales in linear order, not {}; leave the recipe's scale layout linear",
        .layout.word()
    )]
    ScaleLayout {
        /// The requested order.
        layout: ScaleLayout,
    },

    /// Another checkpoint format cannot store the quantized tensor.
    #[error("{}: tensor {tensor}: gpt-oss' files hold the transpose of a parameter of all experts of a layer; {}", .file.display(), instead(*.to))]
    NotConverted {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The requested checkpoint format.
        to: CheckpointFormat,
    },

    /// Another checkpoint format cannot store a quantized tensor of this size.
    #[error(
        "{}: tensor {tensor}: {reason}, as {} needs it; keep the tensor as it is by dequantizing it, and quantize the others again",
        .file.display(), .to.word()
    )]
    NotHeld {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The requested checkpoint format.
        to: CheckpointFormat,
        /// The reason.
        reason: Reason,
    },

    /// A cast would change values.
    #[error("{}: tensor {tensor}: {why}, as --requantize does", .file.display())]
    NotExact {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason: [`NotCast`](microscale::Error::NotCast),
        /// [`NotExact`](microscale::Error::NotExact) or
        /// [`NotExactBlock`](microscale::Error::NotExactBlock).
        why: Box<microscale::Error>,
    },

    /// FP8 with one scale per 128×128 block cannot represent the values.
    #[error(
        "{}: tensor {tensor}: {blocks} of {of} blocks of 128×128 have values that no power of two as their scale makes exact in \
         FP8 (E4M3), so it is not cast to {}; --requantize rounds these blocks",
        .file.display(), CheckpointFormat::Fp8Block.word()
    )]
    NotExactBlocks {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The number of blocks that are not exact.
        blocks: u64,
        /// The number of all blocks.
        of: u64,
    },

    /// The checkpoint format implies a format, and another one was requested.
    #[error("{} is FP8 (E4M3) and no {format}; leave the format out", .checkpoint_format.word())]
    OwnFormat {
        /// The checkpoint format.
        checkpoint_format: CheckpointFormat,
        /// The requested format.
        format: Format,
    },

    /// FP8 or INT8 weights of a format that is read-only, with values that bf16 cannot hold.
    #[error(
        "{}: tensor {tensor}: {dtype} under scales is not written by {}, and its values are not exact in bf16, for its \
         scales are no powers of two that bf16 can hold; quantize the checkpoint anew, or round them with --requantize",
        .file.display(), .to.word()
    )]
    Scaled {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The dtype of the codes.
        dtype: FileDtype,
        /// The requested checkpoint format.
        to: CheckpointFormat,
    },

    /// A tensor that holds all experts of a layer cannot be split.
    #[error("{}: tensor {tensor}: its experts cannot be split: {why}", .file.display())]
    NotSplit {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },

    /// No tensor holds all experts of a layer.
    #[error(
        "{} has no experts of a layer in one tensor (experts.gate_up_proj, experts.down_proj); leave the splitting of experts out",
        .path.display()
    )]
    NothingToSplit {
        /// The input.
        path: PathBuf,
    },

    /// No tensor is quantized.
    #[error(
        "{} has no quantized tensor under the names of a known checkpoint format ({}); {}",
        .path.display(), all_words::<CheckpointFormat>(),
        .advice.map_or_else(|| format!("there is nothing to {doing}"), String::from)
    )]
    NothingPacked {
        /// The requested operation.
        doing: &'static str,
        /// The input.
        path: PathBuf,
        /// The alternatives, if the config says that the weights are quantized.
        advice: Option<&'static str>,
    },

    /// No tensor of a checkpoint to check is quantized.
    #[error(
        "{} is unquantized, and only quantized checkpoints are checked; quantize it first, or name \
         the quantized checkpoint",
        .path.display()
    )]
    Unquantized {
        /// The input.
        path: PathBuf,
    },

    /// All quantized tensors are FP8 or INT8 under scales, which are not converted.
    #[error(
        "{}: its {tensors} quantized tensors are {dtype} under scales, and only MXFP4, NVFP4 and MXFP8 are converted; `quantize` takes \
         them as input, and `dequantize` writes their values",
        .path.display()
    )]
    OnlyScaled {
        /// The input.
        path: PathBuf,
        /// The number of such tensors.
        tensors: usize,
        /// The dtype of the first one.
        dtype: FileDtype,
    },
}

/// The words of a type as a list.
fn all_words<T: Words>() -> String {
    T::WORDS.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ")
}

/// The alternative to converting to or from gpt-oss files, in words.
fn instead(to: CheckpointFormat) -> String {
    match to {
        CheckpointFormat::GptOss => {
            "a model of that architecture can be dequantized, and quantized again with --to gpt-oss".into()
        }
        to => format!(
            "{} does not, and no loader is known that would read gpt-oss by it: keep these files, or dequantize them to bf16",
            to.word()
        ),
    }
}
