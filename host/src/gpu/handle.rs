//! [`Gpu`]: one GPU, ready to work, with its context, stream and kernels.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::error::Result;
use crate::gpu::memory::pool::KeptPool;
use crate::gpu::memory::staging::Staging;
use crate::gpu::plan::cache::PlanCache;
use crate::gpu::plan::planned::{PlanKey, Planned};
use crate::gpu::runtime::device::{GpuInfo, primary_context};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use microscale_kernels_abi::Target;

/// One GPU, ready to work: its context, a stream and the kernels.
pub struct Gpu {
    pub(in crate::gpu) info: GpuInfo,
    pub(in crate::gpu) context: Arc<CudaContext>,
    pub(in crate::gpu) stream: Arc<CudaStream>,
    pub(in crate::gpu) kernels: Arc<Kernels>,
    pub(in crate::gpu) staging: Arc<Staging>,
    /// The plans of products that were made.
    pub(in crate::gpu) plans: Arc<PlanCache<PlanKey, Planned>>,
    /// Keeps freed memory for the workers of an operation.
    _kept: Option<Arc<KeptPool>>,
}

/// Shows the facts of the GPU. Context, stream and kernels are handles, which say nothing.
impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("info", &self.info).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens GPU number `ordinal` and gets ready to load the PTX that its compute capability gets.
    ///
    /// # Errors
    /// [`Error::NoGpu`](crate::Error::NoGpu) without a driver, without such a GPU, or if it is
    /// older than compute capability 8.0; [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::from_context(primary_context(ordinal)?)
    }

    /// The same for a context that is there already, with a stream of its own: the first stream
    /// that is made of a context has cudarc wait for the GPU once, and from then on order uses of
    /// buffers by events, unless that was turned off (`CudaContext::disable_event_tracking`).
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn from_context(context: Arc<CudaContext>) -> Result<Self> {
        Self::from_stream(context.new_stream().map_err(doing("creating a stream"))?)
    }

    /// The same for the context of a stream, on which the host-slice operations will work. No other
    /// stream is made.
    ///
    /// A stream that other software made becomes one of cudarc's by
    /// `CudaContext::wrap_borrowed_stream`, which neither owns nor destroys it. PyTorch and
    /// whatever uses CUDA's runtime work in a GPU's primary context, which is
    /// [`primary_context`](super::primary_context)'s.
    ///
    /// ```no_run
    /// use microscale::Result;
    /// use microscale::gpu::{Gpu, primary_context};
    ///
    /// /// # Safety
    /// /// `stream` is a stream of GPU 0's primary context, such as PyTorch's
    /// /// `torch.cuda.current_stream().cuda_stream`, and outlives the returned GPU.
    /// unsafe fn on_their_stream(stream: usize) -> Result<Gpu> {
    ///     // SAFETY: the caller's promise.
    ///     Gpu::from_stream(unsafe { primary_context(0)?.wrap_borrowed_stream(stream as _) })
    /// }
    /// ```
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self> {
        Self::of_context(stream, None)
    }

    /// A GPU with a stream of its context, and the PTX of its own target or a given one.
    pub(in crate::gpu) fn of_context(
        stream: Arc<CudaStream>,
        target: Option<&'static Target>,
    ) -> Result<Self> {
        let context = stream.context().clone();
        let info = GpuInfo::of(&context)?;
        let kernels = Arc::new(Kernels::new(&context, &info, target)?);
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, kernels, staging, plans: Arc::default(), _kept: None })
    }

    /// The same GPU with another stream, for another thread, and the pool that its workers keep.
    pub(in crate::gpu) fn worker(&self, kept: Option<Arc<KeptPool>>) -> Result<Self> {
        let stream = self.context.new_stream().map_err(doing("creating a stream"))?;
        let (info, context, kernels) = (self.info.clone(), self.context.clone(), self.kernels.clone());
        let plans = self.plans.clone();
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, kernels, staging, plans, _kept: kept })
    }

    /// The facts of this GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The CUDA context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream that the host-slice operations use.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}
