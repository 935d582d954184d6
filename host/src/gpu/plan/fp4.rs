//! The kernels of a product of FP4 weights and FP4 activations.

use microscale_kernels_abi::gemm::fp4;
use microscale_kernels_abi::{GemmConfig, GlobalSlot, KernelId};

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::gpu::plan::choose::{choose, is_packable};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::linear::most_workspace_bytes;
use crate::gpu::plan::product::{ProductPlan, most_product_bytes};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// The kernels of a product: first, one packs or decodes activations.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp4Plan {
    pub(in crate::gpu) product: ProductPlan,
    /// Where tensor cores do not multiply FP4: the kernel that decodes activations to 16 bits.
    pub(in crate::gpu) decode: Option<KernelId>,
    /// Bytes of the decoded activations, a multiple of 16; 0 if there are none.
    pub(in crate::gpu) decoded_bytes: u64,
}

/// Bytes of the factor of the sums, which come first in the workspace.
pub(in crate::gpu) const FACTOR_BYTES: u64 = (size_of::<GlobalSlot>() as u64).next_multiple_of(16);

impl Fp4Plan {
    /// Plans a product of `tokens` tokens, at least one, and weights of at least one row, in the
    /// dtype of a bias, if it can be multiplied in. `given` is a configuration for tests and
    /// measurements.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for formats that are not multiplied, and the errors of
    /// [`ProductPlan::new`].
    pub(in crate::gpu) fn new(
        kernels: &Kernels,
        weights: QuantizedShape,
        tokens: usize,
        bias: Dtype,
        given: Option<GemmConfig>,
    ) -> Result<Self> {
        let format = weights.format;
        let (decode, decoded) = fp4::decode(format, bias).ok_or(Error::NoKernel { format })?;
        let weights = whole_blocks(weights);
        let dtype = native_dtype(bias);
        let native = GemmConfig::for_fp4(format, dtype).filter(|config| {
            is_packable(weights) && config.mainloop.traits().targets.contain(kernels.target())
        });
        // The smallest tile that has all tokens, or else the largest.
        let native = native.min_by_key(|config| {
            let fits = config.tile_n as usize >= tokens;
            (!fits, if fits { config.tile_n } else { u32::MAX - config.tile_n })
        });
        let wanted = given.filter(|config| config.mainloop.takes_fp4());
        let wanted = wanted.map(|config| GemmConfig { weights: format, activations: dtype, ..config });
        if let Some(config) = wanted.or(native.filter(|_| given.is_none())) {
            let product = ProductPlan::new(kernels, config, weights, tokens, true, None)?;
            return Ok(Self { product, decode: None, decoded_bytes: 0 });
        }
        let config = given.map(|config| GemmConfig { weights: format, activations: decoded, ..config });
        let config = config.unwrap_or_else(|| {
            let request = Request { weights, tokens, activations: decoded, aligned: true, gemv_only: false };
            choose(Estimator::of_gpu(kernels.gpu_name()), kernels.facts(), request)
        });
        let product = ProductPlan::new(kernels, config, weights, tokens, true, None)?;
        Ok(Self { product, decode: Some(decode), decoded_bytes: decoded_bytes(tokens, weights) })
    }

    /// Bytes of workspace, semaphores not counted: the factor, decoded activations, and the
    /// product's workspace.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        FACTOR_BYTES.saturating_add(self.memory_bytes())
    }

    /// Bytes of the decoded activations and of the product's workspace.
    pub(in crate::gpu) fn memory_bytes(&self) -> u64 {
        self.decoded_bytes.saturating_add(self.product.workspace_bytes())
    }

    /// The kernels in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        let [pack, multiply] = self.product.kernels();
        [self.decode, pack, multiply].into_iter().flatten()
    }
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
    Ok(FACTOR_BYTES.saturating_add(most))
}

/// The dtype of the kernels of tensor cores that multiply FP4, given the dtype of a bias.
pub(in crate::gpu) fn native_dtype(bias: Dtype) -> Dtype {
    if bias == Dtype::F32 { Dtype::Bf16 } else { bias }
}

/// Bytes of decoded activations, a multiple of 16.
pub(in crate::gpu) fn decoded_bytes(rows: usize, weights: QuantizedShape) -> u64 {
    (rows as u64).saturating_mul(weights.cols as u64 * 2).next_multiple_of(16)
}

/// The shape of weights with the padding of their rows: rows are whole blocks in both operands.
pub(in crate::gpu) fn whole_blocks(weights: QuantizedShape) -> QuantizedShape {
    QuantizedShape { cols: weights.blocks_per_row() * weights.format.block(), ..weights }
}
