//! Errors of storage: tensors stored in no known way, and requests that no checkpoint format can store.

use std::path::PathBuf;

use microscale::{Dtype, Format, Position, ScaleLayout, Words};

use crate::checkpoint_format::CheckpointFormat;
use crate::dtype::FileDtype;
use crate::reason::Reason;

/// An error about storage: a tensor stored in no known way, or one that no checkpoint format can store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Output in another container than the input's.
    #[error(
        "{} cannot be written as {}: names and metadata of GGUF files and of safetensors checkpoints are \
         not each other's; choose {} (llama.cpp's convert_hf_to_gguf makes GGUF files of checkpoints, \
         quantized ones too)",
        .path.display(), .convention.word(), .own.word()
    )]
    OtherContainer {
        /// The input.
        path: PathBuf,
        /// The convention asked for.
        convention: CheckpointFormat,
        /// The one that the input's container has.
        own: CheckpointFormat,
    },

    /// A value that Q8_0 has no number for.
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
        /// The value: NaN, an infinity, or one from 8,321,040 on.
        found: f32,
    },

    /// Values that are not finite in the dtype that they are written in.
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
        /// Its largest number.
        most: f32,
        /// The first value that is not finite.
        first: Position,
        /// The tensor's infinite values.
        infinite: u64,
        /// The tensor's NaN.
        nan: u64,
    },

    /// A block scale that the output cannot hold.
    #[error(
        "{}: tensor {tensor}: block {block} has scale byte {byte:#04x}, which {} has for no number; \
         quantize with --non-finite error or saturate",
        .file.display(), .convention.word()
    )]
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
        convention: CheckpointFormat,
    },

    /// Packed codes without their scales, parts that do not fit each other, or a format that is not known.
    #[error("{}: tensor {tensor}: {why}", .file.display())]
    Packed {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },

    /// A format that a checkpoint format lacks.
    #[error("{}, the checkpoint format, has no {format}; {instead}", .convention.word())]
    NotStored {
        /// The convention.
        convention: CheckpointFormat,
        /// The format.
        format: Format,
        /// The alternatives, in words.
        instead: String,
    },

    /// Scales in another order than checkpoint files have.
    #[error(
        "checkpoint files hold block scales in linear order, not {}; leave the recipe's scale layout linear",
        .layout.word()
    )]
    ScaleLayout {
        /// The order asked for.
        layout: ScaleLayout,
    },

    /// A quantized tensor that another convention cannot hold as it is.
    #[error("{}: tensor {tensor}: gpt-oss' files hold the transpose of a parameter of all experts of a layer; {}", .file.display(), instead(*.to))]
    NotConverted {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The convention asked for.
        to: CheckpointFormat,
    },

    /// A quantized tensor of sizes that another convention cannot hold.
    #[error(
        "{}: tensor {tensor}: {reason}, as {} needs it; keep the tensor as it is by dequantizing it, and quantize the others again",
        .file.display(), .to.word()
    )]
    NotHeld {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The convention asked for.
        to: CheckpointFormat,
        /// The reason.
        reason: Reason,
    },

    /// A cast that would not keep every value.
    #[error("{}: tensor {tensor}: {why}, as --requantize does", .file.display())]
    NotExact {
        /// The input.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason: [`NotCast`](microscale::Error::NotCast), [`NotExact`](microscale::Error::NotExact) or
        /// [`NotExactBlock`](microscale::Error::NotExactBlock).
        why: Box<microscale::Error>,
    },

    /// Values that FP8 cannot hold under a scale for each 128×128.
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
        /// Blocks that are not exact.
        blocks: u64,
        /// All blocks.
        of: u64,
    },

    /// A convention that casts to a format of its own, with another format.
    #[error("{} is FP8 (E4M3) and no {format}; leave the format out", .convention.word())]
    OwnFormat {
        /// The convention.
        convention: CheckpointFormat,
        /// The format asked for.
        format: Format,
    },

    /// Codes of eight bits under scales, which are read and not written, and whose values bf16 cannot hold.
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
        /// The convention asked for.
        to: CheckpointFormat,
    },

    /// Experts in one tensor that cannot be taken one by one.
    #[error("{}: tensor {tensor}: its experts cannot be split: {why}", .file.display())]
    NotSplit {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The reason.
        why: String,
    },

    /// No experts in one tensor.
    #[error(
        "{} has no experts of a layer in one tensor (experts.gate_up_proj, experts.down_proj); leave the splitting of experts out",
        .path.display()
    )]
    NothingToSplit {
        /// The input.
        path: PathBuf,
    },

    /// Nothing is quantized.
    #[error(
        "{} has no quantized tensor under the names of a known convention ({}); there is nothing to {doing}",
        .path.display(), all_words::<CheckpointFormat>()
    )]
    NothingPacked {
        /// The operation asked for.
        doing: &'static str,
        /// The input.
        path: PathBuf,
    },
}

/// The words of a type, in a list.
fn all_words<T: Words>() -> String {
    T::WORDS.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ")
}

/// The alternative to converting from gpt-oss' files, or to them, in words.
fn instead(to: CheckpointFormat) -> String {
    match to {
        CheckpointFormat::GptOss => {
            "a model of that architecture can be dequantized, and quantized again with --out-convention gpt-oss".into()
        }
        to => format!(
            "{} does not, and no loader is known that would read gpt-oss by it: keep these files, or dequantize them to bf16",
            to.word()
        ),
    }
}
