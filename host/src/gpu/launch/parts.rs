//! Launches of the kernels around products of f32 activations: split into bf16, and merge.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, PushKernelArg};
use microscale_kernels_abi::Divider;
use microscale_kernels_abi::epilogue::{MergeGrid, SplitGrid};
use microscale_kernels_abi::gemm::packing::{MERGE, SPLIT};

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, Routed, Steps, config};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<SplitGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<MergeGrid> {}

/// Enqueues splitting f32 activations into bf16 parts.
///
/// # Safety
/// `activations` holds `[tokens, cols]` values in f32, or the rows that a plan of the parts names,
/// which are no more than `tokens`. `to` is a multiple of 16, has room for their parts, and no
/// other work uses it before the kernel ends.
pub(in crate::gpu) unsafe fn split(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    activations: u64,
    to: u64,
    routed: Routed,
    [tokens, cols]: [usize; 2],
) -> Result<()> {
    let aligned = activations.is_multiple_of(16);
    let grid = Argument(SplitGrid::new(tokens as u64, cols as u64, aligned));
    let ready = kernels.ready(SPLIT)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&activations).arg(&to).arg(&routed.plan).arg(&routed.from).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order, and the launch covers `grid`. The caller
    // guarantees `activations` and `to`.
    unsafe { launch.launch(config(&ready.kernel, grid.0.count)?) }.map_err(doing("splitting activations"))?;
    Ok(())
}

/// Enqueues adding up the parts' sums, and the epilogue.
///
/// # Safety
/// `sums` holds `[tokens, rows]` sums for each part, or sums of a plan's sorted rows, which are no
/// more than `tokens`. `out` has room for the results, and the operands of `steps` are valid.
pub(in crate::gpu) unsafe fn merge(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    sums: u64,
    out: u64,
    steps: Steps,
    routed: Routed,
    [tokens, rows]: [usize; 2],
) -> Result<()> {
    let results = steps.epilogue.0.results(rows as u64);
    let count = tokens as u64 * results;
    let grid = Argument(MergeGrid { rows: rows as u64, results: Divider::new(results), count });
    let ready = kernels.ready(MERGE)?;
    let Steps { bias, residual, epilogue } = steps;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&sums).arg(&out).arg(&bias).arg(&residual).arg(&routed.plan).arg(&routed.to);
    launch.arg(&grid).arg(&epilogue);
    // SAFETY: the arguments are the kernel's, in order, and the launch covers `grid`. The caller
    // guarantees `sums`, `out` and the operands of `steps`.
    unsafe { launch.launch(config(&ready.kernel, count)?) }.map_err(doing("adding up parts"))?;
    Ok(())
}
