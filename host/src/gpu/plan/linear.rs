//! The kernels of products of values: one configuration's, and those around it for activations in
//! f32.

use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::epilogue::PARTS;
use microscale_kernels_abi::experts::PlanGrid;

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gpu::plan::choose::{GEMV_TOKENS, choose, choose_for_experts, is_packable, otherwise, takes};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::planned::{Before, PlanKey, Planned};
use crate::gpu::plan::product::{ProductPlan, most_product_bytes};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Parts of an activation in f32, each a row in bf16.
pub(in crate::gpu) const PART_ROWS: usize = PARTS as usize;

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

/// Plans a product of values.
///
/// # Errors
/// The errors of [`PlanKey::product`].
pub(in crate::gpu) fn plan(
    kernels: &Kernels,
    key: PlanKey,
    gemv_only: bool,
    given: Option<GemmConfig>,
) -> Result<Planned> {
    let (rows_each, dtype) = multiplied(key.dtype);
    let is_split = rows_each > 1;
    let before = if is_split { Before::Split(parts_bytes(key.rows, key.weights)) } else { Before::Nothing };
    // Parts start on 16 bytes.
    let key = PlanKey { dtype, aligned: key.aligned || is_split, ..key };
    let (product, grid) = of_16_bits(kernels, key, rows_each, gemv_only, given)?;
    Ok(Planned { product, grid, before })
}

/// The product of activations in 16 bits, `rows_each` rows per row of the key, with a given
/// configuration or the one that should take the least time.
///
/// # Errors
/// The errors of [`PlanKey::product`].
pub(in crate::gpu) fn of_16_bits(
    kernels: &Kernels,
    key: PlanKey,
    rows_each: usize,
    gemv_only: bool,
    given: Option<GemmConfig>,
) -> Result<(ProductPlan, Option<PlanGrid>)> {
    let PlanKey { weights, experts, rows, dtype, aligned, .. } = key;
    let (times, facts) = (Estimator::of_gpu(kernels.gpu_name()), kernels.facts());
    let tokens = rows.saturating_mul(rows_each);
    // Plans for experts also serve activations that do not start on 16 bytes, which a given
    // configuration may not take.
    let given = given.filter(|given| experts.is_none() || aligned || !given.packs_activations());
    let mut config = given.unwrap_or_else(|| {
        let request = Request { weights, tokens, activations: dtype, aligned, gemv_only };
        match experts {
            None => choose(times, facts, request),
            Some(experts) => {
                choose_for_experts(times, facts, request, [experts, rows, rows_each], key.is_packable())
            }
        }
    });
    // A given configuration may be for quantized activations, which have 16 bits here.
    if !config.mainloop.takes_16_bits() {
        return Err(Error::NoKernel { format: weights.format });
    }
    if experts.is_some() && config.mainloop.is_gemv() {
        // Kernels that copy ahead find rows of activations by offsets of 32 bits.
        let far = (tokens as u64).saturating_mul(weights.cols as u64 * 2) >= 1 << 32;
        if far || !takes(config, weights, aligned) {
            config = otherwise(weights, aligned);
        }
    }
    let config = GemmConfig { weights: weights.format, activations: dtype, ..config };
    key.product(kernels, config, rows_each)
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
