//! Launches of products of 4-bit weights and FP8 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed};
use crate::gpu::launch::enqueue::{argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing};
use crate::gpu::plan::product::ProductPlan;
use crate::gpu::runtime::kernels::Kernels;

/// Enqueues the kernels of a product. `codes`, `scales` and `token_scales` are the activations and
/// their scales per token; the activations in `operands` are ignored. `workspace` has the addresses
/// of semaphores and of the product's memory.
///
/// # Safety
/// Weights, codes and scales of activations, and results satisfy the kernels' contracts for the
/// shapes that `plan` was made for; a `routed` plan was made for its token tiles. The semaphores
/// are zeros, as each launch leaves them. The memory has [`ProductPlan::workspace_bytes`] bytes, at
/// a multiple of 16.
pub(in crate::gpu) unsafe fn product_fp8(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &ProductPlan,
    ([codes, scales], token_scales): ([u64; 2], usize),
    operands: &Operands,
    routed: Routed,
    workspace: [u64; 2],
) -> Result<()> {
    let operands = Operands { activations: 0, ..*operands };
    let Some((launch, pack_params)) = packing(kernels, plan) else {
        // Weights without columns.
        // SAFETY: the kernel reads no activations. The caller guarantees the rest.
        return unsafe { multiply(kernels, stream, plan, &operands, routed, workspace) };
    };
    let [_, packed] = workspace;
    let token_scales = token_scales as u32;
    let arguments = &mut [
        argument(&codes),
        argument(&scales),
        argument(&packed),
        argument(&routed.plan),
        argument(&routed.from),
        argument(pack_params),
        argument(&token_scales),
    ];
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes packed activations to the workspace, and the second waits for it. The
    // caller guarantees the rest.
    unsafe {
        enqueue(kernels, stream, &launch, arguments, "packing activations")?;
        multiply(kernels, stream, plan, &operands, routed, workspace)
    }
}
