//! The cost of a kernel's first use: decompression of its PTX, and the driver's compilation or
//! cache.

use std::time::Duration;

use microscale::gpu::{Gpu, KernelId};
use microscale::{Device, Error, Result, Words};

use super::op::Op;

/// Measures the first use of each kernel, one after another, on the first device.
///
/// # Errors
/// [`Error::NoGpu`] on a CPU, and [`Error::Gpu`].
pub(crate) fn load(device: &Device) -> Result<Vec<(KernelId, Duration)>> {
    let Device::Gpus(gpus) = device else {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", Op::Load.word())));
    };
    // Some kernels may be ready on the device already.
    Gpu::new(gpus.first().info().ordinal)?.load_times()
}
