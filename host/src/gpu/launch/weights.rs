//! Launching products of weights and activations.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, PushKernelArg};
use microscale_formats::Format;
use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{PipelinedGrid, TOKEN_LIMIT, TokenTiles, WeightsGrid};
use microscale_kernels_abi::{Kernel, KernelId, Weights};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gemv::TensorCoreActivation;
use crate::gpu::arguments::{
    Argument, Operands, Routed, Steps, apply_global, config, kernel_dtype, limited, limited_columns,
    not_one_launch, weights_format,
};
use crate::gpu::driver::doing;
use crate::gpu::gemv_weights_kernel::{GemvWeightsKernel, Kind, weights_shape};
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::{DeviceView, DeviceViewMut};
use crate::gpu::tensor_view::DeviceTensorView;
use crate::shape::QuantizedShape;

/// The kernel for a format and activations of a dtype. `ragged` says that rows are not whole chunks.
fn id(format: Format, dtype: Dtype, kernel: GemvWeightsKernel, ragged: bool) -> Result<KernelId> {
    let kind = match (kernel.kind, kernel.tiles) {
        _ if ragged => Weights::Ragged,
        (Kind::M1, 1) => Weights::M1Tiles1,
        (Kind::M1, 2) => Weights::M1Tiles2,
        (Kind::M1, _) => Weights::M1Tiles4,
        (Kind::M8, 1) => Weights::M8Tiles1,
        (Kind::M8, _) => Weights::M8Tiles2,
        (Kind::M16, _) => Weights::M16Tiles1,
        (Kind::M32, _) => Weights::M32Tiles2,
        (Kind::Unpipelined, 1) => Weights::UnpipelinedTiles1,
        (Kind::Unpipelined, _) => Weights::UnpipelinedTiles2,
    };
    let id = weights_format(format).and_then(|weights| kind.of(weights, kernel_dtype(dtype)));
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
pub(in crate::gpu) fn gemv_weights<T: TensorCoreActivation>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: GemvWeightsKernel,
    weights: DeviceTensorView<'_>,
    activations: DeviceView<'_, T>,
    tokens: usize,
    mut out: DeviceViewMut<'_, T>,
) -> Result<()> {
    if weights.rows() == 0 || tokens == 0 {
        return Ok(());
    }
    let (activations, _activations_read) = activations.read(stream, "the activations", 1)?;
    let ([codes, scales, slot], _weights_read) = weights.read(stream)?;
    let (out, _written) = out.write(stream, "the output", 1)?;
    let operands =
        Operands { codes, scales, slot, activations, out, apply: apply_global(weights), steps: Steps::NONE };
    let of = (weights.shape(), T::DTYPE);
    // SAFETY: the caller checked layout and lengths. The weights have a slot. The borrows keep the buffers from overlapping, and until the
    // launch is enqueued.
    unsafe { enqueue(kernels, stream, kernel, of, &operands, Routed::default(), (tokens, None)) }
}

/// Enqueues a kernel for weights of a shape and activations of a dtype: for so many tokens, or in given token tiles.
///
/// # Safety
/// The operands are as the kernels' contracts say, but that rows need not be whole chunks or start on 16 bytes. A plan has these token
/// tiles.
pub(super) unsafe fn enqueue(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: GemvWeightsKernel,
    (weights, dtype): (QuantizedShape, Dtype),
    operands: &Operands,
    routed: Routed,
    (tokens, token_tiles): (usize, Option<TokenTiles>),
) -> Result<()> {
    let Operands { codes, scales, slot, activations, out, apply, steps } = operands;
    let (rows, cols) = (weights.rows, weights.cols);
    // The kernels read whole chunks, 16 bytes at a time; but one takes any. Codes start on 16 bytes,
    // so that rows of whole chunks do.
    let ragged = cols == 0 || !cols.is_multiple_of(CHUNK) || !activations.is_multiple_of(16);
    let kernel = kernel.on(weights);
    let ready = kernels.ready(id(weights.format, dtype, kernel, ragged)?)?;
    let launched = &ready.kernel;

    limited("rows of activations", tokens, TOKEN_LIMIT)?;
    limited_columns(weights)?;
    let too_many = || not_one_launch(format_args!("{rows} rows times {tokens} of activations"));
    let (shape, tokens) = (weights_shape(weights), tokens as u64);
    let pipelined = kernel.pipelined().filter(|_| !ragged);
    let (grid, config) = if let Some(pipelined) = pipelined {
        let warps = launched.threads / WARP;
        let warps = [kernel.slices.min(warps), warps];
        let grid = match token_tiles {
            Some(token_tiles) => {
                // All token tiles' thread blocks are there at once, if there is room.
                let of_each = (u64::from(ready.at_once) / token_tiles.count.max(1)).max(1);
                PipelinedGrid::with(pipelined, shape, tokens, token_tiles, warps, of_each as u32)
            }
            None => PipelinedGrid::new(pipelined, shape, tokens, warps, ready.at_once),
        };
        let grid = grid.ok_or_else(too_many)?;
        let (threads, shared) = grid.threads_and_shared(pipelined);
        let config = config(&Kernel { threads, shared, ..*launched }, grid.thread_blocks())?;
        (Grid::Pipelined(Argument(grid)), config)
    } else {
        let (tiles, slices) = if ragged { (1, 1) } else { (kernel.tiles, kernel.slices) };
        let grid = match token_tiles {
            Some(token_tiles) => WeightsGrid::with(shape, tokens, token_tiles, tiles, slices),
            None => WeightsGrid::new(shape, tokens, tiles, slices),
        };
        let grid = grid.ok_or_else(too_many)?;
        let thread_blocks = if ragged { shape.rows } else { grid.thread_blocks() };
        (Grid::Unpipelined(Argument(grid)), config(launched, thread_blocks)?)
    };
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(codes).arg(scales).arg(slot).arg(activations).arg(out);
    launch.arg(&routed.plan).arg(&routed.from).arg(&routed.to).arg(&steps.bias).arg(&steps.residual);
    match &grid {
        Grid::Pipelined(grid) => launch.arg(grid),
        Grid::Unpipelined(grid) => launch.arg(grid),
    };
    launch.arg(apply).arg(&steps.epilogue);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. `ragged` and `GemvWeightsKernel::on` chose a kernel
    // that takes the shape and the activations' address. The rest is the caller's promise.
    unsafe { launch.launch(config) }.map_err(doing("launching a product"))?;
    Ok(())
}
