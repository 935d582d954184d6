//! Launches of the kernels of a product of weights and activations.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed, Steps};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::plan::product::{ProductParams, ProductPlan};
use crate::gpu::runtime::kernels::Kernels;

/// Enqueues the kernels of a product. `semaphores` and `memory` are the addresses of its workspace.
///
/// # Safety
/// The operands satisfy the kernels' contracts for the shape, dtype and alignment that the plan was
/// made for; a `routed` plan was made for its token tiles. The semaphores are zeros, as each launch
/// leaves them. `memory` has [`ProductPlan::workspace_bytes`] bytes, at a multiple of 16.
pub(in crate::gpu) unsafe fn product(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &ProductPlan,
    operands: &Operands,
    routed: Routed,
    [semaphores, memory]: [u64; 2],
) -> Result<()> {
    let Operands { codes, scales, slot, activations, out, apply, steps } = operands;
    let Routed { plan: expert_plan, from, to } = &routed;
    let Steps { bias, residual, epilogue } = steps;
    let ProductPlan { config, kernel, thread_blocks, threads, shared, .. } = *plan;
    let programmatic = config.mainloop.traits().programmatic && kernels.target().since_sm90;
    let launch = Launch { kernel, thread_blocks, threads, shared, cluster: config.cluster, programmatic };
    // SAFETY: the arguments are the kernels', in order, and the launches are the plan's. They point
    // to locals that outlive the calls, and the driver copies them before a call returns. The
    // second kernel waits for the packing kernel before it reads the packed activations. The caller
    // guarantees the operands, the semaphores and `memory`.
    unsafe {
        match &plan.params {
            ProductParams::Packed { pack, pack_params, gemm_params } => {
                let partial_sums = memory + pack_params.bytes();
                let pack_blocks = u64::from(pack_params.thread_blocks);
                let packing = Launch {
                    kernel: *pack,
                    thread_blocks: pack_blocks,
                    threads: PACK_THREADS,
                    shared: 0,
                    cluster: 1,
                    programmatic,
                };
                let arguments = &mut [
                    argument(activations),
                    argument(&memory),
                    argument(expert_plan),
                    argument(from),
                    argument(pack_params),
                ];
                enqueue(kernels, stream, &packing, arguments, "packing activations")?;
                let arguments = &mut [
                    argument(codes),
                    argument(scales),
                    argument(slot),
                    argument(activations),
                    argument(&memory),
                    argument(out),
                    argument(&semaphores),
                    argument(&partial_sums),
                    argument(expert_plan),
                    argument(from),
                    argument(to),
                    argument(bias),
                    argument(residual),
                    argument(gemm_params),
                    argument(apply),
                    argument(epilogue),
                ];
                enqueue(kernels, stream, &launch, arguments, "launching a product")
            }
            ProductParams::Gemv(_) | ProductParams::Plain(_) => {
                let params = match &plan.params {
                    ProductParams::Gemv(params) => argument(params),
                    ProductParams::Plain(params) => argument(params),
                    ProductParams::Packed { .. } => unreachable!("matched above"),
                };
                let arguments = &mut [
                    argument(codes),
                    argument(scales),
                    argument(slot),
                    argument(activations),
                    argument(out),
                    argument(expert_plan),
                    argument(from),
                    argument(to),
                    argument(bias),
                    argument(residual),
                    params,
                    argument(apply),
                    argument(epilogue),
                ];
                enqueue(kernels, stream, &launch, arguments, "launching a product")
            }
        }
    }
}
