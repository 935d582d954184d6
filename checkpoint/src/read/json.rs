//! Reading and writing JSON files of a checkpoint: objects whose key order is kept.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::file::FileError;
use crate::error::{Error, Result};

/// The most bytes of a file that is read: as many as a safetensors header may have. The largest indexes have
/// some tens of megabytes.
const MOST: u64 = 100_000_000;

/// Reads a file that must hold one JSON object.
pub(crate) fn read_object(file: &Path) -> Result<Map<String, Value>> {
    let text = read(file)?;
    let json = serde_json::from_slice(&text)
        .map_err(|source| Error::File(FileError::Json { file: file.into(), source }))?;
    match json {
        Value::Object(object) => Ok(object),
        _ => Err(Error::File(FileError::JsonContent {
            file: file.into(),
            why: "the file must hold one JSON object; correct it",
        })),
    }
}

/// The bytes of a file that holds JSON, or should.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>> {
    let refused = |why| Err(Error::File(FileError::JsonContent { file: file.into(), why }));
    let metadata = fs::metadata(file).map_err(Error::io("read", file))?;
    // Opening a pipe would wait for its writer, and a device may have no end.
    if !metadata.is_file() {
        return refused("it is not a regular file; put the file itself there");
    }
    if metadata.len() > MOST {
        return refused("it has more than the 100 MB allowed; download or write it again");
    }
    fs::read(file).map_err(Error::io("read", file))
}

/// Writes an object the way Hugging Face's libraries do: indented by two, a newline at the end.
pub(crate) fn write_object(file: &Path, object: &Map<String, Value>) -> Result<()> {
    let text = format!("{:#}\n", Value::Object(object.clone()));
    fs::write(file, text).map_err(Error::io("write", file))?;
    fs::File::open(file).and_then(|file| file.sync_all()).map_err(Error::io("write", file))
}
