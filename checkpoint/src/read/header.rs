//! The header of a safetensors file. Parsing it here bounds memory and lets errors name tensors.
//!
//! Offsets and sizes are checked here and by the `safetensors` crate.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::directory::SAVE_AS_SAFETENSORS;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{HEADER_BYTES, METADATA_ENTRIES, check_dimensions, check_name, check_tensors};

/// Bytes of the header's length, which comes first.
const LENGTH: usize = 8;

/// The header key that is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// Parses the header of a file's bytes. Also returns the offset of the tensors' data.
///
/// Every tensor's offsets are inside the file, follow each other without gap or overlap, and fit
/// its dtype and shape.
///
/// # Errors
/// [`FileError::Header`](crate::FileError::Header) or
/// [`FileError::HeaderTensor`](crate::FileError::HeaderTensor) if the header is invalid.
pub(crate) fn read(file: &Path, bytes: &[u8]) -> Result<(Metadata, usize)> {
    let wrong = |why| Error::File(FileError::Header { file: file.into(), why });
    let json = json(bytes).map_err(wrong)?;
    let data = LENGTH + json.len();
    let mut described = Described::default();
    described.read(json).map_err(|(tensor, why)| match tensor {
        None => wrong(why),
        Some(tensor) => Error::File(FileError::HeaderTensor { file: file.into(), tensor, why }),
    })?;
    let Described { metadata, mut tensors, .. } = described;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let end = match checked(&tensors, bytes.len() - data) {
        Ok(end) => end,
        Err((tensor, why)) => {
            return Err(Error::File(FileError::HeaderTensor {
                file: file.into(),
                tensor: tensor.into(),
                why,
            }));
        }
    };
    if data + end != bytes.len() {
        let why = format!(
            "its {} bytes of data are not fully covered by tensors, which end at {end}",
            bytes.len() - data
        );
        return Err(wrong(why));
    }
    // The crate checks the same again, in case one of the two checks misses something.
    let metadata = Metadata::new(metadata, tensors).map_err(|error| wrong(error.to_string()))?;
    Ok((metadata, data))
}

/// First bytes of files that are not safetensors, with the kind of file and what to do instead.
const OTHER_KINDS: [(&[u8], &str, &str); 3] = [
    (
        b"version https://git-lfs",
        "a Git LFS pointer, which stands for the file",
        "fetch the file itself with `git lfs pull`, or download it again",
    ),
    (
        b"\x80\x02",
        "a PyTorch file as before version 1.6, a pickle with tensors in it and no zip archive",
        SAVE_AS_SAFETENSORS,
    ),
    (b"<", "a web page or XML", "download the file again, and check the response of the server"),
];

/// Refuses files whose first bytes show a kind that microscale does not read.
///
/// # Errors
/// [`FileError::OtherKind`](crate::FileError::OtherKind) if the file is of such a kind.
pub(crate) fn check_kind(file: &Path, bytes: &[u8]) -> Result<()> {
    // A safetensors header with these first bytes would exceed the limit.
    let length = bytes.first_chunk::<LENGTH>().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    let known = OTHER_KINDS.iter().find(|(start, ..)| length > HEADER_BYTES && bytes.starts_with(start));
    known.map_or(Ok(()), |(_, what, instead)| {
        Err(Error::File(FileError::OtherKind { file: file.into(), what, instead }))
    })
}

/// The header's text, with the length that the file states.
fn json(bytes: &[u8]) -> Result<&str, String> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Err(format!("it has {} bytes, less than the length of a header", bytes.len()));
    };
    let claimed = u64::from_le_bytes(*length);
    if claimed > HEADER_BYTES {
        return Err(format!("its header claims {claimed} bytes, more than the 100 MB allowed"));
    }
    let json = rest.get(..claimed as usize).ok_or_else(|| {
        format!("its header claims {claimed} bytes, but the file has {} in all", bytes.len())
    })?;
    str::from_utf8(json).map_err(|error| format!("its header is not UTF-8: {error}"))
}

/// The contents of a header.
#[derive(Default)]
struct Described {
    metadata: Option<HashMap<String, String>>,
    /// The tensors in the header's order. Names are unique.
    tensors: Vec<(String, TensorInfo)>,
    /// The tensor that is being read.
    at: Option<String>,
}

impl Described {
    /// Parses a header. An error concerns one tensor or the whole header.
    fn read(&mut self, json: &str) -> Result<(), (Option<String>, String)> {
        let mut deserializer = serde_json::Deserializer::from_str(json);
        let read = deserializer.deserialize_map(&mut *self).and_then(|()| deserializer.end());
        let Err(error) = read else { return Ok(()) };
        // The error message depends on whether the bytes are JSON at all.
        match serde_json::from_str::<IgnoredAny>(json) {
            Err(error) => Err((None, format!("its header is not JSON: {error}"))),
            Ok(_) => Err((self.at.take(), error.to_string())),
        }
    }
}

impl<'de> Visitor<'de> for &mut Described {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            check_name(&name)
                .and_then(|()| check_tensors(self.tensors.len() + 1))
                .map_err(de::Error::custom)?;
            if !seen.insert(name.clone()) {
                return Err(de::Error::custom(format!("its header describes tensor {name} twice")));
            }
            if name == METADATA {
                self.metadata = map.next_value::<Option<Texts>>()?.map(|Texts(texts)| texts);
                continue;
            }
            self.at = Some(name.clone());
            let info: TensorInfo = map.next_value()?;
            check_dimensions(info.shape.len()).map_err(de::Error::custom)?;
            self.at = None;
            self.tensors.push((name, info));
        }
        Ok(())
    }
}

/// The string values of a header's metadata.
struct Texts(HashMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
        let (mut texts, mut entries) = (HashMap::new(), 0);
        while let Some((key, text)) = map.next_entry()? {
            entries += 1;
            if entries > METADATA_ENTRIES {
                let why = format!("its {METADATA} has more than the {METADATA_ENTRIES} entries allowed");
                return Err(de::Error::custom(why));
            }
            texts.insert(key, text);
        }
        Ok(Texts(texts))
    }
}

/// Checks the tensors, which are sorted by offset. Returns the end of the last one.
///
/// The error has the name of the first invalid tensor, and the reason.
fn checked(tensors: &[(String, TensorInfo)], data: usize) -> Result<usize, (&str, String)> {
    let mut expected = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (start, end) }) in tensors {
        let (start, end) = (*start, *end);
        // Counts like the crate: a size of 0 before the others avoids an overflow.
        let elements = shape.iter().try_fold(1usize, |elements, size| elements.checked_mul(*size));
        let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize()));
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
        return Err((name, why));
    }
    Ok(expected)
}
