//! Several GPUs as one device for checkpoint operations, with workers on each.

use std::sync::Arc;

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::gpu::handle::Gpu;
use crate::gpu::memory::pool::KeptPool;
use crate::gpu::runtime::device::device_count;

/// One GPU or several, ready to work.
#[derive(Debug)]
pub struct Gpus(Vec<Gpu>);

/// Workers of a checkpoint operation per GPU.
///
/// Each worker handles one tensor at a time: it copies the tensor to the GPU, waits for the
/// kernels, copies the result back and writes it. This number of workers keeps the copies busy;
/// more of them wait for the memory of the host.
const WORKERS: usize = 12;

/// The GPU memory that a worker may need, in multiples of its largest tensor's bytes.
///
/// The values and the layers that they are fused with take at most three, the result one.
const FOOTPRINT: u64 = 4;

impl Gpus {
    /// Opens every usable GPU of this machine.
    ///
    /// # Errors
    /// [`Error::NoGpu`] if there is none, and [`Error::Gpu`] if one of them fails.
    pub fn all() -> Result<Self> {
        let (mut gpus, mut too_old) = (Vec::new(), None);
        // Creating a context takes a large part of a second.
        let opened: Vec<_> = (0..device_count()?).into_par_iter().map(Gpu::new).collect();
        for gpu in opened {
            match gpu {
                Ok(gpu) => gpus.push(gpu),
                Err(error @ Error::NoGpu(_)) => too_old = Some(error),
                Err(error) => return Err(error),
            }
        }
        match too_old {
            Some(error) if gpus.is_empty() => Err(error),
            _ => Ok(Self(gpus)),
        }
    }

    /// The first GPU.
    pub fn first(&self) -> &Gpu {
        &self.0[0]
    }

    /// All GPUs, at least one.
    pub fn iter(&self) -> impl Iterator<Item = &Gpu> {
        self.0.iter()
    }

    /// Workers for tensors of at most `largest` bytes: streams, alternating between the GPUs.
    pub(crate) fn workers(&self, largest: usize) -> Result<Vec<Gpu>> {
        let kept: Vec<_> = self.0.iter().map(|gpu| KeptPool::new(gpu.context()).map(Arc::new)).collect();
        let footprint = FOOTPRINT * largest.max(1) as u64;
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            for (gpu, kept) in self.0.iter().zip(&kept) {
                if worker == 0 || (worker as u64 + 1) * footprint <= gpu.info().memory_bytes / 10 * 9 {
                    workers.push(gpu.worker(kept.clone())?);
                }
            }
        }
        Ok(workers)
    }
}

impl From<Gpu> for Gpus {
    fn from(gpu: Gpu) -> Self {
        Self(vec![gpu])
    }
}
