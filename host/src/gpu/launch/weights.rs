//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::{Ahead, Kernel, TOKEN_LIMIT, TurnsGrid, WARP, WeightsGrid, WeightsShape};

use super::{Argument, apply_global, config, kernel_word, limited, limited_columns, not_one_launch};
use crate::error::Result;
use crate::gemv::Activation;
use crate::gpu::gemv_weights::{GemvWeightsKernel, Kind};
use crate::gpu::module::Module;
use crate::gpu::{DeviceTensor, doing};
use crate::recipe::Words;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<WeightsGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<TurnsGrid> {}

/// That of a kernel that copies ahead, or not.
enum Grid {
    Turns(Argument<TurnsGrid>),
    Weights(Argument<WeightsGrid>),
}

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
    // The kernels read whole chunks, 16 bytes at a time; but one takes any. Weights in device memory start on 256 bytes,
    // so that rows of whole chunks start on 16.
    let cut = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let kernel = kernel.on(weights.shape());
    let variant = match (cut, kernel.kind) {
        (true, _) => "cut".to_owned(),
        (_, Kind::One) => format!("one_tiles{}", kernel.tiles),
        (_, Kind::Lot) => format!("lot_tiles{}", kernel.tiles),
        (_, Kind::Many) => format!("tiles{}", kernel.tiles),
    };
    let name = format!("{}_gemv_weights_{}_{variant}", kernel_word(weights.format())?, T::DTYPE.word());
    let (launched, function) = module.kernel(&name)?;

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
        let (warps, at_once) = ([kernel.splits.min(warps), warps], module.at_once(launched));
        let grid = TurnsGrid::new(ahead, shape, tokens, warps, at_once).ok_or_else(too_many)?;
        let (threads, shared) = grid.threads_and_shared(ahead);
        let config = config(&Kernel { threads, shared, ..*launched }, grid.thread_blocks())?;
        (Grid::Turns(Argument(grid)), config)
    };
    let apply = apply_global(weights);
    let (out, _written) = out.device_ptr_mut(stream);
    let mut launch = stream.launch_builder(function);
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
