//! The checkpoint format of ComfyUI, for diffusion models (comfy-kitchen 0.2.40).
//!
//! NVFP4 has names and dtypes of ModelOpt, and MXFP8 of compressed-tensors. The bytes differ.
//!
//! | tensor `X` of shape [N, K] | nvfp4 | mxfp8-e4m3 |
//! |---|---|---|
//! | codes `X` | U8 [N, K/2], high nibble first | F8_E4M3 [N, K] |
//! | block scales `X_scale` | F8_E4M3 [N', ⌈K/64⌉·4] | F8_E8M0 [N', ⌈K/128⌉·4] |
//! | global scale `X_scale_2` | F32 [], a multiplier | |
//!
//! N' is N, padded to a multiple of 128. Scales are swizzled and padded with zeros. N and K are
//! multiples of 16 for NVFP4 and of 32 for MXFP8. ComfyUI pads other matrices and does not store
//! their shapes.
//!
//! Each layer has a word for its format: in a marker, which is JSON in U8 under `.comfy_quant`
//! instead of `.weight`, or in the metadata of the file, which has the words of all layers. ComfyUI
//! itself converts metadata to markers.

use microscale::formats::nvfp4::Direction;
use microscale::{Format, ScaleLayout};
use serde_json::Value;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::modelopt::GLOBAL_SCALE;
use crate::checkpoint_formats::part_name::PartName;
use crate::checkpoint_formats::spec::FormatSpec;
use crate::checkpoint_formats::storage::{Marker, Repeat, Storage, StoredGlobal};
use crate::dtype::FileDtype;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::layer_words::{LayerWord, LayerWords};
use crate::read::nibble_order::NibbleOrder;
use crate::read::shard::{Container, Shard};
use crate::read::tensor::Tensor;

/// Suffix of the name of a marker.
const MARKER: &str = ".comfy_quant";

/// Key of the metadata with the words of all layers.
const METADATA: &str = "_quantization_metadata";

/// Prefix of a model's layers in a file with other models. The metadata may leave it out.
const MODEL: &str = "model.diffusion_model.";

/// The words for FP8 with one scale per tensor, which
/// [`w8_sources`](crate::checkpoint_formats::w8_sources) reads.
const FP8: [&str; 2] = ["float8_e4m3fn", "float8_e5m2"];

const INPUT_SCALE: StoredGlobal =
    StoredGlobal::new(PartName::InPlace(".input_scale"), Direction::Multiplier, Repeat::Scalar);

/// The row of the table.
pub(crate) const SPEC: FormatSpec = FormatSpec {
    unreadable,
    read_metadata,
    metadata_key: Some(METADATA),
    ..FormatSpec::new(CheckpointFormat::Comfyui, STORED)
};

const STORED: &[Storage] = &[
    Storage {
        nibble_order: NibbleOrder::HighFirst,
        row_multiple: 16,
        global_scale: Some(GLOBAL_SCALE),
        input_scale: Some(INPUT_SCALE),
        ..stored(Format::Nvfp4, "nvfp4", FileDtype::U8, FileDtype::F8_E4M3)
    },
    Storage {
        row_multiple: 32,
        ..stored(Format::Mxfp8E4m3, "mxfp8", FileDtype::F8_E4M3, FileDtype::F8_E8M0)
    },
];

const fn stored(format: Format, word: &'static str, codes: FileDtype, scales: FileDtype) -> Storage {
    let scales = (PartName::After("_scale"), scales);
    Storage {
        raw_scales: true,
        scale_layout: ScaleLayout::Swizzled,
        marker: Some(Marker { name: PartName::InPlace(MARKER), word }),
        ..Storage::plain(CheckpointFormat::Comfyui, format, ("", codes), scales)
    }
}

