//! Writing the header of a GGUF file: metadata, the outlines of its tensors, and their places.

use std::collections::HashSet;
use std::path::Path;

use crate::dtype::ggml::GgmlType;
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::gguf::format::{MAGIC, MAX_NAME, Parsed, VERSION};
use crate::gguf::metadata::Metadata;
use crate::write::writer::{Room, Writer};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct GgufOutline {
    pub(crate) name: String,
    /// Its sizes, slowest first.
    pub(crate) shape: Vec<usize>,
    pub(crate) kind: GgmlType,
}

/// Creates a GGUF file and writes its header.
///
/// Tensors are laid out in the order given, each padded with zeros to the alignment, the last one
/// too.
///
/// # Errors
/// [`FileError::NotInGguf`](crate::FileError::NotInGguf) for a tensor that GGUF cannot hold,
/// [`Error::Io`].
pub(crate) fn create(path: &Path, metadata: &Metadata<'_>, tensors: &[GgufOutline]) -> Result<Writer> {
    let alignment = metadata.alignment;
    let mut header = preamble(metadata, tensors.len());
    let (mut names, mut rooms, mut end) = (HashSet::new(), Vec::with_capacity(tensors.len()), 0u64);
    for tensor in tensors {
        let refused =
            |why| Error::File(FileError::NotInGguf { file: path.into(), tensor: tensor.name.clone(), why });
        let bytes = describe(&mut header, tensor, end).map_err(refused)?;
        if !names.insert(&tensor.name) {
            return Err(refused("there is another tensor of that name".into()));
        }
        rooms.push(Room::new(tensor.name.clone(), end, bytes));
        end = end.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(alignment)).ok_or_else(
            || refused("with the tensors before it, there are more bytes than can be counted".into()),
        )?;
    }
    let data = (header.len() as u64).next_multiple_of(alignment);
    // Unwritten bytes are padding, and read as zeros.
    Writer::create(path, &header, rooms, data, Some(data.saturating_add(end)))
}

/// Everything before the tensors' descriptions.
fn preamble(metadata: &Metadata<'_>, tensors: usize) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors as u64).to_le_bytes());
    header.extend((metadata.entries.len() as u64).to_le_bytes());
    for entry in &metadata.entries {
        header.extend(&*entry.raw);
    }
    header
}

/// Describes a tensor, and returns its bytes.
fn describe(header: &mut Vec<u8>, tensor: &GgufOutline, offset: u64) -> Parsed<u64> {
    let GgufOutline { name, shape, kind } = tensor;
    if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
        return Err(format!(
            "a name must have 1 to {MAX_NAME} bytes and no zero byte, and this has {} bytes",
            name.len()
        ));
    }
    let bytes = kind.bytes_of(shape)?;
    header.extend((name.len() as u64).to_le_bytes());
    header.extend(name.as_bytes());
    header.extend((shape.len() as u32).to_le_bytes());
    for size in shape.iter().rev() {
        header.extend((*size as u64).to_le_bytes());
    }
    header.extend(kind.id().to_le_bytes());
    header.extend(offset.to_le_bytes());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::header::read;
    use crate::gguf::metadata::FileType;
    use crate::gguf::value::MetadataValue;

    fn outline(name: &str, id: u32, shape: &[usize]) -> GgufOutline {
        GgufOutline { name: name.into(), shape: shape.into(), kind: GgmlType::from_id(id) }
    }

    #[test]
    fn tensors_may_come_in_any_order_and_are_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.gguf");
        let mut metadata = Metadata::new("llama");
        metadata.set_file_type(FileType::Mxfp4);
        metadata.set_file_type(FileType::Nvfp4);
        let outlines = [outline("bytes", 24, &[3]), outline("none", 0, &[0, 4]), outline("a", 40, &[2, 64])];
        let writer = create(&path, &metadata, &outlines).unwrap();
        for (tensor, data) in [(2, &[7; 72][..]), (1, &[]), (0, &[9; 3])] {
            writer.write_at(writer.reserve(tensor, 0, data.len()).unwrap(), data).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), std::fs::metadata(&path).unwrap().len());

        let written = std::fs::read(&path).unwrap();
        let header = read(&path, &written).unwrap();
        let found: Vec<_> = header.tensors.iter().map(|t| (&*t.name, t.kind.id(), &t.shape[..])).collect();
        assert_eq!(found, [("bytes", 24, &[3][..]), ("none", 0, &[0, 4]), ("a", 40, &[2, 64])]);
        assert_eq!(written[header.tensors[0].range.clone()], [9; 3]);
        assert_eq!(written[header.tensors[2].range.clone()], [7; 72]);
        assert_eq!(written.len(), header.tensors[2].range.start + 96, "padded at the end too");
        assert_eq!(header.value("general.architecture"), Some(&MetadataValue::Text("llama".into())));
        assert_eq!(header.value("general.file_type"), Some(&MetadataValue::Unsigned(39)));
        assert_eq!(header.value("general.quantization_version"), Some(&MetadataValue::Unsigned(2)));
        assert_eq!(header.entries.len(), 3);
    }

    #[test]
    fn what_ggml_cannot_load_is_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.gguf");
        let refused = |outlines: &[GgufOutline], why: &str| {
            let refused = create(&path, &Metadata::new("llama"), outlines).err().unwrap().to_string();
            assert!(refused.contains("x.gguf") && refused.contains(why), "{refused}");
            assert!(!path.exists());
        };
        refused(&[outline("a", 24, &[4]), outline("a", 24, &[4])], "tensor a: there is another tensor");
        refused(&[outline(&"n".repeat(64), 24, &[4])], "has 64 bytes");
        refused(&[outline("", 24, &[4])], "1 to 63 bytes");
        refused(&[outline("a", 39, &[2, 48])], "tensor a: rows of 48");
        refused(&[outline("a", 0, &[1, 1, 1, 1, 1])], "5 dimensions");
        refused(&[outline("a", 99, &[1])], "ggml type 99");
        let large = |name| outline(name, 27, &[1 << 60]);
        refused(&[large("a"), large("b")], "tensor b: with the tensors before it");
    }
}
