//! The tensors of a PyTorch file: the dictionary that contains them, and the bytes of each.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;

use super::archive::Archive;
use super::pickle::Pickle;
use super::value::{Id, PickleValue, Strided};
use super::{Parsed, strided};
use crate::error::file::FileError;
use crate::error::{Error, Result};
use crate::limits::{SHARED, SIZES, check_name, check_tensors};

/// A tensor of a file.
pub(crate) struct PickleTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: TensorData,
}

/// Where the bytes of a tensor are.
pub(crate) enum TensorData {
    /// In the file, contiguous.
    Mapped(Range<usize>),
    /// In the file, not contiguous.
    Strided(strided::Elements),
}

/// Reads the tensors of a file's bytes, in the order of their data. Each one lies inside its
/// storage.
///
/// # Errors
/// [`FileError::Pytorch`](crate::FileError::Pytorch) or
/// [`FileError::PytorchTensor`](crate::FileError::PytorchTensor) if the file is invalid.
pub(crate) fn read(file: &Path, bytes: &[u8]) -> Result<Vec<PickleTensor>> {
    let wrong = |why| Error::File(FileError::Pytorch { file: file.into(), why });
    let archive = Archive::open(bytes).map_err(wrong)?;
    let (pickle, top) = Pickle::read(archive.pickle()).map_err(wrong)?;
    let named = dictionary(&pickle, top).map_err(wrong)?;
    check_tensors(named.len()).map_err(wrong)?;
    let (mut tensors, mut seen) = (Vec::with_capacity(named.len()), HashSet::new());
    // Tensors may share storages, so the total size is limited, and the size of copies even more.
    let (mut all, mut copied) = (0u64, 0u64);
    let [most, most_copied] = [SHARED, 1].map(|times| (bytes.len() as u64).saturating_mul(times));
    let (mut storages, mut sizes) = (HashMap::new(), 0);
    for (name, strided) in named {
        let refuse = |why| {
            let (file, tensor) = (file.into(), name.into());
            Error::File(FileError::PytorchTensor { file, tensor, why })
        };
        check_name(name).map_err(wrong)?;
        if !seen.insert(name) {
            return Err(refuse("it is there twice".into()));
        }
        let storage = match storages.get(strided.key) {
            Some(storage) => Range::clone(storage),
            None => {
                let storage = archive.storage(strided.key).map_err(refuse)?;
                storages.entry(strided.key).or_insert(storage).clone()
            }
        };
        check_metadata(&pickle, strided.metadata).map_err(refuse)?;
        let elements = StoredElements::of(&pickle, strided).map_err(refuse)?;
        sizes += elements.shape.len();
        if sizes > SIZES {
            return Err(wrong(format!("its tensors have more than the {SIZES} sizes allowed in all")));
        }
        let (data, bytes) = locate(&elements, storage).map_err(refuse)?;
        all += bytes;
        copied += if matches!(data, TensorData::Strided(_)) { bytes } else { 0 };
        if all > most || copied > most_copied {
            return Err(refuse(
                "tensors that share storages have far more bytes in all than the file".into(),
            ));
        }
        let StoredElements { dtype, shape, .. } = elements;
        tensors.push(PickleTensor { name: name.into(), dtype, shape, data });
    }
    tensors.sort_by_key(|tensor| match &tensor.data {
        TensorData::Mapped(range) => range.start,
        TensorData::Strided(_) => usize::MAX,
    });
    Ok(tensors)
}

/// The tensors of a dictionary by name.
///
/// It is the pickle's own dictionary, or the only dictionary of tensors inside it: training
/// programs save a model next to other things.
fn dictionary<'p, 'a>(pickle: &'p Pickle<'a>, top: Id) -> Parsed<Vec<(&'p str, &'p Strided<'a>)>> {
    let PickleValue::Dict(entries) = pickle.value(top) else {
        return Err("it is not a dictionary of tensors".into());
    };
    let here = tensors_of(pickle, entries)?;
    if !here.is_empty() {
        return Ok(here);
    }
    let (mut found, mut seen) = (None::<(&str, Vec<_>)>, HashSet::new());
    for (key, value) in entries {
        let (PickleValue::Text(key), PickleValue::Dict(entries)) = (pickle.value(*key), pickle.value(*value))
        else {
            continue;
        };
        // Many keys may refer to the same dictionary, whose entries are visited once.
        if !seen.insert(value) {
            continue;
        }
        let inside = tensors_of(pickle, entries)?;
        match &found {
            _ if inside.is_empty() => {}
            Some((other, _)) => {
                return Err(format!(
                    "{other:?} and {key:?} in it are both dictionaries of tensors; save only the intended one"
                ));
            }
            None => found = Some((key, inside)),
        }
    }
    found.map(|(_, tensors)| tensors).ok_or_else(|| "it holds no tensors".into())
}

