//! The values of a pickle, and the few names that it may use.

use std::ops::Range;

use safetensors::Dtype;

use super::Parsed;

/// The number of a value.
pub(super) type Id = u32;

/// A value. Tuples, dictionaries and tensors refer to other values by number, so none is copied.
#[derive(Debug)]
pub(super) enum PickleValue<'a> {
    None,
    Bool,
    Float,
    Int(i64),
    Text(&'a str),
    /// The range of its items in the pickle's list of all items.
    Tuple(Range<Id>),
    List,
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(TorchStorage<'a>),
    Tensor(Box<Strided<'a>>),
}

/// A storage: the elements of one or more tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct TorchStorage<'a> {
    /// The dtype; `None` for untyped storages, whose tensors have dtypes of their own.
    pub(super) dtype: Option<Dtype>,
    pub(super) key: &'a str,
}

/// A tensor: elements of a storage. [`Pickle::sizes`](super::pickle::Pickle::sizes) reads its
/// numbers.
#[derive(Debug)]
pub(super) struct Strided<'a> {
    pub(super) dtype: Dtype,
    pub(super) key: &'a str,
    /// The number of elements before the first one: an integer.
    pub(super) offset: Id,
    /// The sizes: a tuple of integers.
    pub(super) shape: Id,
    /// Elements from one to the next in each dimension: a tuple of integers.
    pub(super) strides: Id,
    /// The metadata, a dictionary. `torch.save` marks negated and conjugated tensors there.
    pub(super) metadata: Option<Id>,
}

/// The names that a pickle may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    /// Makes a tensor from a typed storage.
    Tensor,
    /// Makes a tensor from an untyped storage and a dtype.
    TensorOfBytes,
    /// Makes a parameter from a tensor.
    Parameter,
    /// Makes a tuple of sizes.
    Size,
    /// A storage class; `None` for the untyped one.
    Storage(Option<Dtype>),
    Dtype(Dtype),
}

/// The storage classes, and the dtypes of their elements.
const STORAGES: [(&str, Dtype); 10] = [
    ("FloatStorage", Dtype::F32),
    ("HalfStorage", Dtype::F16),
    ("BFloat16Storage", Dtype::BF16),
    ("DoubleStorage", Dtype::F64),
    ("LongStorage", Dtype::I64),
    ("IntStorage", Dtype::I32),
    ("ShortStorage", Dtype::I16),
    ("CharStorage", Dtype::I8),
    ("ByteStorage", Dtype::U8),
    ("BoolStorage", Dtype::BOOL),
];

/// The dtypes that tensors of untyped storages may have.
const DTYPES: [(&str, Dtype); 16] = [
    ("float32", Dtype::F32),
    ("float16", Dtype::F16),
    ("bfloat16", Dtype::BF16),
    ("float64", Dtype::F64),
    ("int64", Dtype::I64),
    ("int32", Dtype::I32),
    ("int16", Dtype::I16),
    ("int8", Dtype::I8),
    ("uint8", Dtype::U8),
    ("bool", Dtype::BOOL),
    ("uint16", Dtype::U16),
    ("uint32", Dtype::U32),
    ("uint64", Dtype::U64),
    ("float8_e4m3fn", Dtype::F8_E4M3),
    ("float8_e5m2", Dtype::F8_E5M2),
    ("float8_e8m0fnu", Dtype::F8_E8M0),
];

impl Global {
    /// Looks up a name in a module. Unknown names are an error.
    pub(super) fn named(module: &str, name: &str) -> Parsed<Self> {
        let of = |table: &[(&str, Dtype)]| {
            let found = table.iter().find(|(known, _)| module == "torch" && *known == name);
            found.map(|(_, dtype)| *dtype)
        };
        if let Some(dtype) = of(&STORAGES) {
            return Ok(Self::Storage(Some(dtype)));
        }
        if let Some(dtype) = of(&DTYPES) {
            return Ok(Self::Dtype(dtype));
        }
        Ok(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::Tensor,
            ("torch._utils", "_rebuild_tensor_v3") => Self::TensorOfBytes,
            ("torch._utils", "_rebuild_parameter") => Self::Parameter,
            ("torch", "Size") => Self::Size,
            ("torch.storage", "UntypedStorage") => Self::Storage(None),
            _ => {
                let name = format!("{module}.{name}");
                return Err(format!(
                    "its pickle uses {name:?}, which no dictionary of tensors needs; nothing of it was run"
                ));
            }
        })
    }
}
