//! Launches of products of 4-bit weights and FP8 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed};
use crate::gpu::launch::enqueue::{argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing};
use crate::gpu::plan::product::ProductPlan;
use crate::gpu::runtime::kernels::Kernels;

/// Codes of activations and their scales, in device memory.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct Fp8Operand {
    pub(in crate::gpu) codes: u64,
    pub(in crate::gpu) scales: u64,
    /// Scales per token.
    pub(in crate::gpu) token_scales: usize,
    /// The kernel that was enqueued last is the one that quantized the activations.
    pub(in crate::gpu) quantized_just_before: bool,
}

/// Enqueues the kernels of a product. The activations in `operands` are ignored. `workspace` has
/// the addresses of semaphores and of the product's memory.
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
    activations: Fp8Operand,
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
    let Fp8Operand { codes, scales, token_scales, quantized_just_before } = activations;
    let (token_scales, quantized_just_before) = (token_scales as u32, u32::from(quantized_just_before));
    let arguments = &mut [
        argument(&codes),
        argument(&scales),
        argument(&packed),
        argument(&routed.plan),
        argument(&routed.from),
        argument(pack_params),
        argument(&token_scales),
        argument(&quantized_just_before),
    ];
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes packed activations to the workspace, and the second waits for it. A
    // kernel that quantizes starts when all earlier work has ended. The caller guarantees the rest.
    unsafe {
        enqueue(kernels, stream, &launch, arguments, "packing activations")?;
        multiply(kernels, stream, plan, &operands, routed, workspace)
    }
}
