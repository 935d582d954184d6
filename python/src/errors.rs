//! Exceptions. Their classes are Python's, in `microscale/_errors.py`.

use std::error::Error as _;

use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// A class of `microscale._errors`.
fn class<'py>(
    py: Python<'py>,
    cell: &PyOnceLock<Py<PyType>>,
    name: &'static str,
) -> PyResult<Bound<'py, PyType>> {
    cell.import(py, "microscale._errors", name).cloned()
}

static ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static NON_FINITE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static CHECKPOINT: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// `microscale.Error` with a message.
pub(crate) fn error(py: Python<'_>, message: impl ToString) -> PyErr {
    raised(class(py, &ERROR, "Error").and_then(|class| class.call1((message.to_string(),))))
}

/// `TypeError` with a message.
pub(crate) fn type_error(message: impl ToString) -> PyErr {
    PyTypeError::new_err(message.to_string())
}

/// The error for an array without an address.
pub(crate) fn no_memory(what: &'static str) -> PyErr {
    type_error(format!(
        "{what} has no memory that can be read: it is fake, functional, wrapped or freed; pass a plain array or tensor, and where \
         PyTorch compiles or transforms functions call torch.ops.microscale"
    ))
}

/// The exception that was made, or what kept it from being made.
fn raised(made: PyResult<Bound<'_, PyAny>>) -> PyErr {
    made.map_or_else(|error| error, PyErr::from_value)
}

/// The exception for an error of the tensor library.
pub(crate) fn of_tensors(py: Python<'_>, error: microscale::Error) -> PyErr {
    match error {
        microscale::Error::NonFinite { first, report } => {
            let arguments = (error.to_string(), (first.row, first.col), report.nan, report.infinite);
            raised(class(py, &NON_FINITE, "NonFiniteError").and_then(|class| class.call1(arguments)))
        }
        microscale::Error::NoGpu(_) | microscale::Error::Gpu { .. } => {
            PyRuntimeError::new_err(error.to_string())
        }
        microscale::Error::NoKernel { .. } => PyNotImplementedError::new_err(error.to_string()),
        error => self::error(py, error),
    }
}

/// The exception for an error of the checkpoint library: `CheckpointError`, with its file and its tensor.
pub(crate) fn of_checkpoints(py: Python<'_>, error: microscale_checkpoint::Error) -> PyErr {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message += &format!(": {cause}");
        source = cause.source();
    }
    let (file, tensor) = error.place();
    let arguments = (message, file, tensor);
    raised(class(py, &CHECKPOINT, "CheckpointError").and_then(|class| class.call1(arguments)))
}
