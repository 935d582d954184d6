//! Launches of products of 4-bit weights and FP8 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed};
use crate::gpu::launch::enqueue::{argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing};
use crate::gpu::plan::fp8::Fp8Plan;
use crate::gpu::runtime::kernels::Kernels;

/// Enqueues the kernels of a product. `operands` has the weights; its activations are ignored.
/// `workspace` has the addresses of semaphores and of the product's memory.
///
/// # Safety
/// Weights, codes and scales of activations, and results satisfy the kernels' contracts for the
/// shapes that `plan` was made for. The semaphores are zeros, as each launch leaves
/// them. The memory has the bytes of [`ProductPlan::workspace_bytes`], at a multiple of 16.
///
/// [`ProductPlan::workspace_bytes`]: crate::gpu::plan::product::ProductPlan::workspace_bytes
pub(in crate::gpu) unsafe fn product_fp8(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &Fp8Plan,
    [codes, scales]: [u64; 2],
    operands: &Operands,
    workspace: [u64; 2],
) -> Result<()> {
    let (launch, pack_params) = packing(kernels, &plan.product).expect("products of FP8 pack activations");
    let [_, packed] = workspace;
    let (routed, token_scales) = (Routed::default(), plan.token_scales as u32);
    let arguments = &mut [
        argument(&codes),
        argument(&scales),
        argument(&packed),
        argument(&routed.plan),
        argument(&routed.from),
        argument(pack_params),
        argument(&token_scales),
    ];
    let operands = Operands { activations: 0, ..*operands };
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes packed activations to the workspace, and the second waits for it. The
    // caller guarantees the rest.
    unsafe {
        enqueue(kernels, stream, &launch, arguments, "packing activations")?;
        multiply(kernels, stream, &plan.product, &operands, routed, workspace)
    }
}
