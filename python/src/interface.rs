//! Finding the elements of objects: tensors of PyTorch, arrays of numpy, and objects with an array
//! interface or DLPack.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyDictMethods, PyString, PyTuple, PyTupleMethods};

use crate::array::{Array, Kind, Owner, Place};
use crate::dlpack;
use crate::errors::{error, no_memory, type_error};

/// Finds the elements of an object in the memory of CPUs that has `__array_interface__` or
/// `__dlpack__`, or is a tensor of PyTorch. `what` names it in errors. Only arrays of numpy and
/// tensors of PyTorch can be written to.
pub(crate) fn array_of(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Array> {
    let found = found(object, what, None)?;
    let array = match found {
        Found::Kept(array) => array,
        Found::Unkept(array) => array.copied()?,
    };
    match array.place() {
        Place::Host => Ok(array),
        place => Err(type_error(format!(
            "{what} is in the memory of {place} and other arguments are in the CPU's; move them to one device"
        ))),
    }
}

/// [`array_of`] for objects in the memory of GPUs too, such as those with
/// `__cuda_array_interface__`. Work on `stream` may read and write the elements afterwards. Without
/// a stream, objects of GPUs may be looked at, but not worked with.
pub(crate) fn array_anywhere(
    object: &Bound<'_, PyAny>,
    what: &'static str,
    stream: Option<usize>,
) -> PyResult<Array> {
    match found(object, what, stream)? {
        Found::Kept(array) | Found::Unkept(array) => Ok(array),
    }
}

/// The shape of an object and the name of its dtype, which some objects have in their protocol
/// only.
#[pyfunction]
pub(crate) fn described<'py>(array: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyTuple>, &'static str)> {
    let found = array_anywhere(array, "the array", None)?;
    Ok((PyTuple::new(array.py(), found.dims())?, found.name()))
}

/// An array, and whether its object keeps the memory for as long as the array is alive.
enum Found {
    Kept(Array),
    /// An address in the memory of CPUs that is valid until other code of Python runs.
    Unkept(Array),
}

/// [`array_anywhere`], with the difference that [`Found`] makes.
fn found(object: &Bound<'_, PyAny>, what: &'static str, stream: Option<usize>) -> PyResult<Found> {
    let py = object.py();
    if is_torch(object)? {
        return of_torch(object, what).map(Found::Kept);
    }
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        let keeps = is_numpy(object)?;
        let array = of_interface(object, &dictionary(interface, what)?, what, |_| Ok(Place::Host))?;
        if keeps {
            return Ok(Found::Kept(array));
        }
        if array.dims().is_empty() {
            // Scalars of numpy give the address of a temporary array.
            return Err(error(py, format!("{what} has no dimensions; it must have one or more")));
        }
        return Ok(Found::Unkept(array));
    }
    #[cfg(feature = "cuda")]
    if let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? {
        let interface = dictionary(interface, what)?;
        let own_stream = interface.get_item(intern!(py, "stream"))?.filter(|stream| !stream.is_none());
        let array =
            of_interface(object, &interface, what, |address| crate::gpu::place_of(py, address, what))?;
        return Ok(Found::Kept(array.on_stream(own_stream.map(|stream| stream.extract()).transpose()?)));
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return dlpack::array(object, what, stream).map(Found::Kept);
    }
    let class = object.get_type().name()?;
    Err(type_error(format!(
        "{what} is a {class}; pass an array of numpy, a tensor of PyTorch, or another object that has __dlpack__, \
         __cuda_array_interface__ or the buffer protocol"
    )))
}

/// The module of this name, if it was imported.
fn imported<'py>(py: Python<'py>, name: &Bound<'py, PyString>) -> PyResult<Option<Bound<'py, PyAny>>> {
    py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?.get_item(name)
}

/// Whether an object is a tensor of PyTorch.
pub(crate) fn is_torch(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    if TENSOR.get(py).is_none()
        && let Some(torch) = imported(py, intern!(py, "torch"))?
    {
        let tensor = torch.getattr(intern!(py, "Tensor"))?.unbind();
        TENSOR.get_or_init(py, || tensor);
    }
    TENSOR.get(py).map_or(Ok(false), |tensor| object.is_instance(tensor.bind(py)))
}

/// Whether an object is an array of numpy, which owns its memory or keeps its owner. Its class has
/// numpy's own `__array_interface__`.
fn is_numpy(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static NDARRAY: PyOnceLock<[Py<PyAny>; 2]> = PyOnceLock::new();
    let py = object.py();
    let name = intern!(py, "__array_interface__");
    if NDARRAY.get(py).is_none()
        && let Some(numpy) = imported(py, intern!(py, "numpy"))?
    {
        let ndarray = numpy.getattr(intern!(py, "ndarray"))?;
        let interface = ndarray.getattr(name)?.unbind();
        NDARRAY.get_or_init(py, || [ndarray.unbind(), interface]);
    }
    let Some([ndarray, interface]) = NDARRAY.get(py) else { return Ok(false) };
    let class = object.get_type();
    Ok(class.is(ndarray) || (object.is_instance(ndarray.bind(py))? && class.getattr(name)?.is(interface)))
}

