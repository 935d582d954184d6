//! Tests with a file that gguf-py wrote, and the values that gguf-py reads from it.
//!
//! `tests/golden/README.md` in the repository describes both. They are in this crate so that its
//! package can be tested without the repository.

use std::path::Path;

use microscale::{Device, QuantizedShape, QuantizedTensor};
use safetensors::SafeTensors;
use serde_json::{Map, Value as Json};

use super::blocks::Blocks;
use super::header::{GgufTensor, Header, read};
use super::metadata::Metadata;
use super::value::{MetadataValue, ValueType};
use crate::checkpoint_format::CheckpointFormat;
use crate::compare::{Difference, compare};
use crate::dtype::ggml::GgmlType;
use crate::error::Error;
use crate::error::format::FormatError;
use crate::inspect::inspect;
use crate::plan::request::Quantize;
use crate::read::checkpoint::Checkpoint;
use crate::write::gguf::{GgufOutline, create};

const FILE: &[u8] = include_bytes!("../../golden/gguf-0.19.0.gguf");
const VALUES: &[u8] = include_bytes!("../../golden/gguf-0.19.0-values.safetensors");

fn header() -> Header {
    read(Path::new("gguf-0.19.0.gguf"), FILE).unwrap()
}

/// A JSON object from the metadata of the values file.
fn expected(key: &str) -> Map<String, Json> {
    let (_, metadata) = SafeTensors::read_metadata(VALUES).unwrap();
    serde_json::from_str(&metadata.metadata().as_ref().unwrap()[key]).unwrap()
}

/// gguf-py's name of a type.
fn word(kind: ValueType) -> &'static str {
    match kind {
        ValueType::U8 => "UINT8",
        ValueType::I8 => "INT8",
        ValueType::U16 => "UINT16",
        ValueType::I16 => "INT16",
        ValueType::U32 => "UINT32",
        ValueType::I32 => "INT32",
        ValueType::F32 => "FLOAT32",
        ValueType::Bool => "BOOL",
        ValueType::String => "STRING",
        ValueType::Array => "ARRAY",
        ValueType::U64 => "UINT64",
        ValueType::I64 => "INT64",
        ValueType::F64 => "FLOAT64",
    }
}

#[test]
fn metadata_are_what_gguf_py_reads() {
    let (header, expected) = (header(), expected("metadata"));
    assert_eq!(header.entries.len(), expected.len());
    for (entry, (key, expected)) in header.entries.iter().zip(&expected) {
        assert_eq!(entry.key, *key);
        let mut types = vec![word(entry.kind)];
        let contents = &expected[1];
        let same = match &entry.value {
            MetadataValue::Unsigned(value) => contents.as_u64() == Some(*value),
            MetadataValue::Signed(value) => contents.as_i64() == Some(*value),
            MetadataValue::Float(value) => contents.as_f64() == Some(*value),
            MetadataValue::Bool(value) => contents.as_bool() == Some(*value),
            MetadataValue::Text(value) => contents.as_str() == Some(value),
            MetadataValue::Array { of, count } => {
                types.push(word(*of));
                contents.as_array().unwrap().len() as u64 == *count
            }
        };
        assert!(same, "{key}: {:?} for {contents}", entry.value);
        assert_eq!(expected[0], Json::from(types), "{key}");
    }
}

#[test]
fn tensors_have_the_names_shapes_types_and_values_that_gguf_py_reads() {
    let (header, kinds) = (header(), expected("types"));
    let values = SafeTensors::deserialize(VALUES).unwrap();
    assert_eq!(header.tensors.len(), kinds.len());
    for (tensor, (name, kind)) in header.tensors.iter().zip(&kinds) {
        assert_eq!(tensor.name, *name);
        assert_eq!(tensor.kind.to_string().to_uppercase(), kind.as_str().unwrap());
        let expected = values.tensor(name).unwrap();
        assert_eq!(tensor.shape, expected.shape(), "{name}");
        let bytes = &FILE[tensor.range.clone()];
        if let Some(found) = dequantized(tensor, bytes) {
            assert_eq!(found, expected.data(), "{name}");
        } else if tensor.kind == GgmlType::BF16 {
            let widened: Vec<u8> =
                bytes.as_chunks::<2>().0.iter().flat_map(|&[low, high]| [0, 0, low, high]).collect();
            assert_eq!(widened, expected.data(), "{name}");
        } else if tensor.kind != GgmlType::from_id(8) {
            assert_eq!(bytes, expected.data(), "{name}");
        }
    }
}

