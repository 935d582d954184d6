//! Launches of the kernels of a product of weights and activations.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::{PackParams, WeightsBoxes};

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed, Steps};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::launch::tensor_map::tensor_map;
use crate::gpu::plan::product::{Packing, ProductParams, ProductPlan};
use crate::gpu::runtime::kernels::Kernels;

/// Enqueues the kernels of a product. `workspace` has the addresses of semaphores and memory.
///
/// # Safety
/// The operands satisfy the kernels' contracts for the shape, dtype and alignment that the plan was
/// made for; a `routed` plan was made for its token tiles. The semaphores are zeros, as each launch
/// leaves them. The memory has [`ProductPlan::workspace_bytes`] bytes, at a multiple of 16.
pub(in crate::gpu) unsafe fn product(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &ProductPlan,
    operands: &Operands,
    routed: Routed,
    workspace: [u64; 2],
) -> Result<()> {
    if let Some((launch, pack_params)) = packing(kernels, plan) {
        let [_, packed] = workspace;
        let arguments = &mut [
            argument(&operands.activations),
            argument(&packed),
            argument(&routed.plan),
            argument(&routed.from),
            argument(pack_params),
        ];
        // SAFETY: the arguments are the kernel's, in order, and the launch is the plan's. They
        // point to locals that outlive the call. The caller guarantees the operands and the
        // workspace.
        unsafe { enqueue(kernels, stream, &launch, arguments, "packing activations")? };
    }
    // SAFETY: as for this function. A kernel that reads packed activations waits for the kernel
    // that packs them.
    unsafe { multiply(kernels, stream, plan, operands, routed, workspace) }
}

/// Returns the launch and the parameters of the kernel that packs activations, if the plan has one.
pub(in crate::gpu) fn packing<'a>(
    kernels: &Kernels,
    plan: &'a ProductPlan,
) -> Option<(Launch, &'a PackParams)> {
    let ProductParams::Gemm { packing: Some(Packing { kernel, params }), .. } = &plan.params else {
        return None;
    };
    let launch = Launch {
        kernel: *kernel,
        thread_blocks: u64::from(params.thread_blocks),
        threads: PACK_THREADS,
        shared: 0,
        cluster: 1,
        programmatic: is_programmatic(kernels, plan),
    };
    Some((launch, params))
}

/// Returns whether the kernels of a plan may start before the previous kernel has ended.
fn is_programmatic(kernels: &Kernels, plan: &ProductPlan) -> bool {
    plan.config.mainloop.traits().programmatic && kernels.target().since_sm90
}

/// Enqueues the kernel of a product that multiplies.
///
/// # Safety
/// As for [`product`]. If the plan has a packing kernel, it runs before this one and writes packed
/// activations to the start of `memory`.
pub(in crate::gpu) unsafe fn multiply(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    plan: &ProductPlan,
    operands: &Operands,
    routed: Routed,
    [semaphores, memory]: [u64; 2],
) -> Result<()> {
    let Operands { codes, matrices, scales, slot, activations, out, apply, steps } = operands;
    let Routed { plan: expert_plan, from, to } = &routed;
    let Steps { bias, residual, epilogue } = steps;
    let ProductPlan { config, kernel, thread_blocks, threads, shared, .. } = *plan;
    let programmatic = is_programmatic(kernels, plan);
    let launch = Launch { kernel, thread_blocks, threads, shared, cluster: config.cluster, programmatic };
    // SAFETY: the arguments are the kernel's, in order, and the launch is the plan's. They point to
    // locals that outlive the call, and the driver copies them before it returns. The caller
    // guarantees the operands, the semaphores and `memory`.
    unsafe {
        match &plan.params {
            ProductParams::Gemm { gemm_params, .. } => {
                let partial_sums = memory + plan.packed_bytes();
                let boxes = WeightsBoxes::new(config, gemm_params.shape, *matrices);
                let map = boxes.map(|boxes| tensor_map(*codes, &boxes)).transpose()?;
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
                    map.as_ref().map_or(ptr::null_mut(), argument),
                ];
                let count = arguments.len() - usize::from(map.is_none());
                enqueue(kernels, stream, &launch, &mut arguments[..count], "launching a product")
            }
            ProductParams::Gemv(_) | ProductParams::Plain(_) => {
                let params = match &plan.params {
                    ProductParams::Gemv(params) => argument(params),
                    ProductParams::Plain(params) => argument(params),
                    ProductParams::Gemm { .. } => unreachable!("matched above"),
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
