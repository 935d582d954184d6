//! The header of a safetensors file: read and validated by the `safetensors` crate, its verdict put in words.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::error::{Error, Result};

/// Bytes before the header: its length.
const LENGTH: usize = 8;

/// The header key that is not a tensor.
pub(super) const METADATA: &str = "__metadata__";

/// The header of a file's bytes, and where the tensors' data starts.
///
/// Every tensor's offsets lie inside the file, follow each other without gap or overlap, and fit its dtype and shape.
///
/// # Errors
/// [`Error::Header`], [`Error::HeaderTensor`].
pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<(Metadata, usize)> {
    let (length, metadata) =
        SafeTensors::read_metadata(bytes).map_err(|error| explain(file, bytes, &error))?;
    let json = &bytes[LENGTH..LENGTH + length];
    // The crate keeps the last of two tensors of one name, without a word.
    serde_json::Deserializer::from_slice(json)
        .deserialize_map(UniqueNames)
        .map_err(|error| Error::Header { file: file.into(), why: error.to_string() })?;
    Ok((metadata, LENGTH + length))
}

/// Puts the crate's error in words, with the tensor's name where one is to blame.
fn explain(file: &Path, bytes: &[u8], error: &SafeTensorError) -> Error {
    let file = file.to_path_buf();
    let claimed = bytes.first_chunk::<LENGTH>().map_or(0, |length| u64::from_le_bytes(*length));
    let why = match error {
        SafeTensorError::HeaderTooSmall => {
            format!("it has {} bytes, less than the length of a header", bytes.len())
        }
        SafeTensorError::HeaderTooLarge => {
            format!("its header claims {claimed} bytes, more than the 100 MB allowed")
        }
        SafeTensorError::InvalidHeaderLength => {
            format!("its header claims {claimed} bytes, but the file has {} in all", bytes.len())
        }
        SafeTensorError::InvalidHeader(error) => format!("its header is not UTF-8: {error}"),
        _ => {
            let end = LENGTH + claimed as usize;
            match serde_json::from_slice::<Value>(&bytes[LENGTH..end]) {
                Err(error) => format!("its header is not JSON: {error}"),
                Ok(header) => match blame(&header, bytes.len() - end) {
                    Some((tensor, why)) => return Error::HeaderTensor { file, tensor, why },
                    None => error.to_string(),
                },
            }
        }
    };
    Error::Header { file, why }
}

/// The first tensor that is described wrongly, and how.
fn blame(header: &Value, data: usize) -> Option<(String, String)> {
    let mut tensors = Vec::new();
    for (name, info) in header.as_object()?.iter().filter(|(name, _)| *name != METADATA) {
        match serde_json::from_value::<TensorInfo>(info.clone()) {
            Ok(info) => tensors.push((name, info)),
            Err(error) => return Some((name.clone(), error.to_string())),
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut expected = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (start, end) }) in tensors {
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, size| bits.checked_mul(*size));
        let why = match bits {
            None => format!("the shape {shape:?} has more elements than can be counted"),
            Some(bits) if bits % 8 != 0 => format!("{dtype} of shape {shape:?} does not fill whole bytes"),
            Some(_) if end < start => format!("it ends at offset {end}, before its start {start}"),
            Some(_) if start < expected => {
                format!(
                    "its data starts at offset {start}, inside the tensor before it, which ends at {expected}"
                )
            }
            Some(_) if start > expected => {
                format!("its data starts at offset {start}, {} bytes too late", start - expected)
            }
            Some(bits) if end - start != bits / 8 => {
                format!(
                    "{dtype} of shape {shape:?} needs {} bytes, but its offsets span {}",
                    bits / 8,
                    end - start
                )
            }
            Some(_) if end > data => {
                format!("its data ends at offset {end}, but the file has only {data} bytes of data")
            }
            Some(_) => {
                expected = end;
                continue;
            }
        };
        return Some((name.clone(), why));
    }
    None
}

/// Accepts a JSON object whose keys are all different.
struct UniqueNames;

impl<'de> Visitor<'de> for UniqueNames {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some((name, _)) = map.next_entry::<String, IgnoredAny>()? {
            if let Some(twice) = seen.replace(name) {
                return Err(de::Error::custom(format!("its header describes tensor {twice} twice")));
            }
        }
        Ok(())
    }
}
