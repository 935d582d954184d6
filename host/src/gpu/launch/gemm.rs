//! Launches of the kernels of a product of weights and activations.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUlaunchAttribute_st, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDimension, CUlaunchConfig_st, cuLaunchKernelEx,
};
use cudarc::driver::{CudaStream, DriverError};
use microscale_kernels_abi::KernelId;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::launch::THREADS;

use crate::error::Result;
use crate::gpu::launch::arguments::{Operands, Routed, Steps, not_one_launch};
use crate::gpu::plan::product::{ProductParams, ProductPlan};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

const _: () = assert!(PACK_THREADS == THREADS);

/// A launch of one kernel of a product.
struct Launch {
    kernel: KernelId,
    thread_blocks: u64,
    threads: u32,
    shared: u32,
    cluster: u32,
    /// The kernel may start before the previous kernel has ended.
    ///
    /// Drivers for GPUs whose kernels do not use this may be too old to support it.
    programmatic: bool,
}

/// The address of an argument, as a launch takes it. The argument must outlive the launch.
fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

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
    let programmatic = config.mainloop.traits().programmatic;
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

/// Enqueues a kernel with pointers to its arguments.
///
/// # Safety
/// As for [`cudarc::driver::LaunchArgs::launch`]: `arguments` points to the kernel's arguments, in
/// order, which live until the call returns and satisfy its contract.
unsafe fn enqueue(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    launch: &Launch,
    arguments: &mut [*mut c_void],
    what: &'static str,
) -> Result<()> {
    let Launch { kernel, thread_blocks, threads, shared, cluster, programmatic } = *launch;
    let ready = kernels.ready(kernel)?;
    let thread_blocks = i32::try_from(thread_blocks)
        .map_err(|_| not_one_launch(format_args!("{thread_blocks} thread blocks")))?;
    let programmatic_launch = CUlaunchAttribute_st {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let clusters = CUlaunchAttribute_st {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { clusterDim: ClusterDimension { x: cluster, y: 1, z: 1 } },
    };
    let mut attributes = [programmatic_launch, clusters];
    let (function, stream_handle) = (ready.function.cu_function(), stream.cu_stream());
    stream.context().bind_to_thread().map_err(doing(what))?;
    let launched: std::result::Result<(), DriverError> = if programmatic {
        let config = CUlaunchConfig_st {
            gridDimX: thread_blocks as u32,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream_handle,
            attrs: attributes.as_mut_ptr(),
            numAttrs: if cluster > 1 { 2 } else { 1 },
        };
        // SAFETY: `config` and `attributes` live until the call returns. The caller guarantees
        // `arguments`.
        unsafe { cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), ptr::null_mut()) }
            .result()
    } else {
        let (grid, block) = ((thread_blocks as u32, 1, 1), (threads, 1, 1));
        // SAFETY: the caller guarantees that `arguments` points to the kernel's arguments.
        unsafe {
            cudarc::driver::result::launch_kernel(function, grid, block, shared, stream_handle, arguments)
        }
    };
    launched.map_err(doing(what))
}
