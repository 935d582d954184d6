//! The kernels of one GPU, each compiled by the driver when it is first used.
//!
//! Entry points are independent text, so that a kernel can be handed to the driver by itself: that takes it
//! 0.03 to 0.3 s, and more than 10 s for all kernels together. The driver keeps what it compiled in a cache
//! of its own, if it may.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST_SHARED,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
};
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::Ptx;
use microscale_kernels_abi::{Family, Kernel, KernelId, Target, target_for};

use super::device::GpuInfo;
use super::driver::{Relaxed, doing};
use super::ptx;
use super::tensor::DeviceReport;
use crate::error::{Error, Result};

/// The kernels of one GPU.
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    target: &'static Target,
    /// Bytes of shared memory that a thread block may have.
    most_shared: u32,
    multiprocessors: u32,
    /// Held by the thread that compiles a kernel. The driver compiles one at a time, and all together takes
    /// it a quarter longer if several threads ask.
    compiling: Mutex<()>,
    /// The kernels by family and number: empty until the kernel is first used.
    ready: [Vec<OnceLock<Ready>>; Family::ALL.len()],
    /// A report for who wants none: kernels add to it, and nobody reads it. Its address is asked for once, for
    /// that is an operation on a stream, which a launch must not have.
    _unread: DeviceReport,
    unread_address: u64,
}

/// Waits for kernels that run, as their code and the unread report go.
impl Drop for Kernels {
    fn drop(&mut self) {
        // An error is one of the GPU's, and the next use of it finds that out.
        let _ = self.context.synchronize();
    }
}

/// A kernel as it is launched on this GPU.
pub(super) struct Ready {
    /// The launch shape, within the GPU's shared memory.
    pub(super) kernel: Kernel,
    pub(super) function: CudaFunction,
    /// Thread blocks that the GPU has room for at once, if the kernel's grid says how many there are; else 1.
    pub(super) at_once: u32,
}

impl Kernels {
    /// The kernels of a GPU; nothing is compiled yet.
    pub(super) fn new(context: &Arc<CudaContext>, info: &GpuInfo) -> Result<Self> {
        let (major, minor) = info.compute_capability;
        let target = target_for((major, minor)).ok_or_else(|| {
            Error::NoGpu(format!(
                "{} has compute capability {major}.{minor}; 8.0 is the oldest supported",
                info.name
            ))
        })?;
        let of_gpu = |attribute| {
            let found = context.attribute(attribute).map_err(doing("asking what a multiprocessor has"))?;
            Ok(found.max(0) as u32)
        };
        let (most_shared, multiprocessors) = (of_gpu(MOST_SHARED)?, of_gpu(MULTIPROCESSORS)?);
        let ready = Family::ALL.map(|family| family.kernels().iter().map(|_| OnceLock::new()).collect());
        let unread = DeviceReport::zeros(&context.default_stream())?;
        let unread_address = unread.address();
        let (context, compiling) = (context.clone(), Mutex::new(()));
        Ok(Self {
            context,
            target,
            most_shared,
            multiprocessors,
            compiling,
            ready,
            _unread: unread,
            unread_address,
        })
    }

    /// The target whose kernels these are.
    pub(super) fn target(&self) -> &'static Target {
        self.target
    }

    /// Bytes of shared memory that a thread block may have.
    pub(super) fn most_shared(&self) -> u32 {
        self.most_shared
    }

    /// Multiprocessors of the GPU.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The address of a report that nobody reads.
    pub(super) fn unread_report(&self) -> u64 {
        self.unread_address
    }

    /// A kernel, compiled if it is not yet: by the thread that comes first, while others that want it wait.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver refuses. The next call tries again.
    pub(super) fn ready(&self, id: KernelId) -> Result<&Ready> {
        let place = &self.ready[id.family() as usize][id.index()];
        if let Some(ready) = place.get() {
            return Ok(ready);
        }
        // A thread that panicked has left the place empty.
        let _compiling = self.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        match place.get() {
            Some(ready) => Ok(ready),
            None => self.compile(id).map(|ready| place.get_or_init(|| ready)),
        }
    }

    /// Hands a kernel to the driver.
    fn compile(&self, id: KernelId) -> Result<Ready> {
        let kernel = id.kernel().within(self.most_shared);
        // A stream of this thread may be being captured, into which nothing of this belongs.
        let _relaxed = Relaxed::new()?;
        let module = self
            .context
            .load_module(Ptx::from_src(ptx::of(id, self.target)))
            .map_err(doing("compiling a kernel of the embedded PTX"))?;
        let function =
            module.load_function(kernel.name).map_err(doing("finding a kernel in the embedded PTX"))?;
        // Some have more than a launch gets without it.
        function
            .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared as i32)
            .map_err(doing("asking for shared memory"))?;
        let mut at_once = 1;
        if kernel.elements == 0 {
            let each = function
                .occupancy_max_active_blocks_per_multiprocessor(kernel.threads, kernel.shared as usize, None)
                .map_err(doing("asking how many thread blocks there can be"))?;
            at_once = (each * self.multiprocessors).max(1);
        }
        Ok(Ready { kernel, function, at_once })
    }
}
