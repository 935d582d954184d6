//! The texts in JSON that ComfyUI's files have about the formats of layers.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::names::weight::WEIGHT;
use crate::read::shard::{Container, Shard};

/// The end of the name of the text about a layer, in the place of [`WEIGHT`].
const SAYS: &str = ".comfy_quant";

/// The entry of a file's metadata that has such texts.
pub(crate) const METADATA: &str = "_quantization_metadata";

/// The name of the text about a layer, by that of its weight.
pub(crate) fn says_name(weight: &str) -> Option<String> {
    Some(format!("{}{SAYS}", weight.strip_suffix(WEIGHT)?))
}

/// The name of a layer's weight, by that of the text about it.
pub(crate) fn owner_of(name: &str) -> Option<String> {
    Some(format!("{}{WEIGHT}", name.strip_suffix(SAYS)?))
}

/// The text about a layer of a format.
pub(crate) fn says(word: &str) -> Vec<u8> {
    json!({ "format": word }).to_string().into_bytes()
}

/// The word for a layer's format that a JSON text has.
pub(crate) fn word_of(text: &Value) -> String {
    text.as_str().or_else(|| text.get("format")?.as_str()).unwrap_or("no format").into()
}

/// The words for the formats of layers, by their names, that the metadata of files have.
///
/// # Errors
/// [`FileError::Header`](crate::FileError::Header) for metadata that are no such texts.
pub(crate) fn layers(shards: &[Shard]) -> Result<HashMap<String, String>> {
    let mut all = HashMap::new();
    for shard in shards {
        let Container::Safetensors(Some(metadata)) = &shard.container else { continue };
        let Some(text) = metadata.get(METADATA) else { continue };
        let json: Value = serde_json::from_str(text).unwrap_or_default();
        let layers = json.get("layers").and_then(Value::as_object).ok_or_else(|| {
            let why = format!("its metadata have {METADATA}, as ComfyUI's, which is no JSON with \"layers\"");
            Error::File(FileError::Header { file: shard.path.clone(), why })
        })?;
        all.extend(layers.iter().map(|(layer, text)| (layer.clone(), word_of(text))));
    }
    Ok(all)
}
