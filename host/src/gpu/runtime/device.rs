//! Finding and opening GPUs, without a panic where there is no driver.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use microscale_kernels_abi::target_for;

use crate::error::{Error, Result};
use crate::gpu::runtime::driver::doing;

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuInfo {
    /// Its number, as in `cuda:N`.
    pub ordinal: usize,
    /// Its name, as the driver gives it.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// The embedded PTX for this GPU, or `None` if the GPU is too old for every target.
    pub target: Option<&'static str>,
}

impl GpuInfo {
    pub(in crate::gpu) fn of(context: &CudaContext) -> Result<Self> {
        let (major, minor) = context.compute_capability().map_err(doing("asking its compute capability"))?;
        let compute_capability = (major as u32, minor as u32);
        Ok(Self {
            ordinal: context.ordinal(),
            name: context.name().map_err(doing("asking its name"))?,
            compute_capability,
            memory_bytes: context.total_mem().map_err(doing("asking its memory"))? as u64,
            target: target_for(compute_capability).map(|target| target.name),
        })
    }
}

/// All GPUs of this machine.
///
/// # Errors
/// [`Error::NoGpu`] if there is no driver or no GPU, with the reason; [`Error::Gpu`] if the driver
/// fails.
pub fn devices() -> Result<Vec<GpuInfo>> {
    (0..device_count()?).map(|ordinal| GpuInfo::of(&*primary_context(ordinal)?)).collect()
}

/// The primary context of GPU number `ordinal`.
///
/// PyTorch, programs that use CUDA's runtime, and [`Gpu::new`](crate::gpu::Gpu::new) work in this
/// context. It becomes current on the calling thread. Unlike `CudaContext::new` this does not panic
/// without a driver.
///
/// # Errors
/// [`Error::NoGpu`] without a driver or without such a GPU; [`Error::Gpu`] if the driver fails.
pub fn primary_context(ordinal: usize) -> Result<Arc<CudaContext>> {
    let count = device_count()?;
    if ordinal >= count {
        let all = if count == 1 { "cuda:0 is the only one".into() } else { format!("there are {count}") };
        return Err(Error::NoGpu(format!("there is no cuda:{ordinal}; {all}")));
    }
    CudaContext::new(ordinal).map_err(doing("creating a context"))
}

/// Returns whether the driver's library can be loaded. cudarc itself panics without it.
fn driver_is_installed() -> bool {
    const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    // SAFETY: the driver's library can be loaded at any time. cudarc loads it next, by these names
    // among others.
    NAMES.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

/// The number of GPUs of this machine, at least 1. Creates no context.
///
/// # Errors
/// As for [`devices`].
pub fn device_count() -> Result<usize> {
    if !driver_is_installed() {
        return Err(Error::NoGpu(
            "the NVIDIA driver's library (libcuda.so.1, nvcuda.dll) is not installed".into(),
        ));
    }
    match CudaContext::device_count() {
        Ok(count) if count > 0 => Ok(count as usize),
        Ok(_) => Err(Error::NoGpu("the NVIDIA driver is installed and sees no GPU".into())),
        Err(error) => {
            Err(Error::NoGpu(format!("the NVIDIA driver is installed and does not start: {error:?}")))
        }
    }
}
