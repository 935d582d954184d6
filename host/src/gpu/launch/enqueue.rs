//! Enqueueing a kernel without allocating: products do it per layer and token.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUlaunchAttribute_st, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDimension, CUlaunchConfig_st, cuLaunchKernelEx,
};
use cudarc::driver::{CudaStream, DriverError};
use microscale_kernels_abi::{Kernel, KernelId};

use crate::error::Result;
use crate::gpu::launch::arguments::not_one_launch;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

/// A launch of one kernel.
pub(in crate::gpu) struct Launch {
    pub(in crate::gpu) kernel: KernelId,
    pub(in crate::gpu) thread_blocks: u64,
    pub(in crate::gpu) threads: u32,
    pub(in crate::gpu) shared: u32,
    pub(in crate::gpu) cluster: u32,
    /// The kernel may start before the previous kernel has ended.
    ///
    /// Drivers for GPUs whose kernels do not use this may be too old to support it.
    pub(in crate::gpu) programmatic: bool,
}

/// The address of an argument, as a launch takes it. The argument must outlive the launch.
pub(in crate::gpu) fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

impl Launch {
    /// A launch with the kernel's own threads, for `elements` elements, or with `elements` thread
    /// blocks if the kernel handles no fixed number of elements.
    pub(in crate::gpu) fn of_elements(kernel: KernelId, elements: u64) -> Self {
        let Kernel { threads, shared, elements: each, .. } = *kernel.kernel();
        let thread_blocks = elements.div_ceil(u64::from(each.max(1)));
        Self { kernel, thread_blocks, threads, shared, cluster: 1, programmatic: false }
    }
}

/// Enqueues a kernel with pointers to its arguments.
///
/// # Safety
/// As for [`cudarc::driver::LaunchArgs::launch`]: `arguments` points to the kernel's arguments, in
/// order, which live until the call returns and satisfy its contract.
pub(in crate::gpu) unsafe fn enqueue(
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
    let attributes = &mut attributes[usize::from(!programmatic)..1 + usize::from(cluster > 1)];
    let launched: std::result::Result<(), DriverError> = if !attributes.is_empty() {
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
            numAttrs: attributes.len() as u32,
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
