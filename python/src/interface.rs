//! Owners of arrays: numpy, or what has its interface; PyTorch; or anybody who has DLPack.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyDictMethods, PyTuple, PyTupleMethods};

use crate::array::{Array, Kind, Place};
use crate::dlpack;
use crate::errors::{error, type_error};

/// Finds the elements of an object in the memory of CPUs that has `__array_interface__` or `__dlpack__`, or is a tensor of PyTorch.
/// `what` names it in errors.
pub(crate) fn array_of(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Array> {
    let array = array_anywhere(object, what, None)?;
    match array.place() {
        Place::Host => Ok(array),
        place => Err(type_error(format!(
            "{what} is in the memory of {place} and other arguments are in the CPU's; move them to one device"
        ))),
    }
}

/// [`array_of`] for objects in the memory of GPUs too, such as those with `__cuda_array_interface__`. Work on `stream` may read and
/// write the elements afterwards. Without a stream, objects of GPUs may be looked at, but not worked with.
pub(crate) fn array_anywhere(
    object: &Bound<'_, PyAny>,
    what: &'static str,
    stream: Option<usize>,
) -> PyResult<Array> {
    let py = object.py();
    if let Some(data_ptr) = object.getattr_opt(intern!(py, "data_ptr"))? {
        return of_torch(object, &data_ptr, what);
    }
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        return of_interface(object, &interface.cast_into::<PyDict>()?, what, |_| Ok(Place::Host));
    }
    #[cfg(feature = "cuda")]
    if let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? {
        let interface = interface.cast_into::<PyDict>()?;
        let own_stream = interface.get_item(intern!(py, "stream"))?.filter(|stream| !stream.is_none());
        let array =
            of_interface(object, &interface, what, |address| crate::gpu::place_of(py, address, what))?;
        return Ok(array.on_stream(own_stream.map(|stream| stream.extract()).transpose()?));
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return dlpack::array(object, what, stream);
    }
    let class = object.get_type().name()?;
    Err(type_error(format!(
        "{what} is a {class}; pass an array of numpy, a tensor of PyTorch, or another object that has __dlpack__, \
         __cuda_array_interface__ or the buffer protocol"
    )))
}

/// By numpy's interface, <https://numpy.org/doc/stable/reference/arrays.interface.html>, or that of GPUs, which is the same but for
/// keys that are not for elements: <https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html>. `place` finds the memory
/// that an address is in.
fn of_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyDict>,
    what: &'static str,
    place: impl FnOnce(usize) -> PyResult<Place>,
) -> PyResult<Array> {
    let py = object.py();
    let missing = |key: &str| type_error(format!("{what} has no {key} in its array interface"));
    let typestr = interface.get_item(intern!(py, "typestr"))?.ok_or_else(|| missing("typestr"))?;
    let kind = match typestr.extract::<&str>()? {
        "<f4" => Some(Kind::F32),
        "<f2" => Some(Kind::F16),
        "|u1" => Some(Kind::Bytes),
        "<i4" | "<u4" => Some(Kind::Indices),
        // A dtype that numpy does not know itself has a name alone.
        "<V2" | "<V1" | "|V1" => match dtype_name(object)?.as_str() {
            "bfloat16" => Some(Kind::Bf16),
            "float8_e4m3fn" | "float8_e8m0fnu" => Some(Kind::Bytes),
            _ => None,
        },
        _ => None,
    };
    let Some(kind) = kind else {
        return Err(type_error(format!(
            "{what} has dtype {}; pass float32, float16 or bfloat16 of this machine's byte order for values, uint8 for codes and \
             scales",
            dtype_name(object)?
        )));
    };
    let shape = interface.get_item(intern!(py, "shape"))?.ok_or_else(|| missing("shape"))?;
    let dims: Vec<usize> = shape.extract()?;
    let data = interface.get_item(intern!(py, "data"))?.ok_or_else(|| missing("data"))?;
    let (address, read_only): (usize, bool) = data.extract()?;
    let strides = interface.get_item(intern!(py, "strides"))?.filter(|strides| !strides.is_none());
    let strides: Option<Vec<isize>> = strides.map(|strides| strides.extract()).transpose()?;
    let strides = strides.map(|bytes| in_elements(py, &bytes, &dims, kind, what)).transpose()?;
    let (place, data) = (place(address)?, std::ptr::with_exposed_provenance_mut(address));
    Array::new(what, place, data, kind, dims, strides, !read_only, object.clone().unbind())
}

