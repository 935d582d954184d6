//! The kernels of products of FP4 weights and FP4 activations.

use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::fp4;

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gpu::plan::choose::{choose_for_mean_rows, is_packable};
use crate::gpu::plan::linear::{most_workspace_bytes, of_16_bits};
use crate::gpu::plan::planned::{Before, PlanKey, Planned, slot_bytes};
use crate::gpu::plan::product::most_product_bytes;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Plans a product in the dtype of the bias, if activations can be multiplied in it.
///
/// # Errors
/// The errors of [`PlanKey::product`].
pub(in crate::gpu) fn plan(
    kernels: &Kernels,
    key: PlanKey,
    per_token: bool,
    given: Option<GemmConfig>,
) -> Result<Planned> {
    let PlanKey { experts, rows, dtype: bias, .. } = key;
    let format = key.weights.format;
    let (decode, decoded) = fp4::decode(format, bias).ok_or(Error::NoKernel { format })?;
    let key = PlanKey { weights: whole_blocks(key.weights), ..key };
    // The dtype of the kernels of tensor cores that multiply FP4.
    let dtype = if bias == Dtype::F32 { Dtype::Bf16 } else { bias };
    let native = match given {
        Some(config) => {
            let config = GemmConfig { weights: format, activations: dtype, ..config };
            Some(config).filter(|config| config.mainloop.takes_fp4())
        }
        None => {
            let configs = GemmConfig::for_fp4(format, dtype).filter(|_| key.is_packable());
            choose_for_mean_rows(kernels.facts(), configs, experts, rows)
        }
    };
    let factors = factor_bytes(experts.unwrap_or(1));
    let sums = if per_token { sums_bytes(rows, key.weights) } else { 0 };
    if let Some(config) = native {
        let (product, grid) = key.product(kernels, config, 1)?;
        return Ok(Planned {
            product,
            grid,
            before: Before::Fp4 { decode: None, bytes: [factors, 0, sums] },
        });
    }
    let key = PlanKey { dtype: decoded, ..key };
    let (product, grid) = of_16_bits(kernels, key, 1, false, given)?;
    // At most a row per pair.
    let bytes = [factors, decoded_bytes(rows, key.weights), sums];
    Ok(Planned { product, grid, before: Before::Fp4 { decode: Some(decode), bytes } })
}

/// Bytes of the factors of the sums, one per expert, a multiple of 16.
pub(in crate::gpu) fn factor_bytes(experts: usize) -> u64 {
    slot_bytes(experts).next_multiple_of(16)
}

/// Bytes of workspace, semaphores not counted, that serve any number of tokens up to `tokens`,
/// whichever configuration they get; 0 if there is nothing to multiply.
///
/// # Errors
/// The errors of [`ProductPlan::new`] for the limits of sizes.
pub(in crate::gpu) fn most_fp4_workspace_bytes(
    kernels: &Kernels,
    weights: QuantizedShape,
    tokens: usize,
) -> Result<u64> {
    if weights.rows == 0 || tokens == 0 {
        return Ok(0);
    }
    let weights = whole_blocks(weights);
    let configs = GemmConfig::for_fp4(weights.format, Dtype::Bf16).filter(|_| is_packable(weights));
    let native = most_product_bytes(kernels, configs, weights, tokens)?;
    let decoded = most_workspace_bytes(kernels, weights, tokens, Dtype::Bf16)?;
    let most = native.max(decoded.saturating_add(decoded_bytes(tokens, weights)));
    Ok(factor_bytes(1).saturating_add(most))
}

/// Bytes of decoded activations, a multiple of 16.
pub(in crate::gpu) fn decoded_bytes(rows: usize, weights: QuantizedShape) -> u64 {
    (rows as u64).saturating_mul(weights.cols as u64 * 2).next_multiple_of(16)
}

/// Bytes of the sums of `rows` rows in f32, a multiple of 16.
pub(in crate::gpu) fn sums_bytes(rows: usize, weights: QuantizedShape) -> u64 {
    (rows as u64).saturating_mul(weights.rows as u64 * 4).next_multiple_of(16)
}

/// The shape of weights with the padding of their rows: rows are whole blocks in both operands.
pub(in crate::gpu) fn whole_blocks(weights: QuantizedShape) -> QuantizedShape {
    QuantizedShape { cols: weights.blocks_per_row() * weights.format.block(), ..weights }
}
