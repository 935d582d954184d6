//! Launches of products of FP4 weights and FP4 activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
use microscale_kernels_abi::{ApplyGlobal, KernelId};

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, Operands, Routed};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::launch::gemm::{multiply, packing, product};
use crate::gpu::plan::product::ProductPlan;
use crate::gpu::runtime::kernels::Kernels;

/// How products apply the factor of their sums.
const FACTOR: Argument<ApplyGlobal> = Argument(ApplyGlobal::Multiplier);

/// Addresses of quantized activations, which are codes, scales and slots of global scales, and the
/// parameters of the kernels that read them.
pub(in crate::gpu) type Fp4Operand = ([u64; 3], Fp4Params);

/// Enqueues the kernels of a product: `decode`, or the one that packs, and the product's.
/// `operands` has the weights, with their own global scales; its activations are ignored. The last
/// addresses are of semaphores, of a slot per matrix for the factors, of decoded activations, and
/// of the product's memory.
///
/// # Safety
/// Weights, activations and results satisfy the kernels' contracts for the shapes that `plan` and
/// the activations' parameters were made for; a `routed` plan was made for its token tiles. The
/// semaphores are zeros, as each launch leaves them. There is room for decoded activations, and for
/// [`ProductPlan::workspace_bytes`] bytes of memory, at multiples of 16.
pub(in crate::gpu) unsafe fn product_fp4(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    (planned, decode): (&ProductPlan, Option<KernelId>),
    ([codes, scales, activation_slots], params): Fp4Operand,
    operands: &Operands,
    routed: Routed,
    [semaphores, factors, decoded, memory]: [u64; 4],
) -> Result<()> {
    let weight_slots = operands.slot;
    let operands = Operands { slot: factors, apply: FACTOR, activations: decoded, ..*operands };
    let workspace = [semaphores, memory];
    // SAFETY: the arguments are each kernel's, in order, and point to locals that outlive the call.
    // The first kernel writes the factors, and packed or decoded activations, to parts of the
    // workspace that follow each other, with the planned bytes. The next kernels read them after it
    // has ended. The caller guarantees the rest.
    unsafe {
        if let Some(kernel) = decode {
            let arguments = &mut [
                argument(&codes),
                argument(&scales),
                argument(&activation_slots),
                argument(&weight_slots),
                argument(&decoded),
                argument(&factors),
                argument(&params),
            ];
            // The first thread block writes the factors, also of activations without columns.
            let launch = Launch::of_elements(kernel, params.eights.max(1));
            enqueue(kernels, stream, &launch, arguments, "decoding activations")?;
            return product(kernels, stream, planned, &operands, routed, workspace);
        }
        let (launch, pack_params) = packing(kernels, planned).expect("products of FP4 pack activations");
        let arguments = &mut [
            argument(&codes),
            argument(&scales),
            argument(&activation_slots),
            argument(&weight_slots),
            argument(&memory),
            argument(&factors),
            argument(&routed.plan),
            argument(&routed.from),
            argument(pack_params),
            argument(&params),
        ];
        enqueue(kernels, stream, &launch, arguments, "packing activations")?;
        multiply(kernels, stream, planned, &operands, routed, workspace)
    }
}
