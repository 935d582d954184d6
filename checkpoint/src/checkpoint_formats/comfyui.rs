//! ComfyUI's checkpoint format, for models of diffusion (comfy-kitchen 0.2.40): NVFP4 has the names, dtypes and, where sizes are
//! multiples of 128 and 64, the shapes of ModelOpt's, and MXFP8 those of compressed-tensors', with other bytes.
//!
//! | tensor X of sizes [N, K] | codes | block scales | global scale |
//! |---|---|---|---|
//! | nvfp4 | `X` U8 [N, K/2], the first of two codes in the high half of a byte | `X_scale` F8_E4M3 [⌈N/128⌉·128, ⌈K/64⌉·4] | `X_scale_2` F32 [], a multiplier |
//! | mxfp8-e4m3 | `X` F8_E4M3 [N, K] | `X_scale` F8_E8M0 [⌈N/128⌉·128, ⌈K/128⌉·4] | |
//!
//! Scales lie in tiles of 128×4, and zeros fill up the last ones. N and K are multiples of 16 for NVFP4 and of 32 for MXFP8: other
//! matrices are stored larger, and their sizes nowhere. A JSON text names the format of each layer: in U8, `.comfy_quant` in the place
//! of `.weight`, or in the metadata of the file, for all of them. ComfyUI itself turns the latter into the former.

use microscale::Format;
use microscale::formats::nvfp4::Direction;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::modelopt::GLOBAL_SCALE;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Comfy, Numbers, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::names::weight::WEIGHT;
use crate::read::checkpoint::Checkpoint;
use crate::read::layer_texts::{METADATA, says_name, word_of};
use crate::read::tensor::Tensor;

/// The beginning of the names of all layers of a model in a file that holds other models too.
const MODEL: &str = "model.diffusion_model.";

/// The format of FP8 with a scale for all, which [`scaled`](crate::checkpoint_formats::scaled) reads.
const PLAIN: &str = "float8_e4m3fn";

const INPUT_SCALE: StoredGlobal =
    StoredGlobal::beside(".input_scale", Direction::Multiplier, Numbers::Scalar);

/// The convention. Its files say themselves how layers are stored.
pub(crate) const SPEC: FormatSpec =
    FormatSpec { unreadable, ..FormatSpec::new(CheckpointFormat::Comfyui, STORED) };

const STORED: &[Storage] = &[
    Storage {
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        comfy: Some(Comfy { word: "nvfp4", rows: 16, high_first: true }),
        ..Storage::plain(
            CheckpointFormat::Comfyui,
            Format::Nvfp4,
            ("", FileDtype::U8),
            ("_scale", FileDtype::F8_E4M3),
        )
    },
    Storage {
        comfy: Some(Comfy { word: "mxfp8", rows: 32, high_first: false }),
        ..Storage::plain(
            CheckpointFormat::Comfyui,
            Format::Mxfp8E4m3,
            ("", FileDtype::F8_E4M3),
            ("_scale", FileDtype::F8_E8M0),
        )
    },
];

/// The word for the format of a weight that is ComfyUI's, and what has it; `None` for all others.
pub(crate) fn said(checkpoint: &Checkpoint, weight: &str) -> Option<(String, String)> {
    let by_text = checkpoint.tensor(&says_name(weight)?).map(|text| {
        let json = serde_json::from_slice(text.data).unwrap_or_default();
        (word_of(&json), text.name.into())
    });
    by_text.or_else(|| {
        let layer = weight.strip_suffix(WEIGHT)?;
        // Some leave out the beginning of names that all layers have.
        let layers = [Some(layer), layer.strip_prefix(MODEL)];
        let word = layers.into_iter().flatten().find_map(|layer| checkpoint.comfy_layers.get(layer))?;
        Some((word.clone(), METADATA.into()))
    })
}

/// Why a weight cannot be read: it is of another format than those that are understood, or lacks scales.
fn unreadable(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<String> {
    let (word, place) = said(checkpoint, codes.name)?;
    let known = STORED.iter().find(|storage| storage.comfy.is_some_and(|comfy| comfy.word == word));
    match known {
        None if word == PLAIN => None,
        None => Some(format!(
            "it is ComfyUI's {word}, as {place} says, which is not understood; quantize the original again"
        )),
        Some(storage) => Some(format!(
            "it is ComfyUI's {word}, as {place} says, which is {} with scales {}{} of {}; complete the checkpoint",
            storage.codes, codes.name, storage.scales_suffix, storage.scales
        )),
    }
}
