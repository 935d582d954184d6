//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::WeightsGrid;

use super::{Argument, apply_global, config, kernel_word};
use crate::error::{Error, Result};
use crate::gemv::Activation;
use crate::gpu::gemv_weights::GemvWeightsKernel;
use crate::gpu::module::Module;
use crate::gpu::{DeviceTensor, doing};
use crate::recipe::Words;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<WeightsGrid> {}

/// Enqueues a product. The caller has checked that there are so many tokens' activations, and that `out` has room.
pub(in crate::gpu) fn gemv_weights<T: Activation>(
    module: &Module,
    stream: &Arc<CudaStream>,
    kernel: GemvWeightsKernel,
    weights: &DeviceTensor,
    activations: &impl DevicePtr<T>,
    tokens: usize,
    out: &mut impl DevicePtrMut<T>,
) -> Result<()> {
    let (rows, cols) = (weights.rows(), weights.cols());
    if rows == 0 || tokens == 0 {
        return Ok(());
    }
    let (activations, _read) = activations.device_ptr(stream);
    // The kernels read whole chunks, 16 bytes at a time.
    let cut = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let too_large = Error::TooLarge { rows, cols, row_stride: cols };
    let (tiled, grid) = kernel.grid(weights.shape(), tokens).ok_or(too_large)?;
    let word = if cut { "cut" } else { tiled };
    let name = format!("{}_gemv_weights_{}_{word}", kernel_word(weights.format()), T::DTYPE.word());
    let (kernel, function) = module.kernel(&name)?;
    let shape = config(kernel, if cut { rows as u64 } else { grid.thread_blocks() })?;
    let grid = Argument(grid);
    let apply = apply_global(weights);
    let (out, _written) = out.device_ptr_mut(stream);
    let mut launch = stream.launch_builder(function);
    launch.arg(weights.codes()).arg(weights.scales()).arg(weights.global_slot());
    launch.arg(&activations).arg(&out).arg(&grid).arg(&apply);
    // SAFETY: the arguments are the kernel's, in order. The caller checked that activations and output have the
    // elements that the grid says; buffers of tensors start on 256 bytes, rows of whole chunks are multiples of 16,
    // and the kernel was asked whether it takes the shape. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(shape) }.map_err(doing("launching a product"))?;
    Ok(())
}
