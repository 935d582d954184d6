//! Measures operations against a copy of the same bytes in the same run. Products on a CPU write
//! little, and are also measured against reading.
//!
//! Input is random, never zeros. Buffers are used in rotation, so that they exceed every cache
//! ([`ROTATION_BYTES`](workload::ROTATION_BYTES)). After the timing, the output is compared with
//! the CPU's reference. Each figure is a median of many samples.
//!
//! | file | contents |
//! |---|---|
//! | `op`, `size`, `case`, `measurement` | operations, sizes, cases and results |
//! | `workload`, `product` | input and checks of output: operations on a matrix, products |
//! | `cpu`, `gpu` | timing on a CPU and on a GPU |
//! | `gemv`, `weights`, `experts`, `fp4` | the kinds of products |
//! | `activations`, `activations_gpu`, `activation_workload` | quantizing activations, and KV caches |
//! | `layers`, `contest` | layers of language models, and shapes of a contest |
//! | `tune` | measurement of the table of times that plans use |

mod activation_workload;
pub(crate) mod activations;
#[cfg(feature = "cuda")]
mod activations_gpu;
pub(crate) mod case;
#[cfg(feature = "internals")]
pub(crate) mod contest;
mod cpu;
#[cfg(feature = "cuda")]
mod experts;
mod fp4;
mod gemv;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "internals")]
pub(crate) mod layers;
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
/// The errors of the operation and of [`Op::check`]; [`Error::NoGpu`] if the operation needs a GPU
/// and `device` is a CPU; [`Error::Wrong`] if the output differs from the reference.
pub(crate) fn measure(case: &Case, device: &Device) -> Result<Measurement> {
    let Case { op, ref recipe, dtype, activations, size, .. } = *case;
    op.check(dtype, size, matches!(device, Device::Cpu))?;
    op.check_activations(activations, matches!(device, Device::Cpu))?;
    if op.needs_gpu() && matches!(device, Device::Cpu) {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", op.word())));
    }
    let (bytes, times) = match (op, dtype) {
        (Op::Activations, _) => return Err(op.not_measured("together with others; give it alone")),
        (Op::GemmExperts | Op::GemmExpertsFp8, Dtype::F32) => return Err(op.not_measured(NO_F32)),
        #[cfg(feature = "cuda")]
        (Op::GemmExperts | Op::GemmExpertsFp8, Dtype::F16) => experts::measure::<half::f16>(case, device)?,
        #[cfg(feature = "cuda")]
        (Op::GemmExperts | Op::GemmExpertsFp8, Dtype::Bf16) => experts::measure::<half::bf16>(case, device)?,
        (Op::GemvWeights | Op::GemmWeights, _) => weights::measure(case, device)?,
        (Op::GemmFp8, _) => weights::measure_fp8(case, device)?,
        (op, _) if op.is_fp4() => fp4::measure(case, device)?,
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
        activations,
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

/// The bytes that an operation moves, and its times.
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
