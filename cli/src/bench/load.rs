//! What the first use of a kernel costs: inflating its PTX, and what the driver takes to compile it or to find it in its cache.

use std::time::{Duration, Instant};

use microscale::gpu::{Family, Gpu, KernelId};
use microscale::{Device, Error, Result, Words};

use super::op::Op;

/// How long a GPU takes to make its kernels ready.
pub(crate) struct Loads {
    /// Each by itself, one after the other.
    pub(crate) each: Vec<(KernelId, Duration)>,
    /// All of them, by as many threads as there are.
    pub(crate) at_once: Duration,
}

/// Measures the device, or the first of several.
///
/// # Errors
/// [`Error::NoGpu`] on a CPU, and [`Error::Gpu`].
pub(crate) fn load(device: &Device) -> Result<Loads> {
    let Device::Gpus(gpus) = device else {
        return Err(Error::NoGpu(format!("{} is measured on GPUs only", Op::Load.word())));
    };
    let ordinal = gpus.first().info().ordinal;
    // The device may have some ready already.
    let each = Gpu::new(ordinal)?.load_times()?;
    let fresh = Gpu::new(ordinal)?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let families = Family::ALL.map(|family| {
            scope.spawn({
                let fresh = &fresh;
                move || fresh.preload(family, None)
            })
        });
        families.into_iter().try_for_each(|family| match family.join() {
            Ok(loaded) => loaded,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(Loads { each, at_once: start.elapsed() })
}
