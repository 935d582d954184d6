//! The plan of a product: its key and its kernels.

use microscale_kernels_abi::experts::{Plan as PlanHead, PlanGrid, Sorted};
use microscale_kernels_abi::gemm::gemv::TokenTiles;
use microscale_kernels_abi::gemm::packing;
use microscale_kernels_abi::{Experts, GemmConfig, GlobalSlot, KernelId};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::fp8::Fp8Options;
use crate::gpu::plan::choose::is_packable;
use crate::gpu::plan::product::{ExpertTokenTiles, ProductPlan};
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// A kind of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gpu) enum Kind {
    /// Values.
    Values {
        /// Only kernels that need no workspace.
        gemv_only: bool,
    },
    /// The format of the weights.
    Fp4 {
        /// A global scale per token, instead of one for all or per expert.
        per_token: bool,
        /// Sums may keep 13 fraction bits only.
        fast_accumulation: bool,
    },
    /// FP8.
    Fp8(Fp8Options),
}

/// A product to plan. Products with the same key have the same plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::gpu) struct PlanKey {
    pub(in crate::gpu) kind: Kind,
    /// The shape of the weights, of each expert if there are experts.
    pub(in crate::gpu) weights: QuantizedShape,
    /// The number of experts; `None` for one matrix of weights.
    pub(in crate::gpu) experts: Option<usize>,
    /// Tokens, or pairs of a token and an expert.
    pub(in crate::gpu) rows: usize,
    /// The dtype of values, or of the bias of quantized activations.
    pub(in crate::gpu) dtype: Dtype,
    /// Values start on 16 bytes.
    pub(in crate::gpu) aligned: bool,
}

impl PlanKey {
    /// Returns whether there is nothing to multiply.
    pub(in crate::gpu) fn is_empty(&self) -> bool {
        self.weights.rows == 0 || self.rows == 0 || self.experts == Some(0)
    }

    /// Returns whether kernels of the GEMM take the weights. Each expert's scales must start on 4
    /// bytes.
    pub(in crate::gpu) fn is_packable(&self) -> bool {
        let words = (self.weights.rows * self.weights.blocks_per_row()).is_multiple_of(4);
        is_packable(self.weights) && (words || self.experts.is_none())
    }

    /// The product by a configuration, of `rows_each` rows of activations per row, and for experts
    /// how rows are cut into its token tiles.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for a configuration that does not take the weights, and the errors of
    /// [`ProductPlan::new`].
    pub(in crate::gpu) fn product(
        &self,
        kernels: &Kernels,
        config: GemmConfig,
        rows_each: usize,
    ) -> Result<(ProductPlan, Option<PlanGrid>)> {
        let Self { weights, experts, rows, aligned, .. } = *self;
        if experts.is_none() {
            let rows = rows.saturating_mul(rows_each);
            return Ok((ProductPlan::new(kernels, config, weights, rows, aligned, None)?, None));
        }
        let takes = (config.mainloop.is_gemv() || self.is_packable()) && config.takes_experts();
        let found = if takes { of_experts(kernels, config, self, rows_each)? } else { None };
        let (product, grid) = found.ok_or(Error::NoKernel { format: weights.format })?;
        Ok((product, Some(grid)))
    }
}

/// The kernels that make the operand of a product from its activations, and their memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) enum Before {
    /// Values in 16 bits are the operand.
    Nothing,
    /// Values in f32 are split into parts in bf16, and the products of the parts are added. Bytes
    /// of the parts and of their products, both multiples of 16.
    Split([u64; 2]),
    /// FP4 activations.
    Fp4 {
        /// The kernel that decodes activations to rows of 16 bits, unless the product's packing
        /// kernel reads FP4.
        decode: Option<KernelId>,
        /// Bytes of the factors of the sums, of decoded activations, and of sums that are
        /// multiplied by factors per token, all multiples of 16.
        bytes: [u64; 3],
    },
    /// FP8 activations, which are given, quantized, or decoded from MXFP4.
    Fp8 {
        /// Bytes of quantized codes and of their scales, which only experts' rows have, and of the
        /// bases of rows of weights, all multiples of 16.
        bytes: [u64; 3],
    },
}

impl Before {
    /// Bytes of memory.
    pub(in crate::gpu) fn bytes(&self) -> u64 {
        let bytes: &[u64] = match self {
            Self::Nothing => &[],
            Self::Split(bytes) => bytes,
            Self::Fp4 { bytes, .. } | Self::Fp8 { bytes, .. } => bytes,
        };
        bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Returns whether sums are multiplied by factors per token, by a kernel after the product.
    pub(in crate::gpu) fn is_per_token(&self) -> bool {
        matches!(self, Self::Fp4 { bytes: [_, _, sums], .. } if *sums > 0)
    }
}

/// The kernels of a product, their launch parameters and their workspace.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Planned {
    pub(in crate::gpu) product: ProductPlan,
    /// How experts' rows are cut into token tiles.
    pub(in crate::gpu) grid: Option<PlanGrid>,
    pub(in crate::gpu) before: Before,
}