/// An array interface, which is a dictionary.
fn dictionary<'py>(interface: Bound<'py, PyAny>, what: &'static str) -> PyResult<Bound<'py, PyDict>> {
    interface.cast_into::<PyDict>().map_err(|wrong| {
        let found = wrong.into_inner();
        type_error(format!("{what} has an array interface that is {found} and must be a dictionary"))
    })
}

/// By numpy's interface, <https://numpy.org/doc/stable/reference/arrays.interface.html>, or the one
/// of GPUs, with the same keys for elements:
/// <https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html>. `place` finds the
/// memory that an address is in.
fn of_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyDict>,
    what: &'static str,
    place: impl FnOnce(usize) -> PyResult<Place>,
) -> PyResult<Array> {
    let py = object.py();
    let missing = |key: &str| type_error(format!("{what} has no {key} in its array interface"));
    let wrong = |key: &str| {
        type_error(format!(
            "{what} has a {key} in its array interface that is not read; pass an array of numpy"
        ))
    };
    let typestr = interface.get_item(intern!(py, "typestr"))?.ok_or_else(|| missing("typestr"))?;
    let known = |kind: Kind| Some((kind, kind.name()));
    let kind = match typestr.extract::<&str>().map_err(|_| wrong("typestr"))? {
        "<f4" => known(Kind::F32),
        "<f2" => known(Kind::F16),
        "|u1" => known(Kind::Bytes),
        "<i4" | "<u4" => known(Kind::Indices),
        "<i8" => known(Kind::Longs),
        // numpy has no type string for the dtypes of ml_dtypes.
        "<V2" | "<V1" | "|V1" => match dtype_name(object)?.as_str() {
            "bfloat16" => known(Kind::Bf16),
            "float8_e4m3fn" => Some((Kind::Bytes, "float8_e4m3fn")),
            "float8_e8m0fnu" => Some((Kind::Bytes, "float8_e8m0fnu")),
            _ => None,
        },
        _ => None,
    };
    let Some((kind, name)) = kind else {
        return Err(type_error(format!(
            "{what} has dtype {}; pass float32, float16 or bfloat16 of this machine's byte order for values, uint8 for codes and \
             scales",
            dtype_name(object)?
        )));
    };
    let shape = interface.get_item(intern!(py, "shape"))?.ok_or_else(|| missing("shape"))?;
    let dims: Vec<usize> = shape.extract().map_err(|_| wrong("shape"))?;
    let strides = interface.get_item(intern!(py, "strides"))?.filter(|strides| !strides.is_none());
    let strides = strides.map(|strides| strides.extract::<Vec<isize>>().map_err(|_| wrong("strides")));
    let strides = strides.transpose()?.map(|bytes| in_elements(py, &bytes, &dims, kind, what)).transpose()?;
    let data = interface.get_item(intern!(py, "data"))?.ok_or_else(|| missing("data"))?;
    let (address, read_only): (usize, bool) = data.extract().map_err(|_| wrong("data"))?;
    let (place, data) = (place(address)?, std::ptr::with_exposed_provenance_mut(address));
    let owner = Owner::Object(object.clone().unbind());
    Ok(Array::new(what, place, data, kind, dims, strides, !read_only, owner)?.named(name))
}

/// A tensor of PyTorch, by its methods: they take a tenth of the time of its `__dlpack__`.
/// On a CPU the storage is the owner: a tensor may get another one during a call.
fn of_torch(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Array> {
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
    let address_of = |object: &Bound<'_, PyAny>| -> PyResult<usize> {
        object.call_method0(intern!(py, "data_ptr")).map_err(|_| no_memory(what))?.extract()
    };
    if place != Place::Host {
        let data = std::ptr::with_exposed_provenance_mut(address_of(object)?);
        let owner = Owner::Object(object.clone().unbind());
        return Array::new(what, place, data, *kind, dims, Some(strides), true, owner);
    }
    let storage = object.call_method0(intern!(py, "untyped_storage")).map_err(|_| no_memory(what))?;
    let first = address_of(&storage)?;
    if first == 0 && !dims.contains(&0) {
        return Err(no_memory(what));
    }
    let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let data: *mut u8 = std::ptr::with_exposed_provenance_mut(address_of(object)?);
    let owner = Owner::Object(storage.unbind());
    let array = Array::new(what, place, data, *kind, dims, Some(strides), true, owner)?;
    let end = data.addr().checked_sub(first).and_then(|offset| offset.checked_add(array.span_bytes()));
    if array.span() > 0 && end.is_none_or(|end| end > bytes) {
        return Err(error(
            py,
            format!("{what} has elements outside of its storage of {bytes} bytes; pass {what}.clone()"),
        ));
    }
    Ok(array)
}

/// A new tensor of PyTorch for an output, contiguous and on the device of another array. Only its
/// address and size are read, to save time for small tensors.
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
    let owner = Owner::Object(object.clone().unbind());
    Array::new(what, place, data, kind, vec![count], None, true, owner)
}

static TORCH: PyOnceLock<Vec<(Py<PyAny>, Kind)>> = PyOnceLock::new();

/// PyTorch's dtypes that are read.
fn torch_dtypes(py: Python<'_>) -> PyResult<Vec<(Py<PyAny>, Kind)>> {
    let torch = py.import("torch")?;
    let kinds = [Kind::F32, Kind::F16, Kind::Bf16, Kind::Bytes, Kind::Indices, Kind::Longs];
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
