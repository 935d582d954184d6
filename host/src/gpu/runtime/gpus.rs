//! Several GPUs as one device for checkpoints: their workers, by turns.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::gpu::handle::Gpu;
use crate::gpu::runtime::device::device_count;

/// One GPU or several, ready to work.
#[derive(Debug)]
pub struct Gpus(Vec<Gpu>);

/// Workers of a checkpoint operation on each GPU. One works on a tensor at a time: it copies it over, waits
/// for the kernels, copies back and writes. So many keep the copies busy.
const WORKERS: usize = 12;

/// The most that a worker needs of a GPU's memory, in bytes of its largest tensor: the values, with those of
/// the layers that it is fused with (three times, at most), and the result.
const FOOTPRINT: u64 = 4;

impl Gpus {
    /// Every GPU of this machine that can be used.
    ///
    /// # Errors
    /// [`Error::NoGpu`] if there is none, and [`Error::Gpu`] if one of them fails.
    pub fn all() -> Result<Self> {
        let (mut gpus, mut too_old) = (Vec::new(), None);
        // A context takes a good part of a second.
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

    /// The first one.
    pub fn first(&self) -> &Gpu {
        &self.0[0]
    }

    /// All of them; at least one.
    pub fn iter(&self) -> impl Iterator<Item = &Gpu> {
        self.0.iter()
    }

    /// Workers for tensors of at most so many bytes: several streams of each GPU, by turns.
    pub(crate) fn workers(&self, largest: usize) -> Result<Vec<Gpu>> {
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            for gpu in &self.0 {
                let footprint = FOOTPRINT * largest.max(1) as u64;
                if worker == 0 || (worker as u64 + 1) * footprint <= gpu.info().memory_bytes / 10 * 9 {
                    workers.push(gpu.worker()?);
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