/// The tensors of a dictionary. Other values in it, such as numbers, are not weights.
fn tensors_of<'p, 'a>(
    pickle: &'p Pickle<'a>,
    entries: &[(Id, Id)],
) -> Parsed<Vec<(&'p str, &'p Strided<'a>)>> {
    let mut tensors = Vec::new();
    for (key, value) in entries {
        match (pickle.value(*key), pickle.value(*value)) {
            (PickleValue::Text(name), PickleValue::Tensor(tensor)) => tensors.push((*name, &**tensor)),
            (_, PickleValue::Tensor(_)) => return Err("a tensor in it has a key that is not a text".into()),
            _ => {}
        }
    }
    Ok(tensors)
}

/// Refuses tensors whose values differ from the stored ones: negated or conjugated views.
fn check_metadata(pickle: &Pickle<'_>, metadata: Option<Id>) -> Parsed<()> {
    match metadata.map(|metadata| pickle.value(metadata)) {
        None | Some(PickleValue::None) => Ok(()),
        Some(PickleValue::Dict(entries)) if entries.is_empty() => Ok(()),
        Some(PickleValue::Dict(entries)) => {
            let names = entries.iter().take(4).map(|(name, _)| match pickle.value(*name) {
                PickleValue::Text(name) => format!("{:?}", name.chars().take(20).collect::<String>()),
                _ => "a key that is not a text".into(),
            });
            Err(format!(
                "torch.save marks it with {}, so its values are not the stored ones; save it with \
                 .resolve_conj().resolve_neg()",
                names.collect::<Vec<_>>().join(", ")
            ))
        }
        Some(_) => Err("its metadata is not a dictionary".into()),
    }
}

/// A tensor's elements in its storage.
struct StoredElements {
    dtype: Dtype,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl StoredElements {
    fn of(pickle: &Pickle<'_>, tensor: &Strided<'_>) -> Parsed<Self> {
        let (shape, strides) = (pickle.sizes(tensor.shape)?, pickle.sizes(tensor.strides)?);
        if shape.len() != strides.len() {
            return Err(format!("it has the sizes {shape:?} and the strides {strides:?}"));
        }
        Ok(Self { dtype: tensor.dtype, offset: pickle.size(tensor.offset)?, shape, strides })
    }
}

/// Locates a tensor's bytes in the range of its storage. Returns them with their number.
fn locate(tensor: &StoredElements, storage: Range<usize>) -> Parsed<(TensorData, u64)> {
    let StoredElements { dtype, offset, shape, strides } = tensor;
    let each = dtype.bitsize() / 8;
    // Counts like safetensors: a size of 0 before the others avoids an overflow.
    let elements = shape.iter().try_fold(1usize, |elements, size| elements.checked_mul(*size));
    let bytes = elements.and_then(|elements| elements.checked_mul(each));
    let bytes = bytes.ok_or_else(|| format!("the shape {shape:?} has more elements than can be counted"))?;
    if bytes == 0 {
        return Ok((TensorData::Mapped(storage.start..storage.start), 0));
    }
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(*offset, |last, (size, stride)| last.checked_add((size - 1).checked_mul(*stride)?));
    let end = last.and_then(|last| last.checked_add(1)?.checked_mul(each));
    if end.is_none_or(|end| end > storage.len()) {
        return Err(format!(
            "{dtype} of shape {shape:?} with strides {strides:?} from {offset} on ends beyond its storage of {} bytes",
            storage.len()
        ));
    }
    let start = storage.start + offset * each;
    let mut next = 1;
    let follow = shape.iter().zip(strides).rev().all(|(size, stride)| {
        let follows = *size == 1 || *stride == next;
        next *= size;
        follows
    });
    if follow {
        return Ok((TensorData::Mapped(start..start + bytes), bytes as u64));
    }
    if bytes > storage.len() {
        return Err(format!(
            "its shape {shape:?} with strides {strides:?} repeats elements of a storage of {} bytes; save it with \
             .contiguous()",
            storage.len()
        ));
    }
    let strides = strides.iter().map(|stride| stride * each).collect();
    Ok((TensorData::Strided(strided::Elements { start, each, shape: shape.clone(), strides }), bytes as u64))
}
