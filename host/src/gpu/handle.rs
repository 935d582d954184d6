//! [`Gpu`]: one GPU, ready to work, with its context, stream and kernels.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream};
use microscale_kernels_abi::KernelId;

use super::device::{GpuInfo, primary_context};
use super::driver::doing;
use super::kernels::Kernels;
use super::staging::Staging;
use crate::error::Result;

/// One GPU, ready to work: its context, a stream and the kernels.
pub struct Gpu {
    pub(super) info: GpuInfo,
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) staging: Arc<Staging>,
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
    /// [`Error::NoGpu`](crate::Error::NoGpu) without a driver, without such a GPU, or if it is older than
    /// compute capability 8.0; [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::from_context(primary_context(ordinal)?)
    }

    /// The same for a context that is there already, with a stream of its own: the first stream that is made of a context has
    /// cudarc wait for the GPU once, and from then on order uses of buffers by events, unless that was turned off
    /// (`CudaContext::disable_event_tracking`).
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn from_context(context: Arc<CudaContext>) -> Result<Self> {
        Self::from_stream(context.new_stream().map_err(doing("creating a stream"))?)
    }

    /// The same for the context of a stream, on which the host-slice operations will work. No other stream is made.
    ///
    /// A stream that other software made becomes one of cudarc's by `CudaContext::wrap_borrowed_stream`, which neither owns nor
    /// destroys it. PyTorch and whatever uses CUDA's runtime work in a GPU's primary context, which is [`primary_context`](super::primary_context)'s.
    ///
    /// ```no_run
    /// use microscale::Result;
    /// use microscale::gpu::{Gpu, primary_context};
    ///
    /// /// # Safety
    /// /// `stream` is a stream of GPU 0's primary context, such as PyTorch's `torch.cuda.current_stream().cuda_stream`, and outlives
    /// /// what is returned.
    /// unsafe fn on_their_stream(stream: usize) -> Result<Gpu> {
    ///     // SAFETY: the caller's promise.
    ///     Gpu::from_stream(unsafe { primary_context(0)?.wrap_borrowed_stream(stream as _) })
    /// }
    /// ```
    ///
    /// # Errors
    /// As of [`Self::new`].
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self> {
        let context = stream.context().clone();
        let info = GpuInfo::of(&context)?;
        let kernels = Arc::new(Kernels::new(&context, &info)?);
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, kernels, staging })
    }

    /// The same GPU with another stream, for another thread.
    pub(crate) fn worker(&self) -> Result<Self> {
        let stream = self.context.new_stream().map_err(doing("creating a stream"))?;
        let (info, context, kernels) = (self.info.clone(), self.context.clone(), self.kernels.clone());
        let staging = Arc::new(Staging::new(&context));
        Ok(Self { info, context, stream, kernels, staging })
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

    /// Makes kernels ready one after the other and returns the time that each took: inflating its PTX, and
    /// the driver's compiling or finding it in its cache. A kernel that is ready already takes no time.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the driver refuses.
    #[doc(hidden)]
    pub fn load_times(&self) -> Result<Vec<(KernelId, Duration)>> {
        let timed = |id| {
            let start = Instant::now();
            self.kernels.ready(id)?;
            Ok((id, start.elapsed()))
        };
        let of_target = |id: &KernelId| id.family().is_for(self.kernels.target());
        KernelId::all().filter(of_target).map(timed).collect()
    }
}