/// A tensor of PyTorch, by its methods: they take a tenth of the time of its `__dlpack__`.
fn of_torch(object: &Bound<'_, PyAny>, data_ptr: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Array> {
    let py = object.py();
    let place = if object.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        Place::Gpu(object.call_method0(intern!(py, "get_device"))?.extract()?)
    } else if object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        Place::Host
    } else {
        return Err(type_error(format!(
            "{what} is neither on a CPU nor on an NVIDIA GPU; pass {what}.cpu()"
        )));
    };
    if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Err(type_error(format!("{what} is a view that negates; pass {what}.resolve_neg()")));
    }
    let dtype = object.getattr(intern!(py, "dtype"))?;
    let known = TORCH.get_or_try_init(py, || torch_dtypes(py))?;
    let Some((_, kind)) = known.iter().find(|(known, _)| known.is(&dtype)) else {
        return Err(type_error(format!(
            "{what} has dtype {dtype}; pass float32, float16 or bfloat16 for values, uint8 for codes and scales"
        )));
    };
    let (dims, strides) =
        (object.getattr(intern!(py, "shape"))?, object.call_method0(intern!(py, "stride"))?);
    let dims = dims.cast::<PyTuple>()?.iter().map(|n| n.extract()).collect::<PyResult<Vec<usize>>>()?;
    let strides = strides.cast::<PyTuple>()?.iter().map(|n| n.extract()).collect::<PyResult<Vec<isize>>>()?;
    let address: usize = data_ptr.call0()?.extract()?;
    let data = std::ptr::with_exposed_provenance_mut(address);
    Array::new(what, place, data, *kind, dims, Some(strides), true, object.clone().unbind())
}

/// A tensor of PyTorch that the package has just made for an output of so many elements of a kind, without gaps and where another array is:
/// its address and its bytes alone are asked for, as small tensors are not to wait for more.
pub(crate) fn new_output(
    object: &Bound<'_, PyAny>,
    what: &'static str,
    (kind, count): (Kind, usize),
    place: Place,
) -> PyResult<Array> {
    let py = object.py();
    let bytes: usize = object.getattr(intern!(py, "nbytes"))?.extract()?;
    if bytes != count.saturating_mul(kind.bytes()) {
        return Err(error(py, format!("{what} was made for another shape; x changed meanwhile")));
    }
    let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let data = std::ptr::with_exposed_provenance_mut(address);
    Array::new(what, place, data, kind, vec![count], None, true, object.clone().unbind())
}

static TORCH: PyOnceLock<Vec<(Py<PyAny>, Kind)>> = PyOnceLock::new();

/// PyTorch's dtypes that are read.
fn torch_dtypes(py: Python<'_>) -> PyResult<Vec<(Py<PyAny>, Kind)>> {
    let torch = py.import("torch")?;
    let kinds = [Kind::F32, Kind::F16, Kind::Bf16, Kind::Bytes, Kind::Indices];
    kinds.into_iter().map(|kind| Ok((torch.getattr(kind.name())?.unbind(), kind))).collect()
}

/// The name of an array's dtype.
fn dtype_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    match object.getattr_opt(intern!(object.py(), "dtype"))? {
        Some(dtype) => dtype.getattr(intern!(object.py(), "name"))?.extract(),
        None => Ok("unknown".into()),
    }
}

/// Strides in elements, of those in bytes.
fn in_elements(
    py: Python<'_>,
    bytes: &[isize],
    dims: &[usize],
    kind: Kind,
    what: &'static str,
) -> PyResult<Vec<isize>> {
    let size = kind.bytes() as isize;
    let apart = |(stride, count): (&isize, &usize)| *count > 1 && stride % size != 0;
    if bytes.len() != dims.len() || bytes.iter().zip(dims).any(apart) {
        let name = kind.name();
        return Err(error(
            py,
            format!(
                "{what} has strides that are no multiples of {name}'s {size} bytes; pass a contiguous copy of it"
            ),
        ));
    }
    Ok(bytes.iter().map(|stride| stride / size).collect())
}
