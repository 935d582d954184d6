//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::Format;
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{
    Ahead, TOKEN_LIMIT, TurnsGrid, WeightsFormat, WeightsGrid, WeightsShape,
};
use microscale_kernels_abi::{Kernel, KernelId, Weights};

use crate::error::{Error, Result};
use crate::gemv::Activation;
use crate::gpu::arguments::{
    Argument, apply_global, config, kernel_dtype, limited, limited_columns, not_one_launch,
};
use crate::gpu::driver::doing;
use crate::gpu::gemv_weights_kernel::{GemvWeightsKernel, Kind};
use crate::gpu::kernels::Kernels;
use crate::gpu::tensor::DeviceTensor;

/// The kernel for a format and activations of a dtype. `cut` is of rows that are not whole chunks.
fn id<T: Activation>(format: Format, kernel: GemvWeightsKernel, cut: bool) -> Result<KernelId> {
    let kind = match (kernel.kind, kernel.tiles) {
        _ if cut => Weights::Cut,
        (Kind::One, 1) => Weights::One1,
        (Kind::One, 2) => Weights::One2,
        (Kind::One, _) => Weights::One4,
        (Kind::Lot, 1) => Weights::Lot1,
        (Kind::Lot, _) => Weights::Lot2,
        (Kind::Many, 1) => Weights::Many1,
        (Kind::Many, _) => Weights::Many2,
    };
    let weights = match format {
        Format::Nvfp4 => Some(WeightsFormat::Nvfp4),
        Format::Mxfp4 => Some(WeightsFormat::Mxfp4),
        _ => None,
    };
    let id = weights.and_then(|weights| kind.of(weights, kernel_dtype(T::DTYPE)));
    id.ok_or(Error::NoKernel { format })
}

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<WeightsGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<TurnsGrid> {}

/// The grid of a kernel that copies ahead, or does not.
enum Grid {
    Turns(Argument<TurnsGrid>),
    Weights(Argument<WeightsGrid>),
}

/// Enqueues a product. The caller has checked that there are so many tokens' activations, and that `out` has room.
pub(in crate::gpu) fn gemv_weights<T: Activation>(
    kernels: &Kernels,
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
    // The kernels read whole chunks, 16 bytes at a time; but one takes any. Weights in device memory start on 256 bytes,
    // so that rows of whole chunks start on 16.
    let cut = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let kernel = kernel.on(weights.shape());
    let ready = kernels.ready(id::<T>(weights.format(), kernel, cut)?)?;
    let launched = &ready.kernel;

    limited("rows of activations", tokens, TOKEN_LIMIT)?;
    limited_columns(weights.shape())?;
    let too_many = || not_one_launch(format_args!("{rows} rows times {tokens} of activations"));
    let [rows, cols, blocks] = [rows, cols, weights.shape().blocks_per_row()].map(|count| count as u64);
    let (shape, tokens) = (WeightsShape { rows, cols, blocks }, tokens as u64);
    let (grid, config) = if cut || kernel.kind == Kind::Many {
        let (tiles, splits) = if cut { (1, 1) } else { (kernel.tiles, kernel.splits) };
        let grid = WeightsGrid::new(shape, tokens, tiles, splits).ok_or_else(too_many)?;
        let thread_blocks = if cut { rows } else { grid.thread_blocks() };
        (Grid::Weights(Argument(grid)), config(launched, thread_blocks)?)
    } else {
        let warps = launched.threads / WARP;
        let ahead = Ahead { one: kernel.kind == Kind::One, tiles: kernel.tiles };
        let (warps, at_once) = ([kernel.splits.min(warps), warps], ready.at_once);
        let grid = TurnsGrid::new(ahead, shape, tokens, warps, at_once).ok_or_else(too_many)?;
        let (threads, shared) = grid.threads_and_shared(ahead);
        let config = config(&Kernel { threads, shared, ..*launched }, grid.thread_blocks())?;
        (Grid::Turns(Argument(grid)), config)
    };
    let apply = apply_global(weights);
    let (out, _written) = out.device_ptr_mut(stream);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(weights.codes()).arg(weights.scales()).arg(weights.global_slot());
    launch.arg(&activations).arg(&out);
    match &grid {
        Grid::Turns(grid) => launch.arg(grid),
        Grid::Weights(grid) => launch.arg(grid),
    };
    launch.arg(&apply);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The caller checked layout and
    // lengths; `cut` and `GemvWeightsKernel::on` chose a kernel that takes the shape and the activations' address. The
    // weights have a slot. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config) }.map_err(doing("launching a product"))?;
    Ok(())
}
