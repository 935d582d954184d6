//! The kernels of a product of 4-bit weights and FP8 activations, dense and by expert.

use microscale_formats::activations::GROUP;
use microscale_kernels_abi::GemmConfig;

use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::fp8::Fp8Options;
use crate::gpu::plan::choose::{choose_for_mean_rows, choose_fp8, otherwise};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::planned::{Before, PlanKey, Planned, most_experts_bytes};
use crate::gpu::plan::product::{ProductParams, ProductPlan, most_product_bytes};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Activations in FP8 as the kernels read them.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp8Layout {
    /// Scales per token.
    pub(in crate::gpu) token_scales: usize,
    /// Bytes of codes and of scales of quantized activations, both multiples of 16.
    pub(in crate::gpu) bytes: [u64; 2],
}

impl Fp8Layout {
    /// The layout of `rows` rows of `cols` columns, with a scale per token, or per group of
    /// columns. Rows without columns are not quantized, and have no bytes.
    pub(in crate::gpu) fn new([rows, cols]: [usize; 2], per_group: bool) -> Self {
        let token_scales = if per_group { cols.div_ceil(GROUP).max(1) } else { 1 };
        let bytes = if cols == 0 { [0; 2] } else { [cols, token_scales * size_of::<f32>()] };
        let bytes = bytes.map(|bytes| (rows as u64).saturating_mul(bytes as u64).next_multiple_of(16));
        Self { token_scales, bytes }
    }

    /// Bytes of codes and scales.
    pub(in crate::gpu) fn total_bytes(&self) -> u64 {
        let [codes, scales] = self.bytes;
        codes.saturating_add(scales)
    }

    /// Tells the kernels of a product how many scales a token has.
    fn describe(&self, product: &mut ProductPlan) {
        if let ProductParams::Gemm { gemm_params, .. } = &mut product.params {
            gemm_params.pack_scales = u32::from(self.token_scales > 1);
        }
    }
}

/// Plans a product. Weights without columns get a kernel that reads no activations.
///
/// # Errors
/// [`OperandFault::NoFp8`], [`OperandFault::Fp8Experts`], and the errors of [`PlanKey::product`].
pub(in crate::gpu) fn plan(
    kernels: &Kernels,
    key: PlanKey,
    options: Fp8Options,
    given: Option<GemmConfig>,
) -> Result<Planned> {
    let PlanKey { weights, experts, rows, dtype, .. } = key;
    let fast = options.fast_accumulation && !options.per_group && experts.is_none();
    let takes = |config: &GemmConfig| {
        let accumulates = fast || !config.mainloop.accumulates_fast();
        config.mainloop.takes_fp8() && accumulates && (experts.is_none() || config.cluster == 1)
    };
    let config = match (given, experts) {
        _ if weights.cols == 0 => Some(without_columns(weights, dtype)),
        (Some(config), _) => {
            Some(GemmConfig { weights: weights.format, activations: dtype, ..config }).filter(takes)
        }
        (None, None) => {
            let request =
                Request { weights, tokens: rows, activations: dtype, aligned: true, gemv_only: false };
            choose_fp8(Estimator::of_gpu(kernels.gpu_name()), kernels.facts(), request, takes)
        }
        (None, Some(_)) => {
            let configs = GemmConfig::for_fp8(weights.format, dtype).filter(takes);
            choose_for_mean_rows(kernels.facts(), configs, experts, rows)
        }
    };
    let config = config.ok_or(Error::Operands(OperandFault::NoFp8))?;
    if experts.is_some() && weights.cols > 0 && !key.is_packable() {
        return Err(Error::Operands(OperandFault::Fp8Experts { rows: weights.rows, cols: weights.cols }));
    }
    let (mut product, grid) = key.product(kernels, config, 1)?;
    let layout = Fp8Layout::new([rows, weights.cols], options.per_group);
    layout.describe(&mut product);
    // Experts' rows may have several places in packs each, so a kernel of their own quantizes them.
    let [codes, scales] = if experts.is_some() { layout.bytes } else { [0; 2] };
    let bytes = [codes, scales, row_bases_bytes(config, weights)];
    Ok(Planned { product, grid, before: Before::Fp8 { bytes } })
}

/// Bytes of the bases of rows of weights, a multiple of 16: the largest scale of each.
fn row_bases_bytes(config: GemmConfig, weights: QuantizedShape) -> u64 {
    if config.has_row_bases() { one_word_per_row(weights) } else { 0 }
}

/// Bytes of a word per row of weights, as a multiple of 16.
fn one_word_per_row(weights: QuantizedShape) -> u64 {
    (weights.rows as u64 * size_of::<u32>() as u64).next_multiple_of(16)
}

/// The configuration for weights without columns, which reads no activations.
fn without_columns(weights: QuantizedShape, activations: Dtype) -> GemmConfig {
    GemmConfig { activations, ..otherwise(weights, true) }
}

/// Bytes of workspace, semaphores not counted, that serve any number of tokens up to `tokens`,
/// whichever configuration they get.
///
/// # Errors
/// The errors of [`ProductPlan::new`] for the limits of sizes.
pub(in crate::gpu) fn most_fp8_workspace_bytes(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
) -> Result<u64> {
    if weights.rows == 0 || weights.cols == 0 || tokens == 0 {
        return Ok(0);
    }
    let configs = GemmConfig::for_fp8(weights.format, Dtype::Bf16);
    let most = most_product_bytes(kernels, configs, weights, tokens)?;
    Ok(if most == 0 { 0 } else { most.saturating_add(one_word_per_row(weights)) })
}

/// Bytes of workspace, semaphores not counted, that serve products with experts' weights of any
/// number of pairs up to `pairs`.
pub(in crate::gpu) fn most_fp8_experts_workspace_bytes(kernels: &Kernels, key: &PlanKey) -> u64 {
    let PlanKey { weights: shape, rows: pairs, .. } = *key;
    if key.is_empty() {
        return 0;
    }
    if shape.cols == 0 {
        let config = without_columns(shape, Dtype::Bf16);
        return most_experts_bytes(kernels, std::iter::once(config), key);
    }
    if !key.is_packable() {
        return 0;
    }
    let configs = GemmConfig::for_fp8(shape.format, Dtype::Bf16);
    let most = most_experts_bytes(kernels, configs, key);
    let quantized = Fp8Layout::new([pairs, shape.cols], true).total_bytes();
    if most == 0 { 0 } else { most.saturating_add(quantized) }
}
