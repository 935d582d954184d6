//! Launches of the kernels around products of f32 activations: split into bf16, and merge.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::ApplyGlobal;
use microscale_kernels_abi::epilogue::{MergeGrid, SplitGrid};
use microscale_kernels_abi::gemm::packing::{MERGE, SPLIT};

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, Routed, Steps};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::runtime::kernels::Kernels;

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
    let grid = SplitGrid::new(tokens as u64, cols as u64, aligned);
    let Routed { plan, from, .. } = &routed;
    let arguments =
        &mut [argument(&activations), argument(&to), argument(plan), argument(from), argument(&grid)];
    let launch = Launch::of_elements(SPLIT, grid.count);
    // SAFETY: the arguments are the kernel's, in order, and the launch covers `grid`. The caller
    // guarantees `activations` and `to`.
    unsafe { enqueue(kernels, stream, &launch, arguments, "splitting activations") }
}

/// Global scales by token, and the other parts of the factors of sums.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct TokenGlobals {
    /// The address of a global scale, a multiplier, per row of activations.
    pub(in crate::gpu) token_scales: u64,
    /// The address of the slots of the weights' global scales, and how they are applied.
    pub(in crate::gpu) slots: u64,
    pub(in crate::gpu) apply: Argument<ApplyGlobal>,
    pub(in crate::gpu) alpha: f32,
}

/// Enqueues adding up the parts' sums, or with `globals` multiplying the only sums by factors, and
/// the epilogue. Dtypes of `steps` are relative to f32, or with `globals` to bf16.
///
/// # Safety
/// `sums` holds `[tokens, rows]` sums for each part, or sums of a plan's sorted rows, which are no
/// more than `tokens`. `out` has room for the results, and the operands of `steps` are valid.
/// `globals` has a global scale per row of activations, and a slot per matrix of weights.
pub(in crate::gpu) unsafe fn merge(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    [sums, out]: [u64; 2],
    steps: Steps,
    routed: Routed,
    globals: Option<TokenGlobals>,
    [tokens, rows]: [usize; 2],
) -> Result<()> {
    let results = steps.epilogue.0.results(rows as u64);
    let grid = MergeGrid::of_parts(rows as u64, results, tokens as u64);
    let grid = globals.map_or(grid, |TokenGlobals { alpha, apply, .. }| grid.of_tokens(alpha, apply.0));
    let [token_scales, slots] = globals.map_or([0; 2], |globals| [globals.token_scales, globals.slots]);
    let (Steps { bias, residual, epilogue }, Routed { plan, from, to }) = (&steps, &routed);
    let arguments = &mut [
        argument(&sums),
        argument(&out),
        argument(bias),
        argument(residual),
        argument(plan),
        argument(from),
        argument(to),
        argument(&token_scales),
        argument(&slots),
        argument(&grid),
        argument(epilogue),
    ];
    let launch = Launch::of_elements(MERGE, grid.count);
    // SAFETY: the arguments are the kernel's, in order, and the launch covers `grid`. The caller
    // guarantees `sums`, `out` and the operands of `steps`.
    unsafe { enqueue(kernels, stream, &launch, arguments, "adding up parts") }
}
