//! The kernels of products of FP4 weights and FP4 activations.

use microscale_formats::Format;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::gemm::fp4;
use microscale_kernels_abi::gemm::fp8::PACK_MXFP4;

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::fp8::Fp8Options;
use crate::gpu::plan::choose::{choose_for_mean_rows, choose_fp8, fastest, fastest_fp8, is_packable};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::fp8::{self, most_fp8_workspace_bytes};
use crate::gpu::plan::linear::{most_workspace_bytes, of_16_bits};
use crate::gpu::plan::planned::{Before, Kind, PlanKey, Planned, slot_bytes};
use crate::gpu::plan::product::{ProductParams, most_product_bytes};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// Plans a product in the dtype of the bias, if activations can be multiplied in it.
///
/// # Errors
/// The errors of [`PlanKey::product`].
pub(in crate::gpu) fn plan(kernels: &Kernels, key: PlanKey, given: Option<GemmConfig>) -> Result<Planned> {
    let PlanKey { kind, experts, rows, dtype: bias, .. } = key;
    let (per_token, fast_accumulation) = match kind {
        Kind::Fp4 { per_token, fast_accumulation } => (per_token, fast_accumulation),
        Kind::Values { .. } | Kind::Fp8(_) => (false, false),
    };
    let format = key.weights.format;
    let decoders = fp4::decoders(format, bias).ok_or(Error::NoKernel { format })?;
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
    if fast_accumulation && format == Format::Mxfp4 && experts.is_none() && bias != Dtype::F32 {
        let accumulates_fast = |config: &GemmConfig| config.mainloop.accumulates_fast();
        let config = given.map_or_else(|| faster_in_fp8(kernels, key), Some).filter(accumulates_fast);
        if let Some(config) = config {
            let options = Fp8Options { fast_accumulation, ..Fp8Options::default() };
            let mut planned = fp8::plan(kernels, key, options, Some(config))?;
            if let ProductParams::Gemm { packing: Some(packing), .. } = &mut planned.product.params {
                packing.kernel = PACK_MXFP4;
            }
            return Ok(planned);
        }
    }
    let key = PlanKey { dtype: decoders.dtype, ..key };
    let (mut product, grid) = of_16_bits(kernels, key, 1, false, given)?;
    if let ProductParams::Gemm { packing: Some(packing), .. } = &mut product.params {
        packing.kernel = decoders.packed;
        return Ok(Planned {
            product,
            grid,
            before: Before::Fp4 { decode: None, bytes: [factors, 0, sums] },
        });
    }
    // At most a row per pair.
    let bytes = [factors, decoded_bytes(rows, key.weights), sums];
    Ok(Planned { product, grid, before: Before::Fp4 { decode: Some(decoders.rows), bytes } })
}

/// With this many tokens and more, FP8 is assumed to be faster if its times were not measured.
const FP8_TOKENS: usize = 512;

/// The configuration for FP8 with fast accumulation that should be faster than 16-bit activations;
/// `None` if there is none.
fn faster_in_fp8(kernels: &Kernels, key: PlanKey) -> Option<GemmConfig> {
    let PlanKey { weights, rows: tokens, dtype: activations, .. } = key;
    if !key.is_packable() {
        return None;
    }
    let (times, gpu) = (Estimator::of_gpu(kernels.gpu_name()), kernels.facts());
    let request = Request { weights, tokens, activations, aligned: true, gemv_only: false };
    let fast = |config: &GemmConfig| config.mainloop.accumulates_fast();
    let is_faster = match (fastest(times, gpu, request), fastest_fp8(times, gpu, request, fast)) {
        (Some((_, in_16_bits)), Some((_, in_fp8))) => in_fp8 < in_16_bits,
        _ => tokens >= FP8_TOKENS,
    };
    if is_faster { choose_fp8(times, gpu, request, fast) } else { None }
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
    let in_fp8 = match weights.format {
        Format::Mxfp4 => most_fp8_workspace_bytes(kernels, weights, tokens)?,
        _ => 0,
    };
    Ok(factor_bytes(1).saturating_add(most).max(in_fp8))
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
