//! The header of a GGUF file: parsed from untrusted bytes and checked against the file.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::cursor::Cursor;
use super::format::{ALIGNMENT, DEFAULT_ALIGNMENT, MAGIC, MAX_NAME, Parsed};
use super::value::{MetadataEntry, MetadataValue, ValueType};
use crate::dtype::ggml::{GgmlType, MAX_DIMS};
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{METADATA_ENTRIES, check_tensors};

/// The largest alignment to read. ggml has no limit; files use 32 or a page.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// The smallest metadata entry in bytes: a one-character key, its type, a one-byte value.
const MIN_ENTRY: u64 = 8 + 1 + 4 + 1;

/// The smallest tensor description in bytes: a one-character name, no dimensions, type, offset.
const MIN_TENSOR: u64 = 8 + 1 + 4 + 4 + 8;

/// The contents of a header.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header {
    /// The alignment of every tensor's offset, a power of two.
    pub(crate) alignment: u64,
    /// The metadata in the file's order. Keys are unique.
    pub(crate) entries: Vec<MetadataEntry>,
    /// The tensors in the order of their data. Names are unique.
    pub(crate) tensors: Vec<GgufTensor>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GgufTensor {
    pub(crate) name: String,
    /// The sizes, slowest first: the reverse of the file's order.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: GgmlType,
    /// The tensor's bytes in the file, as long as type and shape require.
    pub(crate) range: Range<usize>,
}

impl Header {
    /// The value of a key, if it is a nonnegative integer.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            MetadataValue::Unsigned(number) => Some(*number),
            MetadataValue::Signed(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// The value of a key.
    pub(crate) fn value(&self, key: &str) -> Option<&MetadataValue> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }
}

/// Parses the header of a file's bytes.
///
/// Every tensor's range is inside the file and starts after the previous tensor's, with only
/// padding in between. Memory and time are at most proportional to the bytes that the header really
/// has.
///
/// # Errors
/// [`FileError::Gguf`](crate::FileError::Gguf) or
/// [`FileError::GgufTensor`](crate::FileError::GgufTensor) if the header is invalid.
pub(crate) fn read(file: &Path, bytes: &[u8]) -> Result<Header> {
    parse(bytes).map_err(|fault| match fault {
        Fault::File(why) => Error::File(FileError::Gguf { file: file.into(), why }),
        Fault::Tensor(tensor, why) => Error::File(FileError::GgufTensor { file: file.into(), tensor, why }),
    })
}

/// A defect, with the name of the tensor if it is about one.
enum Fault {
    File(String),
    Tensor(String, String),
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Self::File(why)
    }
}

fn parse(bytes: &[u8]) -> Result<Header, Fault> {
    let mut cursor = Cursor::new(bytes);
    let counts = counts(&mut cursor)?;
    let entries = entries(&mut cursor, counts.entries)?;
    let alignment = alignment(&entries)?;
    let described = described(&mut cursor, counts.tensors)?;
    let tensors = placed(described, alignment, cursor.at() as u64, bytes.len())?;
    Ok(Header { alignment, entries, tensors })
}

struct HeaderCounts {
    tensors: u64,
    entries: u64,
}

/// Reads magic, version and counts.
fn counts(cursor: &mut Cursor<'_>) -> Parsed<HeaderCounts> {
    let magic = cursor.array::<4>()?;
    if magic != *MAGIC {
        return Err(format!("it starts with \"{}\", not with \"GGUF\"", magic.escape_ascii()));
    }
    match cursor.u32()? {
        2 | 3 => {}
        1 => {
            return Err("it has version 1, which ggml no longer reads either; convert the model again".into());
        }
        // A big-endian version.
        version if version & 0xFFFF == 0 && version != 0 => {
            return Err(
                "it is big-endian; convert it to little-endian (gguf-py's gguf-convert-endian does that)"
                    .into(),
            );
        }
        version => return Err(format!("it has version {version}, and 2 and 3 are known")),
    }
    let counts = HeaderCounts { tensors: cursor.u64()?, entries: cursor.u64()? };
    let needed = u128::from(counts.tensors) * u128::from(MIN_TENSOR)
        + u128::from(counts.entries) * u128::from(MIN_ENTRY);
    if needed > cursor.left().into() {
        let HeaderCounts { tensors, entries } = counts;
        let left = cursor.left();
        return Err(format!(
            "it claims {tensors} tensors and {entries} entries of metadata, for which the {left} bytes that follow are too few"
        ));
    }
    check_tensors(usize::try_from(counts.tensors).unwrap_or(usize::MAX))?;
    if counts.entries > METADATA_ENTRIES {
        let entries = counts.entries;
        return Err(format!(
            "it has {entries} entries of metadata, more than the {METADATA_ENTRIES} allowed"
        ));
    }
    Ok(counts)
}