/// Reads the words for the formats of layers. A marker takes precedence over the metadata.
///
/// # Errors
/// [`FileError::Header`](crate::FileError::Header) for metadata without layers.
fn read_metadata(shards: &[Shard]) -> Result<LayerWords> {
    let mut words = LayerWords::new();
    for shard in shards {
        let Container::Safetensors(Some(metadata)) = &shard.container else { continue };
        let Some(text) = metadata.get(METADATA) else { continue };
        let json: Value = serde_json::from_str(text).unwrap_or_default();
        let layers = json.get("layers").and_then(Value::as_object).ok_or_else(|| {
            let why = format!("its metadata have {METADATA}, as ComfyUI's, which is no JSON with \"layers\"");
            Error::File(FileError::Header { file: shard.path.clone(), why })
        })?;
        let word = |text| LayerWord { word: word_of(text), place: METADATA.into() };
        words.extend(layers.iter().map(|(layer, text)| (layer.clone(), word(text))));
    }
    let with_prefix: Vec<_> =
        words.iter().map(|(layer, word)| (format!("{MODEL}{layer}"), word.clone())).collect();
    for (layer, word) in with_prefix {
        words.entry(layer).or_insert(word);
    }
    for marker in shards.iter().flat_map(Shard::tensors) {
        let Some(layer) = marker.name.strip_suffix(MARKER) else { continue };
        let json = serde_json::from_slice(marker.data).unwrap_or_default();
        words.insert(layer.into(), LayerWord { word: word_of(&json), place: marker.name.into() });
    }
    Ok(words)
}

/// Returns the word in a layer's JSON.
fn word_of(json: &Value) -> String {
    json.as_str().or_else(|| json.get("format")?.as_str()).unwrap_or("no format").into()
}

/// Returns a warning if NVFP4 in a file without metadata and config is read as ModelOpt's.
///
/// Names, dtypes and shapes of matrices that need no padding are the same. Only the order of the
/// bytes differs.
pub(crate) fn may_be_comfyui(checkpoint: &Checkpoint) -> Option<String> {
    if checkpoint.config.is_some() || checkpoint.hf_quant_config.is_some() {
        return None;
    }
    let scales = |codes: &Tensor<'_>| {
        let scales = checkpoint.tensor(&format!("{}_scale", codes.name))?;
        checkpoint.tensor(&GLOBAL_SCALE.name_for(codes.name)?)?;
        (scales.dtype == FileDtype::F8_E4M3).then_some(scales.shape)
    };
    let is_nvfp4 = |codes: &Tensor<'_>| {
        let ([rows, bytes], Some([scale_rows, blocks])) = (codes.shape, scales(codes)) else { return false };
        let unpadded = rows % 128 == 0 && blocks % 4 == 0;
        codes.dtype == FileDtype::U8 && rows == scale_rows && *bytes == 8 * blocks && unpadded
    };
    let first =
        checkpoint.tensors().filter(|codes| checkpoint.layer_word(codes.name).is_none()).find(is_nvfp4)?;
    Some(format!(
        "{} has no metadata and no config that say whose NVFP4 {} is: it is read as ModelOpt's, and ComfyUI's without metadata cannot be \
         told from it",
        checkpoint.path.display(),
        first.name
    ))
}

/// Recognizes weights with a word that is unknown, or without matching codes and scales.
fn unreadable(checkpoint: &Checkpoint, codes: &Tensor<'_>) -> Option<String> {
    let LayerWord { word, place } = checkpoint.layer_word(codes.name)?;
    let known = STORED.iter().find(|storage| storage.marker.is_some_and(|marker| marker.word == word));
    match known {
        None if FP8.contains(&word.as_str()) => None,
        None => Some(format!(
            "it is ComfyUI's {word}, as {place} says, which is not understood; quantize the original again"
        )),
        Some(storage) => Some(format!(
            "it is ComfyUI's {word}, as {place} says, which is {} with scales {}{} of {}; complete the checkpoint",
            storage.codes,
            codes.name,
            storage.scales_name.suffix(),
            storage.scales
        )),
    }
}
