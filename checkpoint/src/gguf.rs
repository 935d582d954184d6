//! GGUF, the container of ggml and llama.cpp: one file with metadata, tensors, and blocks that hold their scales.
//!
//! | file | what it knows |
//! |---|---|
//! | `types` | ggml's tensor types: names, elements and bytes a block |
//! | `cursor`, `value`, `header` | reading: every count, length and offset is checked before it is believed |
//! | `metadata`, `write` | writing: metadata as it was, tensors at their places in whatever order they come |
//! | `blocks` | MXFP4 and NVFP4 between our codes and scales and ggml's blocks |
//!
//! Versions 2 and 3, little-endian. What ggml refuses is refused here too, and so is what would not be worth its
//! danger: strings and alignments beyond any use.

use microscale::Format;
use microscale::formats::nvfp4::Direction;

mod blocks;
mod cursor;
mod header;
mod metadata;
mod types;
mod value;
mod write;

#[cfg(test)]
mod draft;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod hostile_tests;

pub(crate) use blocks::Blocks;
pub(crate) use header::{Header, TensorInfo, read};
pub(crate) use metadata::{FileType, Metadata};
pub use types::GgmlType;
pub(crate) use write::{Outline, create};

use crate::convention::{FileConvention, Numbers, Storage, StoredGlobal};
use crate::dtype::FileDtype;

/// A tensor's global scale, with which llama.cpp multiplies what a layer gives.
const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::beside(".scale", Direction::Multiplier, Numbers::EachExpert).or_one();
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::beside(".input_scale", Direction::Multiplier, Numbers::EachExpert);

/// The formats that the convention has.
pub(crate) const STORED: &[Storage] = &[
    Storage {
        convention: FileConvention::Gguf,
        format: Format::Mxfp4,
        codes_suffix: "",
        codes: FileDtype::Ggml(GgmlType::MXFP4),
        scales_suffix: "",
        scales: FileDtype::U8,
        global_scale: None,
        input_scale: None,
        blocks: Some(Blocks::Mxfp4),
        blocks_apart: false,
        transposed: false,
    },
    Storage {
        convention: FileConvention::Gguf,
        format: Format::Nvfp4,
        codes_suffix: "",
        codes: FileDtype::Ggml(GgmlType::NVFP4),
        scales_suffix: "",
        scales: FileDtype::F8_E4M3,
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        blocks: Some(Blocks::Nvfp4),
        blocks_apart: false,
        transposed: false,
    },
];

/// What every file starts with.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// The version that is written. Version 2 differs in nothing that is read here.
const VERSION: u32 = 3;

/// Where the data starts, and each tensor in it, if the metadata does not say.
const DEFAULT_ALIGNMENT: u64 = 32;

/// A name's most bytes: ggml's 64, with a zero at the end.
const MAX_NAME: usize = 63;

/// A shape's most dimensions.
const MAX_DIMS: usize = 4;

/// The keys with a meaning here.
const ALIGNMENT: &str = "general.alignment";
#[cfg(test)]
const ARCHITECTURE: &str = "general.architecture";
const FILE_TYPE: &str = "general.file_type";
const QUANTIZATION_VERSION: &str = "general.quantization_version";

/// What parsing gives: the error is a sentence about what is wrong, to which others add the file, and the tensor or key.
type Parsed<T> = Result<T, String>;
