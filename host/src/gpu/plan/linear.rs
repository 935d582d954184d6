//! The kernels of a product of weights and activations: one configuration's, and those around it
//! for activations in f32.

use microscale_kernels_abi::epilogue::PARTS;
use microscale_kernels_abi::gemm::gemv::TokenTiles;
use microscale_kernels_abi::gemm::packing;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gpu::plan::choose::{GEMV_TOKENS, choose, is_packable};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::product::{ProductPlan, most_product_bytes};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Parts of an activation in f32, each a row in bf16.
pub(in crate::gpu) const PART_ROWS: usize = PARTS as usize;

/// The kernels of a product. `None` as the product where weights or activations have no rows.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct LinearPlan {
    pub(in crate::gpu) product: Option<ProductPlan>,
    /// Bytes of the parts of f32 activations and of their products, both multiples of 16; `None`
    /// for f16 and bf16.
    pub(in crate::gpu) parts: Option<[u64; 2]>,
}

/// Bytes of the parts of `tokens` rows of f32 activations, and of their products, both multiples of
/// 16.
pub(in crate::gpu) fn parts_bytes(tokens: usize, weights: QuantizedShape) -> [u64; 2] {
    let rows = tokens.saturating_mul(PART_ROWS) as u64;
    [(weights.cols, size_of::<u16>()), (weights.rows, size_of::<f32>())]
        .map(|(each, bytes)| rows.saturating_mul((each * bytes) as u64).next_multiple_of(16))
}

/// The rows of activations of a dtype that are multiplied per row, and their dtype.
pub(in crate::gpu) fn multiplied(activations: Dtype) -> (usize, Dtype) {
    if activations == Dtype::F32 { (PART_ROWS, Dtype::Bf16) } else { (1, activations) }
}

impl LinearPlan {
    /// Plans a product, with a given configuration or the one that should take the least time.
    ///
    /// # Errors
    /// The errors of [`ProductPlan::new`].
    pub(in crate::gpu) fn new(
        kernels: &Kernels,
        request: Request,
        given: Option<GemmConfig>,
    ) -> Result<Self> {
        let Request { weights, tokens, activations, aligned, .. } = request;
        let (rows_each, dtype) = multiplied(activations);
        let parts = (rows_each > 1).then(|| parts_bytes(tokens, weights));
        if weights.rows == 0 || tokens == 0 {
            return Ok(Self { product: None, parts });
        }
        let tokens = tokens.saturating_mul(rows_each);
        // Parts start on 16 bytes.
        let aligned = aligned || rows_each > 1;
        let request = Request { tokens, activations: dtype, aligned, ..request };
        let config = match given {
            Some(config) => GemmConfig { weights: weights.format, activations: dtype, ..config },
            None => choose(Estimator::of_gpu(kernels.gpu_name()), kernels.facts(), request),
        };
        // A given configuration may be for quantized activations, which have 16 bits here.
        if !config.mainloop.takes_16_bits() {
            return Err(Error::NoKernel { format: weights.format });
        }
        let product = ProductPlan::new(kernels, config, weights, tokens, aligned, None)?;
        Ok(Self { product: Some(product), parts })
    }

    /// Bytes of workspace, semaphores not counted.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        let parts = self.parts.map_or(0, |[parts, sums]| parts.saturating_add(sums));
        self.product.map_or(0, |product| product.workspace_bytes().saturating_add(parts))
    }

    /// The kernels in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        let product = self.product.map_or([None; 2], |product| product.kernels());
        let has_parts = self.parts.is_some() && self.product.is_some();
        let around = |kernel| has_parts.then_some(kernel);
        let [pack, multiply] = product;
        [around(packing::SPLIT), pack, multiply, around(packing::MERGE)].into_iter().flatten()
    }
}

/// Bytes of workspace, semaphores not counted, that serve any number of tokens up to `tokens`,
/// whichever configuration they get.
///
/// # Errors
/// The errors of [`ProductPlan::new`] for the limits of sizes.
pub(in crate::gpu) fn most_workspace_bytes(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
    activations: Dtype,
) -> Result<u64> {
    let (rows_each, dtype) = multiplied(activations);
    let parts = if rows_each > 1 { parts_bytes(tokens, weights) } else { [0; 2] };
    let parts = parts[0].saturating_add(parts[1]);
    let tokens = tokens.saturating_mul(rows_each);
    if weights.rows == 0 || tokens <= GEMV_TOKENS || !is_packable(weights) {
        return Ok(parts);
    }
    // Thread blocks that share K-iterations need no more than the same tile without.
    let usable = |config: &GemmConfig| !config.mainloop.is_gemv() && config.k_sharers() == 1;
    let configs = GemmConfig::for_operands(weights.format, dtype).filter(usable);
    let most = most_product_bytes(kernels, configs, weights, tokens)?;
    Ok(most.saturating_add(parts))
}

/// The rows of a token tile of experts' rows. For the GEMV it is the expert's number of rows, up to
/// `tile_n`.
pub(in crate::gpu) fn expert_tile_rows(config: GemmConfig, rows_per_expert: usize) -> u32 {
    if !config.mainloop.is_gemv() {
        return config.tile_n;
    }
    let most = if config.tile_n == 1 { 1 } else { 8 };
    1 << TokenTiles::of(rows_per_expert.max(1) as u64, most).bits
}
