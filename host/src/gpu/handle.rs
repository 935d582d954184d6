//! [`Gpu`]: one GPU, ready to work, with its context, stream and kernels.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream};
use microscale_kernels_abi::KernelId;

use super::device::{self, GpuInfo};
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
        let context = device::open(ordinal)?;
        let info = GpuInfo::of(&context)?;
        let stream = context.new_stream().map_err(doing("creating a stream"))?;
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
