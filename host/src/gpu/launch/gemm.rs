//! Launching products of weights and activations of many tokens.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, PushKernelArg};
use microscale_formats::Format;
use microscale_kernels_abi::Kernel;
use microscale_kernels_abi::gemm::{ArrangeGrid, GemmGrid, arrange};
use microscale_kernels_abi::weights::{PIPELINED_COLUMN_LIMIT, TOKEN_LIMIT, WeightsFormat, WeightsShape};

use crate::error::{Error, OperandFault, Result};
use crate::gemv::Activation;
use crate::gpu::arguments::{Argument, apply_global, config, kernel_dtype, limited, not_one_launch};
use crate::gpu::driver::doing;
use crate::gpu::gemm_weights_kernel::{GemmWeightsKernel, GemmWorkspace};
use crate::gpu::kernels::Kernels;
use crate::gpu::tensor::DeviceTensor;
use crate::shape::QuantizedShape;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<ArrangeGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<GemmGrid> {}

/// Returns whether the kernels take weights of a shape: they copy 16 bytes of codes, and words of scales of whole rows.
pub(in crate::gpu) fn takes(shape: QuantizedShape) -> bool {
    let words = shape.format != Format::Nvfp4 || shape.blocks_per_row().is_multiple_of(4);
    words && shape.cols > 0 && (shape.cols as u64) < PIPELINED_COLUMN_LIMIT
}

/// The grids of both kernels.
struct Grids {
    arrange: ArrangeGrid,
    gemm: GemmGrid,
}

impl Grids {
    fn new(
        kernels: &Kernels,
        kernel: GemmWeightsKernel,
        weights: QuantizedShape,
        tokens: usize,
        aligned: bool,
    ) -> Result<Self> {
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        let GemmWeightsKernel { edition, tile } = kernel;
        let [rows, cols, blocks] =
            [weights.rows, weights.cols, weights.blocks_per_row()].map(|count| count as u64);
        let shape = WeightsShape { rows, cols, blocks };
        let stages = tile.stages(kernels.most_shared());
        // Thread blocks take all of a multiprocessor's shared memory.
        let gemm = GemmGrid::new(tile, shape, tokens as u64, kernels.multiprocessors(), stages);
        let arrange = ArrangeGrid::new(edition, tile, cols, tokens as u64, aligned);
        match (arrange, gemm) {
            (Some(arrange), Some(gemm)) if stages >= 2 => Ok(Self { arrange, gemm }),
            _ => Err(not_one_launch(format_args!("{rows} rows times {tokens} of activations"))),
        }
    }

    /// Bytes of memory that both work in: arranged activations, and behind them sums. Both are multiples of 16.
    fn bytes(&self, kernel: GemmWeightsKernel) -> u64 {
        self.arrange.bytes() + self.gemm.left_bytes(kernel.tile)
    }
}

/// Bytes that a product with so many tokens, or fewer, works in.
pub(in crate::gpu) fn gemm_workspace(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
) -> Result<usize> {
    if weights.rows == 0 || tokens == 0 || !takes(weights) {
        return Ok(0);
    }
    let mut most = 0;
    for kernel in GemmWeightsKernel::of(kernels.target()) {
        // With fewer tokens there may be more thread blocks, which have fewer sums each.
        let grids = Grids::new(kernels, kernel, weights, tokens, true)?;
        let sums = 2 * u64::from(kernels.multiprocessors()) * kernel.tile.sums_bytes();
        most = most.max(grids.bytes(kernel)).max(grids.arrange.bytes() + sums);
    }
    Ok(most as usize)
}

/// Enqueues a product. The caller has checked that there are so many tokens' activations, and that `out` has room.
#[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
pub(in crate::gpu) fn gemm_weights<T: Activation>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: GemmWeightsKernel,
    weights: &DeviceTensor,
    activations: &impl DevicePtr<T>,
    tokens: usize,
    workspace: &mut GemmWorkspace,
    out: &mut impl DevicePtrMut<T>,
) -> Result<()> {
    if weights.rows() == 0 || tokens == 0 {
        return Ok(());
    }
    let format = match weights.format() {
        Format::Nvfp4 => Some(WeightsFormat::Nvfp4),
        Format::Mxfp4 => Some(WeightsFormat::Mxfp4),
        _ => None,
    };
    let dtype = kernel_dtype(T::DTYPE);
    let ids =
        format.and_then(|format| Some((arrange(dtype)?, kernel.tile.kernel(kernel.edition, format, dtype)?)));
    let no_kernel = Error::NoKernel { format: weights.format() };
    let (arrange, gemm) = ids.filter(|_| takes(weights.shape())).ok_or(no_kernel)?;

    let (activations, _read) = activations.device_ptr(stream);
    let aligned = activations.is_multiple_of(16) && weights.cols().is_multiple_of(8);
    let grids = Grids::new(kernels, kernel, weights.shape(), tokens, aligned)?;
    let (needed, found) = (grids.bytes(kernel), workspace.memory.len() as u64);
    if needed > found {
        return Err(Error::Operands(OperandFault::Workspace { needed, found }));
    }
    let GemmWorkspace { counters, memory } = workspace;
    let (memory, _used) = memory.device_ptr_mut(stream);
    let left = memory + grids.arrange.bytes();
    let (counters, _counting) = counters.device_ptr_mut(stream);
    let (out, _written) = out.device_ptr_mut(stream);

    let ready = kernels.ready(arrange)?;
    let elements = grids.arrange.thread_blocks() * u64::from(ready.kernel.elements);
    let grid = Argument(grids.arrange);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&activations).arg(&memory).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The caller checked the activations' length,
    // and the workspace has room.
    unsafe { launch.launch(config(&ready.kernel, elements)?) }.map_err(doing("arranging activations"))?;

    let ready = kernels.ready(gemm)?;
    let shared = kernel.tile.shared_bytes(grids.gemm.stages);
    let launched = Kernel { shared, ..ready.kernel };
    let apply = apply_global(weights);
    let grid = Argument(grids.gemm);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(weights.codes()).arg(weights.scales()).arg(weights.global_slot());
    launch.arg(&activations).arg(&memory).arg(&out).arg(&counters).arg(&left);
    launch.arg(&grid).arg(&apply);
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The caller checked layout and lengths, and
    // `takes` the shape; tensors in device memory start on 256 bytes. The kernel before has arranged the activations for this
    // one. Counters are zeros at first, and each launch leaves them so. The borrows keep the buffers from overlapping.
    unsafe { launch.launch(config(&launched, u64::from(grids.gemm.thread_blocks))?) }
        .map_err(doing("launching a product"))?;
    Ok(())
}
