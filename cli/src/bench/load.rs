//! The cost of a kernel's first use: inflating its PTX, and compiling by the driver or finding in its cache.

use std::time::Duration;

use microscale::gpu::{Gpu, KernelId};
use microscale::{Device, Error, Result, Words};

use super::op::Op;

/// Measures the device, or the first of several: how long each kernel takes, one after the other.
///
/// # Errors
/// [`Error::NoGpu`] on a CPU, and [`Error::Gpu`].
pub(crate) fn load(device: &Device) -> Result<Vec<(KernelId, Duration)>> {
    let Device::Gpus(gpus) = device else {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", Op::Load.word())));
    };
    // The device may have some ready already.
    Gpu::new(gpus.first().info().ordinal)?.load_times()
}