/// The values of a tensor in one of our formats, by our own dequantization, as bytes.
///
/// Only one value differs from ggml's: code 8, negative zero, is the integer 0 there and becomes
/// +0.
fn dequantized(tensor: &GgufTensor, bytes: &[u8]) -> Option<Vec<u8>> {
    let blocks = Blocks::of(tensor.kind)?;
    let (codes, scales) = blocks.unpack(bytes);
    assert_eq!(blocks.first_unheld(&scales), None);
    let (cols, rows) = tensor.shape.split_last().unwrap();
    let shape = QuantizedShape::new(blocks.format(), rows.iter().product(), *cols);
    let tensor = QuantizedTensor::from_parts(shape, codes, scales).unwrap();
    let mut values = microscale::dequantize::<f32>(&tensor);
    for (values, codes) in values.chunks_mut(2).zip(tensor.codes()) {
        for (value, code) in values.iter_mut().zip([codes & 0x0F, codes >> 4]) {
            if code == 8 {
                assert_eq!(value.to_bits(), (-0f32).to_bits());
                *value = 0.0;
            }
        }
    }
    Some(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

#[test]
fn a_file_that_is_read_and_written_again_is_the_same() {
    let header = header();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("again.gguf");
    let outlines: Vec<_> = header
        .tensors
        .iter()
        .map(|GgufTensor { name, shape, kind, .. }| GgufOutline {
            name: name.clone(),
            shape: shape.clone(),
            kind: *kind,
        })
        .collect();
    let writer = create(&path, &Metadata::of(&header, FILE), &outlines).unwrap();
    let write = |tensor, data: &[u8]| {
        writer.write_at(writer.reserve(tensor, 0, data.len()).unwrap(), data).unwrap();
    };
    for (number, tensor) in header.tensors.iter().enumerate().rev() {
        let bytes = &FILE[tensor.range.clone()];
        match Blocks::of(tensor.kind) {
            None => write(number, bytes),
            Some(blocks) => {
                let (codes, scales) = blocks.unpack(bytes);
                write(number, &blocks.pack(&codes, &scales));
            }
        }
    }
    writer.finish().unwrap();
    assert!(std::fs::read(&path).unwrap() == FILE);
}

#[test]
fn such_a_file_is_a_checkpoint_to_look_into_and_compare() {
    let directory = tempfile::tempdir().unwrap();
    // The container is recognized by its first bytes, not by the file name.
    let [path, values] = ["model.gguf.part", "values.safetensors"].map(|name| directory.path().join(name));
    std::fs::write(&path, FILE).unwrap();
    std::fs::write(&values, VALUES).unwrap();
    let (checkpoint, values) = (Checkpoint::open(&path).unwrap(), Checkpoint::open(&values).unwrap());

    let header = header();
    assert_eq!(inspect(&checkpoint).len(), header.tensors.len());
    for (found, expected) in checkpoint.tensors().zip(&header.tensors) {
        assert_eq!((found.name, found.shape, found.file), (&*expected.name, &*expected.shape, &*path));
        assert!(found.data == &FILE[expected.range.clone()] && found.dtype == expected.kind.into());
    }
    let mut ignore = |_: crate::Progress<'_>| std::ops::ControlFlow::Continue(());
    let comparison = compare(&checkpoint, &values, &Device::Cpu, &mut ignore).unwrap();
    assert!(comparison.only_first.is_empty() && comparison.only_second.is_empty());
    for tensor in comparison.tensors {
        let same = match (&*tensor.name, tensor.difference) {
            ("ids", Difference::Bytes { same }) => same,
            // The tensor has every scale byte, and 6 times the largest scale overflows f32.
            ("mx_bytes.weight", Difference::Values(errors)) => errors.max_abs_error() == 0.0,
            (_, Difference::Values(errors)) => errors.max_abs_error() == 0.0 && errors.non_finite() == 0,
            _ => false,
        };
        assert!(same, "{}", tensor.name);
    }
    let quantize = Quantize { format: Some(CheckpointFormat::default()), ..Quantize::default() };
    let refused = quantize.plan(&checkpoint).err();
    assert!(
        matches!(refused, Some(Error::Format(FormatError::OtherContainer { path: file, .. })) if file == path)
    );
}

#[test]
fn a_file_that_is_called_gguf_must_be_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    for bytes in [VALUES, &FILE[..100], b""] {
        std::fs::write(&path, bytes).unwrap();
        let refused = Checkpoint::open(&path).err().unwrap().to_string();
        assert!(refused.contains("model.gguf is not a valid GGUF file"), "{refused}");
    }
}
