//! DLPack's capsules, by <https://dmlc.github.io/dlpack/latest/c_api.html>: the structures behind
//! `__dlpack__()`, as far as they are read here.

use std::ffi::{CStr, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::array::{Array, Kind, Place};
use crate::errors::type_error;

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Memory of the host that a GPU can reach too.
const CUDA_HOST: i32 = 3;
/// Memory that both reach, which moves.
const CUDA_MANAGED: i32 = 13;

/// The type of an element.
#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut u8,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    /// In elements; null if there are no gaps.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`, up to the tensor.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

const PLAIN_NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";

impl DataType {
    fn kind(self) -> Option<Kind> {
        // Codes of DLDataTypeCode: signed integer 0, unsigned integer 1, float 2, bfloat16 4, E4M3 10, E8M0 14, E2M1 17.
        Some(match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Kind::F32,
            (2, 16, 1) => Kind::F16,
            (4, 16, 1) => Kind::Bf16,
            (0 | 1, 32, 1) => Kind::Indices,
            (1 | 10 | 14, 8, 1) | (17, 4, 2) => Kind::Bytes,
            _ => return None,
        })
    }
}

/// An array that has `__dlpack__`. Its capsule is kept and never consumed, so that dropping it lets go of the memory.
/// A GPU's elements are ready for work on `stream`.
pub(crate) fn array(object: &Bound<'_, PyAny>, what: &'static str, stream: Option<usize>) -> PyResult<Array> {
    let py = object.py();
    let (device, id): (i32, i64) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    let place = match (device, usize::try_from(id)) {
        (CPU | CUDA_HOST, _) => Place::Host,
        (CUDA | CUDA_MANAGED, Ok(number)) => Place::Gpu(number),
        _ => {
            return Err(type_error(format!(
                "{what} is neither on a CPU nor on an NVIDIA GPU (DLPack device {device}, number {id}); copy it to the host: \
                 x.cpu() for PyTorch, jax.device_get(x) for JAX"
            )));
        }
    };
    let name = intern!(py, "__dlpack__");
    let versioned = PyDict::new(py);
    let unversioned = PyDict::new(py);
    if let (Place::Gpu(_), Some(stream)) = (place, stream) {
        // The legacy default stream is 1 here, and 0 is no stream.
        unversioned.set_item(intern!(py, "stream"), stream.max(1))?;
        versioned.update(unversioned.as_mapping())?;
    }
    versioned.set_item(intern!(py, "max_version"), (1, 0))?;
    let capsule = match object.call_method(name, (), Some(&versioned)) {
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            object.call_method(name, (), Some(&unversioned))?
        }
        called => called?,
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let is_versioned = capsule.is_valid_checked(Some(VERSIONED_NAME));
    let tensor = if is_versioned {
        let pointer = capsule.pointer_checked(Some(VERSIONED_NAME))?.cast::<Versioned>();
        // SAFETY: a capsule of this name holds this structure, which lives as long as the capsule, and nobody else has consumed it,
        // for it is new and its name is still that.
        let managed = unsafe { pointer.as_ref() };
        if managed.major != 1 {
            let (major, minor) = (managed.major, managed.minor);
            return Err(type_error(format!(
                "{what} has DLPack {major}.{minor}, and 1.x is read; pass a numpy array"
            )));
        }
        &managed.tensor
    } else {
        let pointer = capsule.pointer_checked(Some(PLAIN_NAME))?.cast::<Tensor>();
        // SAFETY: as above; `DLManagedTensor` begins with its tensor.
        unsafe { pointer.as_ref() }
    };
    let Some(kind) = tensor.dtype.kind() else {
        let DataType { code, bits, lanes } = tensor.dtype;
        return Err(type_error(format!(
            "{what} has elements of DLPack type {code} with {bits} bits and {lanes} lanes; pass float32, float16 or bfloat16 for \
             values, and uint8 or torch's 4-bit and 8-bit floats for codes and scales"
        )));
    };
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let numbers = |pointer: *const i64| match ndim {
        0 => Vec::new(),
        // SAFETY: `shape` points to `ndim` numbers, and `strides` too unless it is null, as long as the capsule lives.
        _ => unsafe { std::slice::from_raw_parts(pointer, ndim) }.to_vec(),
    };
    let dims: Vec<usize> = numbers(tensor.shape).iter().map(|n| usize::try_from(*n).unwrap_or(0)).collect();
    let strides = match tensor.strides.is_null() {
        true => None,
        false => Some(numbers(tensor.strides).iter().map(|n| *n as isize).collect()),
    };
    let data = tensor.data.wrapping_add(tensor.byte_offset as usize);
    // Arrays of JAX do not change, and their capsules do not say so.
    Array::new(what, place, data, kind, dims, strides, false, capsule.into_any().unbind())
}
