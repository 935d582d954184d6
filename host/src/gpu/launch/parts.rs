//! Launching the kernels around products of activations in f32: their parts in bf16, and the sums of these.

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

/// Enqueues the making of parts.
///
/// # Safety
/// `activations` holds so many rows and columns of f32, or the rows of a plan of their parts, which are no more, and `to`, on 16 bytes, has
/// room for these. Nothing else uses it before.
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
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The rest is the caller's promise.
    unsafe { launch.launch(config(&ready.kernel, grid.0.count)?) }.map_err(doing("splitting activations"))?;
    Ok(())
}

/// Enqueues the adding up of sums, and what follows.
///
/// # Safety
/// `sums` holds so many rows of them for each part of so many tokens, or of a plan's sorted rows, which are no more; `out` has room for
/// their results, and the steps' operands are there.
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
    // SAFETY: as above.
    unsafe { launch.launch(config(&ready.kernel, count)?) }.map_err(doing("adding up parts"))?;
    Ok(())
}
