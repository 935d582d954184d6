//! Measuring the operations against a copy of the same bytes, in the same run; products on a CPU, which
//! hardly write, against reading them too.
//!
//! Input is random, never zeros. Buffers are used in rotation until they are past every cache
//! ([`ROTATION_BYTES`](workload::ROTATION_BYTES)). After the timing the output is compared with that of the
//! CPU's reference. A figure is the median of many.
//!
//! | file | what it knows |
//! |---|---|
//! | `op`, `size`, `case`, `measurement` | the operations, their sizes, what is measured, and the results |
//! | `workload`, `product` | input, and checks of output: of operations on a matrix, of products |
//! | `cpu`, `gpu` | timing on each |
//! | `gemv`, `weights`, `experts` | the kinds of products |
//! | `tune` | measuring the table of times that plans use |

pub(crate) mod case;
mod cpu;
#[cfg(feature = "cuda")]
mod experts;
mod gemv;
#[cfg(feature = "cuda")]
mod gpu;
pub(crate) mod measurement;
pub(crate) mod op;
mod product;
pub(crate) mod size;
#[cfg(feature = "internals")]
pub(crate) mod tune;
mod weights;
mod workload;

use microscale::{Device, Dtype, Element, Error, QuantizedShape, Recipe, Result, Words};

use crate::bench::case::Case;
use crate::bench::measurement::{Measurement, Times};
use crate::bench::op::{NO_F32, Op};
use crate::bench::size::Size;
use crate::bench::workload::Workload;

/// Measures an operation.
///
/// # Errors
/// Those of the operation and of [`Op::check`]; [`Error::NoGpu`] if the operation needs a GPU and `device` is
/// none; [`Error::Wrong`] if the output differs from the reference's.
pub(crate) fn measure(case: &Case, device: &Device) -> Result<Measurement> {
    let Case { op, ref recipe, dtype, size, .. } = *case;
    op.check(dtype, size, matches!(device, Device::Cpu))?;
    if op.needs_gpu() && matches!(device, Device::Cpu) {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", op.word())));
    }
    let (bytes, times) = match (op, dtype) {
        (Op::GemmExperts, Dtype::F32) => return Err(op.not_measured(NO_F32)),
        #[cfg(feature = "cuda")]
        (Op::GemmExperts, Dtype::F16) => experts::measure::<half::f16>(case, device)?,
        #[cfg(feature = "cuda")]
        (Op::GemmExperts, Dtype::Bf16) => experts::measure::<half::bf16>(case, device)?,
        (Op::GemvWeights | Op::GemmWeights, _) => weights::measure(case, device)?,
        #[cfg(feature = "internals")]
        (Op::Launch, _) => weights::measure_launch(case, device)?,
        (_, Dtype::F32) => measure_as::<f32>(op, recipe, size, device)?,
        (_, Dtype::F16) => measure_as::<half::f16>(op, recipe, size, device)?,
        (_, Dtype::Bf16) => measure_as::<half::bf16>(op, recipe, size, device)?,
    };
    Ok(Measurement {
        op,
        recipe: *recipe,
        dtype,
        size,
        device: device.to_string(),
        threads: if matches!(device, Device::Cpu) { rayon::current_num_threads() } else { 0 },
        bytes,
        kernel: times.kernel,
        tensor_cores_per_second: times.tensor_cores_per_second,
        median_seconds: times.operation,
        read_seconds: times.read,
        copy_seconds: times.copy,
    })
}

/// The bytes that an operation moves, and times.
fn measure_as<T: Element>(op: Op, recipe: &Recipe, size: Size, device: &Device) -> Result<(u64, Times)> {
    if op.is_gemv() {
        return gemv::measure::<T>(op, recipe, size, device);
    }
    let shape = size.all_rows();
    let (codes, scales) = QuantizedShape::of(recipe, shape).bytes()?;
    let [values, quantized] = [shape.elements() * T::DTYPE.bytes(), codes + scales].map(|bytes| bytes as u64);
    let bytes = match op {
        Op::Amax => values,
        Op::AmaxQuantize => (2 * values).saturating_add(quantized),
        _ => values.saturating_add(quantized),
    };
    let workload = Workload { op, recipe: *recipe, shape, bytes };
    let times = match device {
        Device::Cpu => cpu::measure::<T>(&workload)?,
        #[cfg(feature = "cuda")]
        Device::Gpus(gpus) => gpu::measure::<T>(&workload, gpus.first())?,
    };
    Ok((if op.is_empty() { 0 } else { workload.bytes }, times))
}
