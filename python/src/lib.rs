//! The extension module `microscale._microscale`: the libraries as functions of arrays, and the
//! program.
//!
//! Users call the functions in `python/microscale/`. These allocate the outputs in the library of
//! the input, and pass both to functions here, which check again whatever memory safety depends on.
//!
//! | file | contents |
//! |---|---|
//! | `array`, `kind`, `memory` | the elements of another library's array: address, type and owner, and permitted uses |
//! | `interface`, `dlpack` | finding them |
//! | `recipe`, `rounding`, `gate` | choices from words |
//! | `operand`, `inputs`, `output` | a quantized matrix; activations and results of a product |
//! | `tensors`, `gpu_tensors`, `activations`, `kv`, `experts` | the functions of arrays |
//! | `checkpoints`, `models` | the functions of checkpoints |
//! | `gpu` | GPUs, and work on other libraries' streams |
//! | `workers` | threads, also after a fork; they release the interpreter's lock |
//! | `words` | the words of each choice, for tests |
//! | `errors` | exceptions |

mod activations;
mod array;
mod checkpoints;
mod dlpack;
mod errors;
mod experts;
mod gate;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_tensors;
mod inputs;
mod interface;
mod kind;
mod kv;
mod memory;
mod models;
mod operand;
#[cfg(feature = "cuda")]
mod output;
mod recipe;
mod rounding;
mod tensors;
mod words;
mod workers;

use std::ffi::OsString;

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// The functions of `microscale._microscale`, each added by name so that the interpreter is known
/// before the first of them is made.
#[pyo3::pymodule(gil_used = false)]
fn _microscale(module: &Bound<'_, PyModule>) -> PyResult<()> {
    require_main_interpreter()?;
    workers::remember_process();
    module.add_class::<activations::ActivationRecipe>()?;
    module.add_class::<recipe::Recipe>()?;
    module.add_function(wrap_pyfunction!(interface::described, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::amax, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::compare, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::compare_quantized, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::gemv, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::linear, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(tensors::scales_in, module)?)?;
    module.add_function(wrap_pyfunction!(activations::quantize_activations, module)?)?;
    module.add_function(wrap_pyfunction!(experts::linear_experts, module)?)?;
    module.add_function(wrap_pyfunction!(kv::append_kv, module)?)?;
    module.add_function(wrap_pyfunction!(kv::gather_kv, module)?)?;
    module.add_function(wrap_pyfunction!(rounding::require_activations, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::compare_checkpoints, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::convert_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::dequantize_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::diagnose_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::inspect_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::merge_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::plan_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoints::quantize_checkpoint, module)?)?;
    module.add_function(wrap_pyfunction!(models::calibrate_model, module)?)?;
    module.add_function(wrap_pyfunction!(models::evaluate_models, module)?)?;
    module.add_function(wrap_pyfunction!(words::words, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    #[cfg(feature = "cuda")]
    add_gpu_functions(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}

/// Adds the functions for arrays in the memory of GPUs.
#[cfg(feature = "cuda")]
fn add_gpu_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_amax, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_capture, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_bytes_with_results, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_gemv, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_linear, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_quantize, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_scales_in, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_tensors::gpu_rounded_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(experts::gpu_experts_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(experts::gpu_experts_rounded_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(experts::gpu_linear_experts, module)?)?;
    module.add_function(wrap_pyfunction!(activations::gpu_quantize_activations, module)?)?;
    module.add_function(wrap_pyfunction!(kv::gpu_append_kv, module)?)?;
    module.add_function(wrap_pyfunction!(kv::gpu_gather_kv, module)?)?;
    module.add("SLOT_WORDS", gpu_tensors::SLOT_WORDS)?;
    module.add("AMAX_WORDS", gpu_tensors::AMAX_WORDS)?;
    module.add("COUNTER_BYTES", gpu_tensors::COUNTER_BYTES)
}

/// Refuses sub-interpreters. Classes and interned strings are made once a process, and an exception
/// class of one interpreter is not caught in another.
fn require_main_interpreter() -> PyResult<()> {
    // SAFETY: the module's initialization holds the interpreter's lock, so that there is a current
    // interpreter.
    let interpreter = unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) };
    match interpreter {
        0 => Ok(()),
        number => Err(PyImportError::new_err(format!(
            "microscale works in the main interpreter only, and this is sub-interpreter {number}; import it there, or start a process"
        ))),
    }
}

/// Runs the program and returns its exit code. The first argument is the program's name. Its signal
/// handlers stay: the process should end after it.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| microscale_cli::main(arguments))
}
