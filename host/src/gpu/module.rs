//! The embedded PTX, and the kernels in it.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as MOST_SHARED,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
};
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::Ptx;
use microscale_kernels_abi::{Kernel, kernels};

use super::{GpuInfo, doing};
use crate::error::{Error, Result};

/// The PTX of every target in `microscale_kernels_abi::TARGETS`, by name.
const EMBEDDED: [(&str, &str); 4] = [
    ("sm_80", include_str!("../../ptx/microscale_sm_80.ptx")),
    ("sm_90", include_str!("../../ptx/microscale_sm_90.ptx")),
    ("sm_100f", include_str!("../../ptx/microscale_sm_100f.ptx")),
    ("sm_120f", include_str!("../../ptx/microscale_sm_120f.ptx")),
];

/// The loaded kernels of one GPU, as they are launched there.
pub(super) struct Module {
    kernels: HashMap<&'static str, (Kernel, CudaFunction)>,
    /// Thread blocks that the GPU has room for at once, of kernels that are launched by it.
    at_once: HashMap<&'static str, u32>,
}

impl Module {
    /// Loads the PTX that the GPU gets; the driver compiles it, or finds it in its cache.
    pub(super) fn load(context: &Arc<CudaContext>, info: &GpuInfo) -> Result<Self> {
        let target = info.target.ok_or_else(|| {
            let (major, minor) = info.compute_capability;
            Error::NoGpu(format!(
                "{} has compute capability {major}.{minor}; 8.0 is the oldest supported",
                info.name
            ))
        })?;
        let ptx = EMBEDDED.iter().find(|(name, _)| *name == target).map(|(_, ptx)| *ptx);
        let ptx = ptx.ok_or_else(|| Error::NoGpu(format!("the PTX for {target} is not embedded")))?;
        let module = context.load_module(Ptx::from_src(ptx)).map_err(doing("loading the embedded PTX"))?;
        let of_gpu = |attribute| {
            let found = context.attribute(attribute).map_err(doing("asking what a multiprocessor has"))?;
            Ok(found.max(0) as u32)
        };
        let most_shared = of_gpu(MOST_SHARED)?;
        let multiprocessors = of_gpu(MULTIPROCESSORS)?;
        let mut at_once = HashMap::new();
        let kernels = kernels().iter().map(|kernel| {
            let kernel = kernel.within(most_shared);
            let function =
                module.load_function(kernel.name).map_err(doing("finding a kernel in the embedded PTX"))?;
            // Some have more than a launch gets without it.
            function
                .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared as i32)
                .map_err(doing("asking for shared memory"))?;
            if kernel.elements == 0 {
                let each = function
                    .occupancy_max_active_blocks_per_multiprocessor(
                        kernel.threads,
                        kernel.shared as usize,
                        None,
                    )
                    .map_err(doing("asking how many thread blocks there can be"))?;
                at_once.insert(kernel.name, (each * multiprocessors).max(1));
            }
            Ok((kernel.name, (kernel, function)))
        });
        Ok(Self { kernels: kernels.collect::<Result<_>>()?, at_once })
    }

    /// A kernel by name.
    pub(super) fn kernel(&self, name: &str) -> Result<&(Kernel, CudaFunction)> {
        self.kernels.get(name).ok_or_else(|| Error::Gpu {
            doing: "choosing a kernel",
            message: format!("there is no kernel {name}; please report this"),
        })
    }

    /// Thread blocks that the GPU has room for at once, of a kernel whose grid says how many there are.
    pub(super) fn at_once(&self, kernel: &Kernel) -> u32 {
        self.at_once.get(kernel.name).copied().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use microscale_kernels_abi::TARGETS;

    use super::*;

    #[test]
    fn every_target_is_embedded_with_every_kernel() {
        assert_eq!(EMBEDDED.map(|(name, _)| name), TARGETS.map(|target| target.name));
        for (target, ptx) in EMBEDDED {
            assert!(ptx.contains(&format!(".target {target}\n")), "{target}");
            for kernel in kernels() {
                assert!(ptx.contains(&format!(".entry {}(", kernel.name)), "{} in {target}", kernel.name);
            }
        }
    }
}
