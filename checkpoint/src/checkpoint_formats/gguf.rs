//! The checkpoint format of ggml (llama.cpp): GGUF files, whose blocks contain their scales.

use microscale::Format;
use microscale::formats::nvfp4::Direction;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Repeat, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::dtype::ggml::GgmlType;
use crate::gguf::blocks::Blocks;

/// A tensor's global scale. llama.cpp multiplies the output of the layer by it.
const GLOBAL_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".scale"), Direction::Multiplier, Repeat::EachExpert).or_one();
const INPUT_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".input_scale"), Direction::Multiplier, Repeat::EachExpert);

/// The row of the table. The types in a GGUF file tell how its layers are stored.
pub(crate) const SPEC: FormatSpec = FormatSpec::new(CheckpointFormat::Gguf, STORED);

const STORED: &[Storage] = &[
    Storage { blocks: Some(Blocks::Mxfp4), ..stored(Format::Mxfp4, GgmlType::MXFP4, FileDtype::U8) },
    Storage {
        blocks: Some(Blocks::Nvfp4),
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        ..stored(Format::Nvfp4, GgmlType::NVFP4, FileDtype::F8_E4M3)
    },
];

const fn stored(format: Format, blocks: GgmlType, scales: FileDtype) -> Storage {
    let codes = ("", FileDtype::Ggml(blocks));
    Storage::plain(CheckpointFormat::Gguf, format, codes, (PartName::After(""), scales))
}
