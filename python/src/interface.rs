//! Whose an array is: numpy's interface, or DLPack's.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyDictMethods};

use crate::array::{Array, Kind};
use crate::dlpack;
use crate::errors::{error, type_error};

/// Finds the elements of an object that has `__array_interface__` or `__dlpack__`. `what` names it in errors.
pub(crate) fn array_of(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Array> {
    let py = object.py();
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        return of_interface(object, &interface.cast_into::<PyDict>()?, what);
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return dlpack::array(object, what);
    }
    let class = object.get_type().name()?;
    Err(type_error(format!(
        "{what} is a {class}; pass an array of numpy, a tensor of PyTorch on a CPU, or another object that has __dlpack__ or the \
         buffer protocol"
    )))
}

/// By numpy's interface, <https://numpy.org/doc/stable/reference/arrays.interface.html>.
fn of_interface(
    object: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyDict>,
    what: &'static str,
) -> PyResult<Array> {
    let py = object.py();
    let missing = |key: &str| type_error(format!("{what} has no {key} in its __array_interface__"));
    let typestr = interface.get_item(intern!(py, "typestr"))?.ok_or_else(|| missing("typestr"))?;
    let kind = match typestr.extract::<&str>()? {
        "<f4" => Some(Kind::F32),
        "<f2" => Some(Kind::F16),
        "|u1" => Some(Kind::Bytes),
        // What numpy does not know itself has a name alone.
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
    let data = std::ptr::with_exposed_provenance_mut(address);
    Array::new(what, data, kind, dims, strides, !read_only, object.clone().unbind())
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