fn entries(cursor: &mut Cursor<'_>, count: u64) -> Parsed<Vec<MetadataEntry>> {
    let (mut entries, mut keys) = (Vec::new(), HashSet::new());
    for place in 0..count {
        let start = cursor.at();
        let key = cursor.label().map_err(|why| format!("metadata entry {place}: {why}"))?;
        let in_key = |why| format!("metadata key {key}: {why}");
        if !keys.insert(key) {
            return Err(in_key("it occurs twice".into()));
        }
        let (kind, value) = MetadataValue::read(cursor).map_err(in_key)?;
        entries.push(MetadataEntry { key: key.into(), kind, value, raw: start..cursor.at() });
    }
    Ok(entries)
}

fn alignment(entries: &[MetadataEntry]) -> Parsed<u64> {
    let Some(entry) = entries.iter().find(|entry| entry.key == ALIGNMENT) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match entry.value {
        MetadataValue::Unsigned(alignment) if entry.kind == ValueType::U32 => {
            let good = alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT;
            good.then_some(alignment).ok_or_else(|| {
                format!("metadata key {ALIGNMENT}: {alignment} is no power of two up to {MAX_ALIGNMENT}")
            })
        }
        _ => Err(format!("metadata key {ALIGNMENT}: it is of type {}, and must be u32", entry.kind.name())),
    }
}

/// A tensor as its header entry describes it.
struct DescribedTensor {
    name: String,
    shape: Vec<usize>,
    kind: GgmlType,
    bytes: u64,
    offset: u64,
}

fn described(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<DescribedTensor>, Fault> {
    let (mut tensors, mut names) = (Vec::new(), HashSet::new());
    for place in 0..count {
        let name = cursor.label().map_err(|why| format!("tensor {place}: {why}"))?;
        if name.len() > MAX_NAME {
            let why = format!("its name has {} bytes, and ggml has no more than {MAX_NAME}", name.len());
            return Err(Fault::Tensor(name.chars().take(MAX_NAME).chain("…".chars()).collect(), why));
        }
        let in_tensor = |why| Fault::Tensor(name.into(), why);
        if !names.insert(name) {
            return Err(in_tensor("it is described twice".into()));
        }
        let shape = shape(cursor).map_err(in_tensor)?;
        let kind = cursor.u32().map(GgmlType::from_id).map_err(in_tensor)?;
        let bytes = kind.bytes_of(&shape).map_err(in_tensor)?;
        let offset = cursor.u64().map_err(in_tensor)?;
        tensors.push(DescribedTensor { name: name.into(), shape, kind, bytes, offset });
    }
    Ok(tensors)
}

fn shape(cursor: &mut Cursor<'_>) -> Parsed<Vec<usize>> {
    let dims = cursor.u32()? as usize;
    if dims > MAX_DIMS {
        return Err(format!("it has {dims} dimensions, and ggml has no more than {MAX_DIMS}"));
    }
    let mut shape = Vec::with_capacity(dims);
    for _ in 0..dims {
        let size = cursor.u64()?;
        // ggml counts with signed numbers.
        let countable = usize::try_from(size).ok().filter(|_| i64::try_from(size).is_ok());
        shape.push(countable.ok_or_else(|| format!("a size of {size} is more than can be counted"))?);
    }
    shape.reverse();
    Ok(shape)
}

/// Computes the range of each tensor.
///
/// ggml requires that the data follows the header's order, with each tensor padded to the
/// alignment. Nothing else would load a file that is laid out differently, so it is refused.
fn placed(
    described: Vec<DescribedTensor>,
    alignment: u64,
    header: u64,
    file: usize,
) -> Result<Vec<GgufTensor>, Fault> {
    // This cannot overflow: a header is no longer than its file, and an alignment is at most 2^20.
    let data = header.next_multiple_of(alignment);
    let available = (file as u64).checked_sub(data);
    let mut expected = 0u64;
    let mut tensors = Vec::new();
    for DescribedTensor { name, shape, kind, bytes, offset } in described {
        let end = offset.checked_add(bytes);
        let range = match (end, available) {
            _ if offset != expected => Err(displaced(offset, expected, alignment)),
            (Some(end), Some(available)) if end <= available => {
                Ok((data + offset) as usize..(data + end) as usize)
            }
            _ => Err(format!(
                "{kind} of shape {shape:?} needs {bytes} bytes at offset {offset} of the data, but the file has only {} bytes of data",
                available.unwrap_or(0)
            )),
        };
        let range = match range {
            Ok(range) => range,
            Err(why) => return Err(Fault::Tensor(name, why)),
        };
        // This cannot overflow: the end is inside the file.
        expected = (offset + bytes).next_multiple_of(alignment);
        tensors.push(GgufTensor { name, shape, kind, range });
    }
    Ok(tensors)
}

fn displaced(offset: u64, expected: u64, alignment: u64) -> String {
    if !offset.is_multiple_of(alignment) {
        format!("its data starts at offset {offset}, which is no multiple of the alignment, {alignment}")
    } else if offset < expected {
        format!("its data starts at offset {offset}, inside the tensors before it, which end at {expected}")
    } else {
        format!("its data starts at offset {offset}, {} bytes too late", offset - expected)
    }
}
