//! DLPack's capsules, by <https://dmlc.github.io/dlpack/latest/c_api.html>: the structures behind
//! `__dlpack__()`, as far as they are read here.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::array::{Array, Kind, Owner, Place};
use crate::errors::{error, type_error};

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

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

const PLAIN_NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
/// The names of capsules whose tensors have another owner.
const USED_PLAIN_NAME: &CStr = c"used_dltensor";
const USED_VERSIONED_NAME: &CStr = c"used_dltensor_versioned";

/// A tensor that was taken out of its capsule. Its memory stays until this is dropped.
pub(crate) struct Pack(Managed);

/// The structures that a capsule can hold.
enum Managed {
    Plain(NonNull<Plain>),
    Versioned(NonNull<Versioned>),
}

impl Pack {
    /// Takes the tensor out of a capsule, which other consumers see by its name.
    fn take(capsule: &Bound<'_, PyCapsule>, what: &'static str) -> PyResult<Self> {
        let is_versioned = capsule.is_valid_checked(Some(VERSIONED_NAME));
        let (name, used) = match is_versioned {
            true => (VERSIONED_NAME, USED_VERSIONED_NAME),
            false => (PLAIN_NAME, USED_PLAIN_NAME),
        };
        if !capsule.is_valid_checked(Some(name)) {
            let used = [USED_PLAIN_NAME, USED_VERSIONED_NAME];
            let found = match used.iter().any(|used| capsule.is_valid_checked(Some(used))) {
                true => "a capsule whose tensor was taken already",
                false => "a capsule without a tensor",
            };
            return Err(type_error(format!(
                "{what} has a __dlpack__ that returned {found}; return a new capsule of DLPack from each call"
            )));
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        if is_versioned {
            let versioned = pointer.cast::<Versioned>();
            // SAFETY: a capsule of this name holds this structure, and its destructor deletes it as long as the name stays. The
            // version is at the same place in all versions.
            let (major, minor) = unsafe { ((*versioned.as_ptr()).major, (*versioned.as_ptr()).minor) };
            if major != 1 {
                return Err(type_error(format!(
                    "{what} has DLPack {major}.{minor}, and 1.x is read; pass a numpy array"
                )));
            }
        }
        // SAFETY: the capsule is alive, and the name is static.
        if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Self(match is_versioned {
            true => Managed::Versioned(pointer.cast()),
            false => Managed::Plain(pointer.cast()),
        }))
    }

    fn tensor(&self) -> &Tensor {
        // SAFETY: the structures belong to `self`, whose drop calls their deleters.
        unsafe {
            match self.0 {
                Managed::Plain(plain) => &(*plain.as_ptr()).tensor,
                Managed::Versioned(versioned) => &(*versioned.as_ptr()).tensor,
            }
        }
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        // SAFETY: the producer made the structure, `take` left it to `self` only, and a deleter is called once, with its structure.
        // Deleters may be called from any thread.
        unsafe {
            match self.0 {
                Managed::Plain(plain) => {
                    if let Some(deleter) = (*plain.as_ptr()).deleter {
                        deleter(plain.as_ptr());
                    }
                }
                Managed::Versioned(versioned) => {
                    if let Some(deleter) = (*versioned.as_ptr()).deleter {
                        deleter(versioned.as_ptr());
                    }
                }
            }
        }
    }
}

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

    /// The name of a type whose kind is known.
    fn name(self, kind: Kind) -> &'static str {
        match self.code {
            10 => "float8_e4m3fn",
            14 => "float8_e8m0fnu",
            17 => "float4_e2m1fn_x2",
            _ => kind.name(),
        }
    }
}

/// An array that has `__dlpack__`, which is taken out of its capsule.
/// A GPU's elements are ready for work on `stream`.
pub(crate) fn array(object: &Bound<'_, PyAny>, what: &'static str, stream: Option<usize>) -> PyResult<Array> {
    let py = object.py();
    let device = object.call_method0(intern!(py, "__dlpack_device__"))?;
    let Ok((device, id)) = device.extract::<(i32, i64)>() else {
        return Err(type_error(format!(
            "{what} has a __dlpack_device__ that returned {device}; return two integers, a type and a number"
        )));
    };
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
    let Ok(capsule) = capsule.cast::<PyCapsule>() else {
        let class = capsule.get_type().name()?;
        return Err(type_error(format!(
            "{what} has a __dlpack__ that returned a {class}; return a capsule of DLPack"
        )));
    };
    let pack = Pack::take(capsule, what)?;
    let tensor = pack.tensor();
    let Some(kind) = tensor.dtype.kind() else {
        let DataType { code, bits, lanes } = tensor.dtype;
        return Err(type_error(format!(
            "{what} has elements of DLPack type {code} with {bits} bits and {lanes} lanes; pass float32, float16 or bfloat16 for \
             values, and uint8 or torch's 4-bit and 8-bit floats for codes and scales"
        )));
    };
    let ndim = usize::try_from(tensor.ndim).ok().filter(|ndim| *ndim == 0 || !tensor.shape.is_null());
    let malformed =
        || error(py, format!("{what} has a shape that DLPack does not allow; pass a numpy array"));
    let ndim = ndim.ok_or_else(malformed)?;
    let numbers = |pointer: *const i64| match ndim {
        0 => &[][..],
        // SAFETY: the pointer is not null, and points to `ndim` numbers as long as `pack` lives.
        _ => unsafe { std::slice::from_raw_parts(pointer, ndim) },
    };
    let dims: Option<Vec<usize>> = numbers(tensor.shape).iter().map(|n| usize::try_from(*n).ok()).collect();
    let dims = dims.ok_or_else(malformed)?;
    let strides = match tensor.strides.is_null() {
        true => None,
        false => Some(numbers(tensor.strides).iter().map(|n| *n as isize).collect()),
    };
    let data = match tensor.data.is_null() {
        true => tensor.data,
        false => tensor.data.wrapping_add(tensor.byte_offset as usize),
    };
    let name = tensor.dtype.name(kind);
    // Arrays of JAX do not change, and their capsules do not say so.
    Ok(Array::new(what, place, data, kind, dims, strides, false, Owner::Pack(pack))?.named(name))
}
