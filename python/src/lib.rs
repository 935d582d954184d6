//! The extension module `microscale._microscale`: the libraries as functions of arrays, and the program.
//!
//! The functions that users call are Python, in `python/microscale/`: it makes the outputs, in the library that the input is
//! from, and hands both to functions here, which check everything again that memory depends on.
//!
//! | file | what it knows |
//! |---|---|
//! | `array`, `kind`, `memory` | the elements of another library's array: address, type and owner, and permitted uses |
//! | `interface`, `dlpack` | finding that out |
//! | `recipe`, `operand` | what is asked for; a quantized matrix in arrays |
//! | `tensors`, `gpu_tensors`, `experts`, `checkpoints` | the functions |
//! | `gpu` | GPUs, and work on other libraries' streams |
//! | `workers` | threads, also after a fork; the interpreter's lock is let go of meanwhile |
//! | `errors` | exceptions |

mod array;
mod checkpoints;
mod dlpack;
mod errors;
mod experts;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod gpu_tensors;
mod interface;
mod kind;
mod memory;
mod operand;
mod recipe;
mod tensors;
mod workers;

/// The functions of `microscale._microscale`.
#[pyo3::pymodule(gil_used = false)]
mod _microscale {
    use std::ffi::OsString;

    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::checkpoints::{
        convert_checkpoint, diagnose_checkpoint, inspect_checkpoint, merge_checkpoint, quantize_checkpoint,
    };
    #[pymodule_export]
    use crate::experts::linear_experts;
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use crate::experts::{gpu_experts_workspace_bytes, gpu_linear_experts};
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use crate::gpu_tensors::{
        gpu_amax, gpu_capture, gpu_dequantize, gpu_gemv, gpu_linear, gpu_quantize, gpu_scales_in,
        gpu_workspace_bytes,
    };
    #[pymodule_export]
    use crate::interface::described;
    #[pymodule_export]
    use crate::recipe::Recipe;
    #[pymodule_export]
    use crate::tensors::{amax, compare, compare_quantized, dequantize, gemv, linear, quantize, scales_in};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::workers::remember_process();
        #[cfg(feature = "cuda")]
        {
            module.add("SLOT_WORDS", crate::gpu_tensors::SLOT_WORDS)?;
            module.add("AMAX_WORDS", crate::gpu_tensors::AMAX_WORDS)?;
            module.add("COUNTER_BYTES", crate::gpu_tensors::COUNTER_BYTES)?;
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Runs the program with its arguments, the first of which is its name, and returns its exit code. What it
    /// does about signals stays: the process should end after it.
    #[pyfunction]
    fn main(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
        py.detach(|| microscale_cli::main(arguments))
    }
}
