//! Launches of products of FP4 weights and FP4 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::ApplyGlobal;
use microscale_kernels_abi::gemm::fp4::Fp4Params;

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, Operands, Routed};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing, product};
use crate::gpu::plan::fp4::{FACTOR_BYTES, Fp4Plan};
use crate::gpu::runtime::kernels::Kernels;

/// How products apply the factor of their sums.
const FACTOR: Argument<ApplyGlobal> = Argument(ApplyGlobal::Multiplier);

/// Addresses of quantized activations: codes, scales and the slot of the global scale.
pub(in crate::gpu) type Fp4Activations = [u64; 3];

/// Enqueues the kernels of a product. `operands` has the weights, with their own global scale; its
/// activations are ignored. `workspace` has the addresses of semaphores and memory.
///
/// # Safety
/// Weights, activations and results satisfy the kernels' contracts for the shapes that `plan` and
/// `params` were made for. The semaphores are zeros, as each launch leaves them. The memory has
/// [`Fp4Plan::workspace_bytes`] bytes, at a multiple of 16.
pub(in crate::gpu) unsafe fn product_fp4(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &Fp4Plan,
    [codes, scales, activation_slot]: Fp4Activations,
    operands: &Operands,
    params: Fp4Params,
    [semaphores, factors]: [u64; 2],
) -> Result<()> {
    let Fp4Plan { product: planned, decode, decoded_bytes } = plan;
    let (decoded, weight_slot) = (factors + FACTOR_BYTES, operands.slot);
    let memory = decoded + decoded_bytes;
    let operands = Operands { slot: factors, apply: FACTOR, activations: decoded, ..*operands };
    let (routed, workspace) = (Routed::default(), [semaphores, memory]);
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes the factor, and packed or decoded activations, to parts of the
    // workspace that follow each other, with the planned bytes. The next kernels read them after it
    // has ended. The caller guarantees the rest.
    unsafe {
        if let Some(kernel) = *decode {
            let arguments = &mut [
                argument(&codes),
                argument(&scales),
                argument(&activation_slot),
                argument(&weight_slot),
                argument(&decoded),
                argument(&factors),
                argument(&params),
            ];
            let launch = Launch::of_elements(kernel, params.eights);
            enqueue(kernels, stream, &launch, arguments, "decoding activations")?;
            return product(kernels, stream, planned, &operands, routed, workspace);
        }
        let (launch, pack_params) = packing(kernels, planned).expect("products of FP4 pack activations");
        let none = 0u64;
        let arguments = &mut [
            argument(&codes),
            argument(&scales),
            argument(&activation_slot),
            argument(&weight_slot),
            argument(&memory),
            argument(&factors),
            argument(&none),
            argument(&none),
            argument(pack_params),
            argument(&params),
        ];
        enqueue(kernels, stream, &launch, arguments, "packing activations")?;
        multiply(kernels, stream, planned, &operands, routed, workspace)
    }
}
