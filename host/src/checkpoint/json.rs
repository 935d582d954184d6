//! JSON files of a checkpoint: objects whose key order is kept.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{Error, Result};

/// Reads a file that must hold one JSON object.
pub(super) fn read_object(file: &Path) -> Result<Map<String, Value>> {
    let text = fs::read(file).map_err(Error::io("read", file))?;
    let json = serde_json::from_slice(&text).map_err(|source| Error::Json { file: file.into(), source })?;
    match json {
        Value::Object(object) => Ok(object),
        _ => Err(Error::JsonContent {
            file: file.into(),
            why: "the file must hold one JSON object; correct it",
        }),
    }
}

/// Writes an object the way Hugging Face's libraries do: indented by two, a newline at the end.
pub(super) fn write_object(file: &Path, object: &Map<String, Value>) -> Result<()> {
    let text = format!("{:#}\n", Value::Object(object.clone()));
    fs::write(file, text).map_err(Error::io("write", file))?;
    fs::File::open(file).and_then(|file| file.sync_all()).map_err(Error::io("write", file))
}
