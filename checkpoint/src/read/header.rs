//! The header of a safetensors file: read here, so that memory stays bounded and errors name tensors; its
//! offsets and sizes are validated here and by the `safetensors` crate.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::directory::SAVE_AS_SAFETENSORS;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{HEADER_BYTES, METADATA_ENTRIES, check_dimensions, check_name, check_tensors};

/// Bytes before the header: its length.
const LENGTH: usize = 8;

/// The header key that is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// The header of a file's bytes, and where the tensors' data starts.
///
/// Every tensor's offsets lie inside the file, follow each other without gap or overlap, and fit its dtype
/// and shape.
///
/// # Errors
/// [`FileError::Header`](crate::FileError::Header),
/// [`FileError::HeaderTensor`](crate::FileError::HeaderTensor).
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
    // All that it looks at was looked at: its verdict stands beside ours, in case one of the two overlooks
    // something.
    let metadata = Metadata::new(metadata, tensors).map_err(|error| wrong(error.to_string()))?;
    Ok((metadata, data))
}

/// Beginnings of files that are no safetensors, with what such files are and the way out.
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
    (b"<", "a web page or XML", "download the file again, and look at what the server said"),
];

/// Refuses a file of a kind that is known by its beginning, and that holds no tensors to be read here.
///
/// # Errors
/// [`FileError::OtherKind`](crate::FileError::OtherKind).
pub(crate) fn check_kind(file: &Path, bytes: &[u8]) -> Result<()> {
    // A header of safetensors that begins so would be longer than is read.
    let length = bytes.first_chunk::<LENGTH>().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    let known = OTHER_KINDS.iter().find(|(start, ..)| length > HEADER_BYTES && bytes.starts_with(start));
    known.map_or(Ok(()), |(_, what, instead)| {
        Err(Error::File(FileError::OtherKind { file: file.into(), what, instead }))
    })
}

/// The header's text, as long as the file says.
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
    /// The tensors in the header's order; no two names are the same.
    tensors: Vec<(String, TensorInfo)>,
    /// The entry that is being read.
    at: Option<String>,
}

impl Described {
    /// Reads all of it. An error is about a tensor or about everything.
    fn read(&mut self, json: &str) -> Result<(), (Option<String>, String)> {
        let mut deserializer = serde_json::Deserializer::from_str(json);
        let read = deserializer.deserialize_map(&mut *self).and_then(|()| deserializer.end());
        let Err(error) = read else { return Ok(()) };
        // Bytes that are no header may be JSON or not; the error says the more telling of the two.
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

/// The texts of a header's metadata.
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

/// The end of the last tensor; or the first tensor that is described wrongly, and the reason. Tensors come in
/// the order of their offsets.
fn checked(tensors: &[(String, TensorInfo)], data: usize) -> Result<usize, (&str, String)> {
    let mut expected = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (start, end) }) in tensors {
        let (start, end) = (*start, *end);
        // Counts as the crate does: a size of 0 in front of others makes them harmless.
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
