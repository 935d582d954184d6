//! Exceptions. Their classes are Python's, in `microscale/_errors.py`.

use std::error::Error as _;

use std::io;
use std::path::Path;

use microscale::OperandFault;
use pyo3::exceptions::{PyNotImplementedError, PyOSError, PyRuntimeError, PyTypeError};
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
        microscale::Error::NoKernel { .. } | microscale::Error::Operands(OperandFault::NoFp8) => {
            PyNotImplementedError::new_err(error.to_string())
        }
        error => self::error(py, error),
    }
}

/// The exception for an error of the checkpoint library: an `OSError` if the operating system
/// reported it, or else a `CheckpointError` with its file and its tensor.
pub(crate) fn of_checkpoints(py: Python<'_>, error: microscale_checkpoint::Error) -> PyErr {
    let (file, tensor) = error.place();
    let mut message = match (&error, file) {
        // Python appends the file name.
        (microscale_checkpoint::Error::Io { doing, .. }, _) => format!("cannot {doing}"),
        _ => error.to_string(),
    };
    let mut source = error.source();
    while let Some(cause) = source {
        let system = cause.downcast_ref::<io::Error>();
        if let Some(code) = system.and_then(io::Error::raw_os_error) {
            return of_system(code, message, cause, file);
        }
        message += &format!(": {cause}");
        source = cause.source();
    }
    if let microscale_checkpoint::Error::Io { .. } = &error {
        message = format!("{error}{}", message.find(": ").map_or("", |end| &message[end..]));
    }
    checkpoint_error(py, message, file, tensor)
}

/// The exception for an error of running a model.
pub(crate) fn of_models(py: Python<'_>, error: microscale_models::Error) -> PyErr {
    use microscale_models::Error;
    match error {
        Error::Checkpoint(error) => of_checkpoints(py, error),
        Error::Quantize(error) => of_tensors(py, error),
        Error::Io { path, source } => match source.raw_os_error() {
            Some(code) => of_system(code, "cannot read or write".into(), &source, Some(&path)),
            None => checkpoint_error(py, source.to_string(), Some(&path), None),
        },
        error => checkpoint_error(py, error.to_string(), None, None),
    }
}

/// A `CheckpointError`.
fn checkpoint_error(py: Python<'_>, message: String, file: Option<&Path>, tensor: Option<&str>) -> PyErr {
    let arguments = (message, file, tensor);
    raised(class(py, &CHECKPOINT, "CheckpointError").and_then(|class| class.call1(arguments)))
}

/// An `OSError`, of the subclass that Python has for the code: `FileNotFoundError`,
/// `PermissionError`, …
fn of_system(code: i32, doing: String, cause: &dyn std::error::Error, file: Option<&Path>) -> PyErr {
    let text = cause.to_string();
    let reason = text.strip_suffix(&format!(" (os error {code})")).unwrap_or(&text);
    // The code is the argument `winerror` on Windows, and `errno` on other systems.
    let (number, windows) = if cfg!(windows) { (0, Some(code)) } else { (code, None) };
    let file = file.map(|file| file.as_os_str().to_os_string());
    PyOSError::new_err((number, format!("{doing}: {reason}"), file, windows))
}