impl Planned {
    /// Bytes of the plan that is made on the GPU for experts' rows.
    pub(in crate::gpu) fn plan_bytes(&self) -> u64 {
        self.grid.map_or(0, gpu_plan_bytes)
    }

    /// Bytes of workspace, semaphores not counted: the plan that is made on the GPU, the memory of
    /// the kernels before the product, the product's own. Kernels load a word of an expert's slot
    /// also where experts have no global scales, and ignore it: the workspace is at least as long
    /// as slots are.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        let before = self.plan_bytes().saturating_add(self.before.bytes());
        let bytes = before.saturating_add(self.product.workspace_bytes());
        bytes.max(self.grid.map_or(0, |grid| slot_bytes(grid.experts as usize)))
    }

    /// The kernels in the order of their launches, but for the one that quantizes values to FP8.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        let (first, last) = match self.before {
            Before::Nothing | Before::Fp8 { .. } => (None, None),
            Before::Split(_) => (Some(packing::SPLIT), Some(packing::MERGE)),
            Before::Fp4 { decode, .. } => (decode, self.before.is_per_token().then_some(packing::MERGE)),
        };
        let plan = self.grid.map(|_| Experts::Plan.id());
        let [pack, multiply] = self.product.kernels();
        [plan, first, pack, multiply, last].into_iter().flatten()
    }
}

/// Bytes of the slots of `experts` experts' global scales.
pub(in crate::gpu) fn slot_bytes(experts: usize) -> u64 {
    experts as u64 * size_of::<GlobalSlot>() as u64
}

/// The product of a configuration for experts' rows, `rows_each` per pair, and how rows are cut
/// into its token tiles; `None` for more token tiles than are counted.
///
/// # Errors
/// The errors of [`ProductPlan::new`].
fn of_experts(
    kernels: &Kernels,
    config: GemmConfig,
    key: &PlanKey,
    rows_each: usize,
) -> Result<Option<(ProductPlan, PlanGrid)>> {
    let PlanKey { weights, rows: pairs, aligned, .. } = *key;
    let experts = key.experts.unwrap_or(1);
    let sorted = Sorted { pairs: pairs as u32, top_k: 1 };
    let tile_rows = expert_tile_rows(config, rows_each * pairs.div_ceil(experts.min(pairs)));
    let Some(mut grid) = PlanGrid::new(experts as u64, sorted, rows_each as u32, tile_rows) else {
        return Ok(None);
    };
    let tiles = ExpertTokenTiles { most: u64::from(grid.most_tiles), rows: tile_rows };
    let product = ProductPlan::new(kernels, config, weights, pairs * rows_each, aligned, Some(tiles))?;
    if let Some([row_tiles, k_iterations]) = product.row_tiles_and_k_iterations() {
        (grid.row_tiles, grid.k_iterations) = (row_tiles, k_iterations);
        grid.at_once = kernels.sm_count() / config.row_sharers();
    }
    Ok(Some((product, grid)))
}

/// Bytes of the plan that is made on the GPU and of the product's workspace that serve any number
/// of pairs up to the key's, whichever of these configurations they get; 0 if the GPU has none of
/// them.
pub(in crate::gpu) fn most_experts_bytes(
    kernels: &Kernels,
    configs: impl Iterator<Item = GemmConfig>,
    key: &PlanKey,
) -> u64 {
    let of_config = |config| {
        // A GPU may have no kernel, or too little shared memory for a configuration.
        let (product, grid) = of_experts(kernels, config, key, 1).ok().flatten()?;
        Some(gpu_plan_bytes(grid).saturating_add(product.workspace_bytes()))
    };
    configs.filter(|config| config.takes_experts()).filter_map(of_config).max().unwrap_or(0)
}

/// Bytes of the plan that is made on the GPU, a multiple of 256.
pub(in crate::gpu) fn gpu_plan_bytes(grid: PlanGrid) -> u64 {
    PlanHead::bytes(u64::from(grid.most_tiles)).next_multiple_of(256)
}

/// The rows of a token tile of experts' rows. For the GEMV it is the expert's number of rows, up to
/// `tile_n`.
fn expert_tile_rows(config: GemmConfig, rows_per_expert: usize) -> u32 {
    if !config.mainloop.is_gemv() {
        return config.tile_n;
    }
    let most = if config.tile_n == 1 { 1 } else { 8 };
    1 << TokenTiles::of(rows_per_expert.max(1) as u64, most).bits
}
