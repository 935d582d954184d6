//! DLPack's capsules, by <https://dmlc.github.io/dlpack/latest/c_api.html>: the structures of
//! `__dlpack__()`, as far as they are read here.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::array::{Array, Owner, Place};
use crate::errors::{error, type_error};

pub(crate) mod pack;

use pack::{DataType, Pack};

const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Memory of the host that a GPU can reach too.
const CUDA_HOST: i32 = 3;
/// Memory that both reach, which moves.
const CUDA_MANAGED: i32 = 13;

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
