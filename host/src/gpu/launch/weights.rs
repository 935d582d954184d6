//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::{
    Divider, TILE_ROWS, TILE_TOKENS, WARP, WEIGHTS_THREADS, WeightsGrid, weights_shared_bytes,
};

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
    let (rows, cols, blocks) = (weights.rows(), weights.cols(), weights.shape().blocks_per_row());
    if rows == 0 || tokens == 0 {
        return Ok(());
    }
    let (activations, _read) = activations.device_ptr(stream);
    // The kernels read whole chunks, 16 bytes at a time.
    let cut = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let tiles = match kernel {
        GemvWeightsKernel::Rows16 => 1,
        GemvWeightsKernel::Rows32 => 2,
    };
    let splits: u32 = std::env::var("MS_SPLITS").map_or(8, |s| s.parse().unwrap());
    let groups = (WEIGHTS_THREADS / WARP / splits) as usize;
    let lots = if cut { 1 } else { tokens.div_ceil(TILE_TOKENS as usize) };
    let covered = if cut { rows } else { rows.div_ceil(groups * tiles * TILE_ROWS as usize) * lots };
    let word = if cut { "cut" } else { kernel.word() };
    let name = format!("{}_gemv_weights_{}_{word}", kernel_word(weights.format()), T::DTYPE.word());
    let (kernel, function) = module.kernel(&name)?;
    if blocks >= 1 << 26 || tokens >= 1 << 24 || covered >= 1 << 31 {
        return Err(Error::TooLarge { rows, cols, row_stride: cols });
    }
    let grid = Argument(WeightsGrid {
        rows: rows as u64,
        cols: cols as u64,
        blocks: blocks as u64,
        tokens: tokens as u32,
        splits,
        lots: Divider::new(lots as u64),
    });
    let apply = apply_global(weights);
    let (out, _written) = out.device_ptr_mut(stream);
    let mut launch = stream.launch_builder(function);
    launch.arg(weights.codes()).arg(weights.scales()).arg(weights.global_slot());
    launch.arg(&activations).arg(&out).arg(&grid).arg(&apply);
    let mut shape = config(kernel, covered as u64)?;
    if !cut {
        shape.grid_dim.0 = covered as u32;
        shape.shared_mem_bytes = weights_shared_bytes(tiles as u32);
    }
    // SAFETY: the arguments are the kernel's, in order. The caller checked that activations and output have the elements that the grid
    // says; buffers of tensors start on 256 bytes, and rows of whole chunks are multiples of 16. The borrows keep the buffers from
    // overlapping.
    unsafe { launch.launch(shape) }.map_err(doing("launching a product"))?;
    Ok(())
}
