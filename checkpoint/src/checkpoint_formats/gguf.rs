//! ggml's checkpoint format (llama.cpp): blocks that hold their scales, in GGUF files.

use microscale::Format;
use microscale::formats::nvfp4::Direction;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Numbers, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::dtype::ggml::GgmlType;
use crate::gguf::blocks::Blocks;

/// A tensor's global scale, with which llama.cpp multiplies what a layer gives.
const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::beside(".scale", Direction::Multiplier, Numbers::EachExpert).or_one();
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::beside(".input_scale", Direction::Multiplier, Numbers::EachExpert);

/// The convention. Its file says how layers are stored.
pub(crate) const SPEC: FormatSpec = FormatSpec::new(CheckpointFormat::Gguf, STORED);

/// The formats that the convention has.
const STORED: &[Storage] = &[
    Storage {
        convention: CheckpointFormat::Gguf,
        format: Format::Mxfp4,
        codes_suffix: "",
        codes: FileDtype::Ggml(GgmlType::MXFP4),
        scales_suffix: "",
        scales_beside: false,
        scales: FileDtype::U8,
        global_scale: None,
        input_scale: None,
        blocks: Some(Blocks::Mxfp4),
        blocks_apart: false,
        transposed: false,
        experts: None,
        comfy: None,
    },
    Storage {
        convention: CheckpointFormat::Gguf,
        format: Format::Nvfp4,
        codes_suffix: "",
        codes: FileDtype::Ggml(GgmlType::NVFP4),
        scales_suffix: "",
        scales_beside: false,
        scales: FileDtype::F8_E4M3,
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        blocks: Some(Blocks::Nvfp4),
        blocks_apart: false,
        transposed: false,
        experts: None,
        comfy: None,
    },
];
