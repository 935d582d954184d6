//! The kernels of one GPU, each compiled by the driver when it is first used.
//!
//! Entry points are independent text, so the driver can compile one kernel at a time. That takes
//! 0.03 to 0.3 s per kernel, and more than 10 s for all kernels together. The driver caches
//! compiled kernels on disk, if it is allowed to.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST_SHARED,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
};
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::Ptx;
use microscale_kernels_abi::{Family, Kernel, KernelId, Target, target_for};

use crate::error::{Error, Result};
use crate::gpu::memory::tensor::DeviceReport;
use crate::gpu::plan::request::GpuFacts;
use crate::gpu::runtime::device::GpuInfo;
use crate::gpu::runtime::driver::{Relaxed, doing};
use crate::gpu::runtime::ptx;

/// The kernels of one GPU.
pub(in crate::gpu) struct Kernels {
    context: Arc<CudaContext>,
    target: &'static Target,
    /// Bytes of shared memory that a thread block may use.
    most_shared: u32,
    sm_count: u32,
    /// The GPU's name, the key for measured times.
    gpu_name: String,
    /// Held by the thread that compiles a kernel.
    ///
    /// The driver compiles one at a time, and compiling all kernels takes a quarter longer if
    /// several threads ask.
    compiling: Mutex<()>,
    /// The kernels by family and number: empty until the kernel is first used.
    ready: [Vec<OnceLock<Ready>>; Family::ALL.len()],
    /// A report for callers without one: kernels add to it, and it is never read.
    ///
    /// Its address is taken once, because taking it is a stream operation, which a launch must
    /// avoid.
    _unread: DeviceReport,
    unread_address: u64,
}

/// Waits for running kernels before their code and the unread report are freed.
impl Drop for Kernels {
    fn drop(&mut self) {
        // An error here is the GPU's, and the next operation on the GPU returns it.
        let _ = self.context.synchronize();
    }
}

/// A kernel ready to launch on this GPU.
pub(in crate::gpu) struct Ready {
    /// The launch shape, within the GPU's shared memory.
    pub(in crate::gpu) kernel: Kernel,
    pub(in crate::gpu) function: CudaFunction,
    /// Thread blocks that the GPU can run at a time if the kernel's grid sets their number; else 1.
    pub(in crate::gpu) thread_blocks: u32,
}

impl Kernels {
    /// The kernels of a GPU, for its own target or a given one. Compiles nothing yet.
    pub(in crate::gpu) fn new(
        context: &Arc<CudaContext>,
        info: &GpuInfo,
        target: Option<&'static Target>,
    ) -> Result<Self> {
        let (major, minor) = info.compute_capability;
        let target = target.or_else(|| target_for((major, minor))).ok_or_else(|| {
            Error::NoGpu(format!(
                "{} has compute capability {major}.{minor}; 8.0 is the oldest supported",
                info.name
            ))
        })?;
        let of_gpu = |attribute| {
            let found = context.attribute(attribute).map_err(doing("asking what a multiprocessor has"))?;
            Ok(found.max(0) as u32)
        };
        let (most_shared, sm_count) = (of_gpu(MOST_SHARED)?, of_gpu(MULTIPROCESSORS)?);
        let ready = Family::ALL.map(|family| family.kernels().iter().map(|_| OnceLock::new()).collect());
        let unread = DeviceReport::zeros(&context.default_stream())?;
        let unread_address = unread.address();
        let (context, compiling) = (context.clone(), Mutex::new(()));
        Ok(Self {
            context,
            target,
            most_shared,
            sm_count,
            gpu_name: info.name.clone(),
            compiling,
            ready,
            _unread: unread,
            unread_address,
        })
    }

    /// The target that the kernels are built for.
    pub(in crate::gpu) fn target(&self) -> &'static Target {
        self.target
    }

    /// Bytes of shared memory that a thread block may use.
    pub(in crate::gpu) fn most_shared(&self) -> u32 {
        self.most_shared
    }

    /// Multiprocessors of the GPU.
    pub(in crate::gpu) fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// The GPU's name.
    pub(in crate::gpu) fn gpu_name(&self) -> &str {
        &self.gpu_name
    }

    /// The properties that configurations are chosen by.
    pub(in crate::gpu) fn facts(&self) -> GpuFacts {
        GpuFacts { target: self.target, sm_count: self.sm_count, most_shared: self.most_shared }
    }

    /// The address of the report that is never read.
    pub(in crate::gpu) fn unread_report(&self) -> u64 {
        self.unread_address
    }

    /// A kernel, compiled on first use by the first thread; other threads that need it wait.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the driver fails. The next call tries again.
    pub(in crate::gpu) fn ready(&self, id: KernelId) -> Result<&Ready> {
        let place = &self.ready[id.family() as usize][id.index()];
        if let Some(ready) = place.get() {
            return Ok(ready);
        }
        // A thread that panicked left the slot empty.
        let _compiling = self.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        match place.get() {
            Some(ready) => Ok(ready),
            None => self.compile(id).map(|ready| place.get_or_init(|| ready)),
        }
    }

    /// Compiles kernels that are not [`ready`](Self::ready) yet.
    ///
    /// # Errors
    /// As for [`Self::ready`].
    pub(in crate::gpu) fn ready_all(&self, ids: impl IntoIterator<Item = KernelId>) -> Result<()> {
        ids.into_iter().try_for_each(|id| self.ready(id).map(|_| ()))
    }

    /// Has the driver compile a kernel.
    fn compile(&self, id: KernelId) -> Result<Ready> {
        let kernel = id.kernel().within(self.most_shared);
        // Another component may be capturing a stream of this thread; the calls below must not be
        // captured.
        let _relaxed = Relaxed::new()?;
        let module = self
            .context
            .load_module(Ptx::from_src(ptx::of(id, self.target)))
            .map_err(doing("compiling a kernel of the embedded PTX"))?;
        let function =
            module.load_function(kernel.name).map_err(doing("finding a kernel in the embedded PTX"))?;
        // Dynamic shared memory above 48 KiB must be opted into.
        function
            .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared as i32)
            .map_err(doing("asking for shared memory"))?;
        let mut thread_blocks = 1;
        if kernel.elements == 0 {
            let each = function
                .occupancy_max_active_blocks_per_multiprocessor(kernel.threads, kernel.shared as usize, None)
                .map_err(doing("asking how many thread blocks there can be"))?;
            thread_blocks = (each * self.sm_count).max(1);
        }
        Ok(Ready { kernel, function, thread_blocks })
    }
}
