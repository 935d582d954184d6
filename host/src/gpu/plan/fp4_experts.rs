//! The kernels of a product of experts' FP4 weights and FP4 activations.

use microscale_kernels_abi::experts::PlanGrid;
use microscale_kernels_abi::gemm::fp4;
use microscale_kernels_abi::{Experts, GemmConfig, GlobalSlot, KernelId};

use crate::error::{Error, Result};
use crate::gpu::plan::choose::choose_for_mean_rows;
use crate::gpu::plan::experts::{ExpertsKey, PlannedExperts, gpu_plan_bytes, of_experts};
use crate::gpu::plan::fp4::{Fp4Plan, decoded_bytes, native_dtype};
use crate::gpu::runtime::kernels::Kernels;

/// The kernels of a product with experts' weights.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp4ExpertsPlan {
    /// The product, with room for a decoded row of activations per pair.
    pub(in crate::gpu) fp4: Fp4Plan,
    /// How rows are cut into token tiles.
    pub(in crate::gpu) grid: PlanGrid,
}

impl Fp4ExpertsPlan {
    /// Plans a product of at least one pair and expert, and weights of at least one row, which are
    /// whole blocks, in the dtype of a bias, the key's of activations, if it can be multiplied in.
    /// `given` is a configuration for tests and measurements.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for a given configuration that does not take the weights, and the errors
    /// of [`ProductPlan::new`](crate::gpu::plan::product::ProductPlan::new).
    pub(in crate::gpu) fn new(kernels: &Kernels, key: ExpertsKey, given: Option<GemmConfig>) -> Result<Self> {
        let ExpertsKey { experts, shape, pairs, activations: bias, packable, .. } = key;
        let (format, dtype) = (shape.format, native_dtype(bias));
        let no_kernel = || Error::NoKernel { format };
        let (decode, decoded) = fp4::decode(format, bias).ok_or_else(no_kernel)?;
        let native = match given {
            Some(config) => {
                let config = GemmConfig { weights: format, activations: dtype, ..config };
                Some(config).filter(|config| config.mainloop.takes_fp4())
            }
            None => {
                let configs = GemmConfig::for_fp4(format, dtype).filter(|_| packable);
                choose_for_mean_rows(kernels.facts(), configs, [experts, pairs])
            }
        };
        if let Some(config) = native {
            let usable = packable && config.cluster == 1;
            let product = if usable { of_experts(kernels, config, key, 1, true)? } else { None };
            let (product, grid) = product.ok_or_else(no_kernel)?;
            return Ok(Self { fp4: Fp4Plan { product, decode: None, decoded_bytes: 0 }, grid });
        }
        let key = ExpertsKey { activations: decoded, ..key };
        let (product, grid) = PlannedExperts::new(kernels, key, given)?.product.ok_or_else(no_kernel)?;
        // At most a row per pair.
        let decoded_bytes = decoded_bytes(pairs, shape);
        Ok(Self { fp4: Fp4Plan { product, decode: Some(decode), decoded_bytes }, grid })
    }

    /// Bytes of the plan that is made on the GPU.
    pub(in crate::gpu) fn plan_bytes(&self) -> u64 {
        gpu_plan_bytes(self.grid)
    }

    /// Bytes of the factors of the sums.
    pub(in crate::gpu) fn factor_bytes(&self) -> u64 {
        factor_bytes(self.grid.experts as usize)
    }

    /// Bytes of workspace, semaphores not counted: the plan that is made on the GPU, the factors,
    /// decoded activations, and the product's workspace.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        (self.plan_bytes() + self.factor_bytes()).saturating_add(self.fp4.memory_bytes())
    }

    /// The kernels in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        [Experts::Plan.id()].into_iter().chain(self.fp4.kernels())
    }
}

/// Bytes of the factors of the sums, one per expert, a multiple of 16.
pub(in crate::gpu) fn factor_bytes(experts: usize) -> u64 {
    (experts as u64 * size_of::<GlobalSlot>() as u64).next_multiple_of(16)
}
