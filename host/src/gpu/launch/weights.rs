//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::Format;
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{
    Pipelined, PipelinedGrid, TOKEN_LIMIT, WeightsFormat, WeightsGrid, WeightsShape,
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

/// The kernel for a format and activations of a dtype. `ragged` says that rows are not whole chunks.
fn id<T: Activation>(format: Format, kernel: GemvWeightsKernel, ragged: bool) -> Result<KernelId> {
    let kind = match (kernel.kind, kernel.tiles) {
        _ if ragged => Weights::Ragged,
        (Kind::M1, 1) => Weights::M1Tiles1,
        (Kind::M1, 2) => Weights::M1Tiles2,
        (Kind::M1, _) => Weights::M1Tiles4,
        (Kind::M8, 1) => Weights::M8Tiles1,
        (Kind::M8, _) => Weights::M8Tiles2,
        (Kind::Unpipelined, 1) => Weights::UnpipelinedTiles1,
        (Kind::Unpipelined, _) => Weights::UnpipelinedTiles2,
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
unsafe impl DeviceRepr for Argument<PipelinedGrid> {}

/// The grid of a pipelined kernel, or of one that is not.
enum Grid {
    Pipelined(Argument<PipelinedGrid>),
    Unpipelined(Argument<WeightsGrid>),
}

/// Enqueues a product. The caller has checked that there are so many tokens' activations, and that `out` has
/// room.
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
    // The kernels read whole chunks, 16 bytes at a time; but one takes any. Weights in device memory start on
    // 256 bytes, so that rows of whole chunks start on 16.
    let ragged = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let kernel = kernel.on(weights.shape());
    let ready = kernels.ready(id::<T>(weights.format(), kernel, ragged)?)?;
    let launched = &ready.kernel;

    limited("rows of activations", tokens, TOKEN_LIMIT)?;
    limited_columns(weights.shape())?;
    let too_many = || not_one_launch(format_args!("{rows} rows times {tokens} of activations"));
    let [rows, cols, blocks] = [rows, cols, weights.shape().blocks_per_row()].map(|count| count as u64);
    let (shape, tokens) = (WeightsShape { rows, cols, blocks }, tokens as u64);
    let (grid, config) = if ragged || kernel.kind == Kind::Unpipelined {
        let (tiles, slices) = if ragged { (1, 1) } else { (kernel.tiles, kernel.slices) };
        let grid = WeightsGrid::new(shape, tokens, tiles, slices).ok_or_else(too_many)?;
        let thread_blocks = if ragged { rows } else { grid.thread_blocks() };
        (Grid::Unpipelined(Argument(grid)), config(launched, thread_blocks)?)
    } else {
        let warps = launched.threads / WARP;
        let pipelined = Pipelined { m1: kernel.kind == Kind::M1, tiles: kernel.tiles };
        let (warps, at_once) = ([kernel.slices.min(warps), warps], ready.at_once);
        let grid = PipelinedGrid::new(pipelined, shape, tokens, warps, at_once).ok_or_else(too_many)?;
        let (threads, shared) = grid.threads_and_shared(pipelined);
        let config = config(&Kernel { threads, shared, ..*launched }, grid.thread_blocks())?;
        (Grid::Pipelined(Argument(grid)), config)
    };
    let apply = apply_global(weights);
    let (out, _written) = out.device_ptr_mut(stream);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(weights.codes()).arg(weights.scales()).arg(weights.global_slot());
    launch.arg(&activations).arg(&out);
    match &grid {
        Grid::Pipelined(grid) => launch.arg(grid),
        Grid::Unpipelined(grid) => launch.arg(grid),
    };
    launch.arg(&apply);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The caller checked
    // layout and lengths; `ragged` and `GemvWeightsKernel::on` chose a kernel that takes the shape and the
    // activations' address. The weights have a slot. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config) }.map_err(doing("launching a product"))?;
    Ok(())
}
