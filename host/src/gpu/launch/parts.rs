//! Launching the kernels around products of activations in f32: their parts in bf16, and the sums of these.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr, PushKernelArg};
use microscale_kernels_abi::Divider;
use microscale_kernels_abi::epilogue::{MergeGrid, PARTS, SplitGrid};
use microscale_kernels_abi::gemm::{MERGE, SPLIT};

use crate::error::Result;
use crate::gpu::arguments::{Argument, Routed, Steps, config};
use crate::gpu::driver::doing;
use crate::gpu::kernels::Kernels;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<SplitGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<MergeGrid> {}

/// Parts of an activation, each a row where the activations are one.
pub(super) const ROWS: usize = PARTS as usize;

/// Bytes of the parts of so many activations, and of the sums of products with rows of weights: each a multiple of 16.
pub(super) fn bytes(tokens: usize, rows: usize, cols: usize) -> [u64; 2] {
    let [parts, sums] = [(cols, size_of::<u16>()), (rows, size_of::<f32>())]
        .map(|(each, bytes)| ((tokens * ROWS) as u64).saturating_mul((each * bytes) as u64));
    [parts, sums].map(|bytes| bytes.next_multiple_of(16))
}

/// Enqueues the making of parts.
///
/// # Safety
/// `activations` holds so many rows and columns of f32, or the rows of a plan of their parts, which are no more, and `to`, on 16 bytes, has
/// room for these. Nothing else uses it before.
pub(super) unsafe fn split(
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
pub(super) unsafe fn merge(
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
