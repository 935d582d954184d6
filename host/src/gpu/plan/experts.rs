//! The kernels of a product with experts' weights.

use microscale_kernels_abi::experts::{Plan as PlanHead, PlanGrid, Sorted};
use microscale_kernels_abi::gemm::packing;
use microscale_kernels_abi::{Experts, GemmConfig, KernelId};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gpu::plan::choose::{choose_for_experts, otherwise, takes};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::linear::{expert_tile_rows, multiplied, parts_bytes};
use crate::gpu::plan::product::{ExpertTokenTiles, ProductPlan};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Products with experts' weights that have the same plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gpu) struct ExpertsKey {
    pub(in crate::gpu) experts: usize,
    pub(in crate::gpu) shape: QuantizedShape,
    pub(in crate::gpu) pairs: usize,
    pub(in crate::gpu) activations: Dtype,
    /// Activations start on 16 bytes.
    pub(in crate::gpu) aligned: bool,
    /// Each expert's scales start on 4 bytes, so that kernels that pack activations take the
    /// weights.
    pub(in crate::gpu) packable: bool,
}

/// The kernels of a product with experts' weights.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct PlannedExperts {
    /// The product, and how rows are cut into its token tiles; `None` if there is nothing to
    /// multiply.
    pub(in crate::gpu) product: Option<(ProductPlan, PlanGrid)>,
    /// Bytes of parts of f32 activations and of their products; `None` for f16 and bf16.
    pub(in crate::gpu) parts: Option<[u64; 2]>,
}

impl PlannedExperts {
    /// Plans a product, with a given configuration or the one that should take the least time.
    ///
    /// # Errors
    /// The errors of [`ProductPlan::new`].
    pub(in crate::gpu) fn new(kernels: &Kernels, key: ExpertsKey, given: Option<GemmConfig>) -> Result<Self> {
        let ExpertsKey { experts, shape, pairs, activations, aligned, packable } = key;
        let (rows_each, dtype) = multiplied(activations);
        let parts = (rows_each > 1).then(|| parts_bytes(pairs, shape));
        if shape.rows == 0 || pairs == 0 || experts == 0 {
            return Ok(Self { product: None, parts });
        }
        let aligned = aligned || rows_each > 1;
        let config = given.unwrap_or_else(|| {
            let request =
                Request { weights: shape, tokens: 0, activations: dtype, aligned, gemv_only: false };
            let (times, facts) = (Estimator::of_gpu(kernels.gpu_name()), kernels.facts());
            choose_for_experts(times, facts, request, [experts, pairs, rows_each], packable)
        });
        // The schedule that is made on the GPU has no clusters, and activations have 16 bits.
        let refused = config.cluster > 1 || !config.mainloop.takes_16_bits();
        if !config.mainloop.is_gemv() && !packable || refused {
            return Err(Error::NoKernel { format: shape.format });
        }
        let rows = pairs * rows_each;
        // Kernels that copy ahead find rows of activations by offsets of 32 bits.
        let far = (rows as u64).saturating_mul(shape.cols as u64 * 2) >= 1 << 32;
        let fallback = config.mainloop.is_gemv() && (far || !takes(config, shape, aligned));
        let config = if fallback { otherwise(shape, aligned) } else { config };
        let config = GemmConfig { weights: shape.format, activations: dtype, ..config };
        Ok(Self { product: of_experts(kernels, config, key, rows_each, aligned)?, parts })
    }

    /// The kernels in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        let product = self.product.map(|(product, _)| product.kernels()).unwrap_or_default();
        let around = |kernel| (self.parts.is_some() && self.product.is_some()).then_some(kernel);
        let plan = self.product.map(|_| Experts::Plan.id());
        let [pack, multiply] = product;
        [plan, around(packing::SPLIT), pack, multiply, around(packing::MERGE)].into_iter().flatten()
    }

    /// Bytes of the plan that is made on the GPU.
    pub(in crate::gpu) fn plan_bytes(&self) -> u64 {
        self.product.map_or(0, |(_, grid)| gpu_plan_bytes(grid))
    }

    /// Bytes of workspace, semaphores not counted: the plan, parts and their products, the
    /// product's own.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        let parts = self.parts.map_or(0, |[parts, sums]| parts.saturating_add(sums));
        let product = self.product.map_or(0, |(product, _)| product.workspace_bytes());
        self.plan_bytes().saturating_add(parts).saturating_add(product)
    }
}

/// The product of a configuration for experts' rows, `rows_each` per pair, and how rows are cut
/// into its token tiles; `None` for more token tiles than are counted.
///
/// # Errors
/// The errors of [`ProductPlan::new`].
pub(in crate::gpu) fn of_experts(
    kernels: &Kernels,
    config: GemmConfig,
    key: ExpertsKey,
    rows_each: usize,
    aligned: bool,
) -> Result<Option<(ProductPlan, PlanGrid)>> {
    let ExpertsKey { experts, shape, pairs, .. } = key;
    let sorted = Sorted { pairs: pairs as u32, top_k: 1 };
    let tile_rows = expert_tile_rows(config, rows_each * pairs.div_ceil(experts.min(pairs)));
    let Some(mut grid) = PlanGrid::new(experts as u64, sorted, rows_each as u32, tile_rows) else {
        return Ok(None);
    };
    let tiles = ExpertTokenTiles { most: u64::from(grid.most_tiles), rows: tile_rows };
    let product = ProductPlan::new(kernels, config, shape, pairs * rows_each, aligned, Some(tiles))?;
    if let Some([row_tiles, k_iterations]) = product.row_tiles_and_k_iterations() {
        (grid.row_tiles, grid.k_iterations, grid.at_once) = (row_tiles, k_iterations, kernels.sm_count());
    }
    Ok(Some((product, grid)))
}

/// Bytes of the plan that is made on the GPU and of the product's workspace that serve any number
/// of pairs up to the key's, whichever of these configurations they get; 0 if the GPU has none of
/// them.
pub(in crate::gpu) fn most_experts_bytes(
    kernels: &Kernels,
    configs: impl Iterator<Item = GemmConfig>,
    key: ExpertsKey,
) -> u64 {
    let of_config = |config| {
        // A GPU may have no kernel, or too little shared memory for a configuration.
        let (product, grid) = of_experts(kernels, config, key, 1, true).ok().flatten()?;
        Some(gpu_plan_bytes(grid).saturating_add(product.workspace_bytes()))
    };
    // The schedule that is made on the GPU has no clusters.
    configs.filter(|config| config.cluster == 1).filter_map(of_config).max().unwrap_or(0)
}

/// Bytes of the plan that is made on the GPU, a multiple of 256.
pub(in crate::gpu) fn gpu_plan_bytes(grid: PlanGrid) -> u64 {
    PlanHead::bytes(u64::from(grid.most_tiles)).next_multiple_of(256)
}
