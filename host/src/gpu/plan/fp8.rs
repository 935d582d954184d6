//! The kernels of a product of 4-bit weights and FP8 activations.

use microscale_formats::activations::GROUP;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::gpu::plan::choose::choose_fp8;
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::product::{ProductParams, ProductPlan};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::QuantizedShape;

/// The kernels of a product: one packs activations, one multiplies.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp8Plan {
    pub(in crate::gpu) product: ProductPlan,
    /// Scales per token.
    pub(in crate::gpu) token_scales: usize,
    /// Bytes of codes and of scales of quantized activations, both multiples of 16.
    pub(in crate::gpu) quantized_bytes: [u64; 2],
}

impl Fp8Plan {
    /// Plans a product of `tokens` tokens, at least one, and weights of at least one row, with bias
    /// and residual in a dtype. Activations have a scale per token, or per group of columns.
    /// `given` is a configuration for tests and measurements.
    ///
    /// # Errors
    /// [`OperandFault::NoFp8`], and the errors of [`ProductPlan::new`].
    pub(in crate::gpu) fn new(
        kernels: &Kernels,
        weights: QuantizedShape,
        tokens: usize,
        dtype: Dtype,
        per_group: bool,
        given: Option<GemmConfig>,
    ) -> Result<Self> {
        let format = weights.format;
        let request = Request { weights, tokens, activations: dtype, aligned: true, gemv_only: false };
        let config = match given {
            Some(config) => {
                let config = GemmConfig { weights: format, activations: dtype, ..config };
                Some(config).filter(|config| config.mainloop.takes_fp8())
            }
            None => choose_fp8(Estimator::of_gpu(kernels.gpu_name()), kernels.facts(), request),
        };
        let config = config.ok_or(Error::Operands(OperandFault::NoFp8))?;
        let mut product = ProductPlan::new(kernels, config, weights, tokens, true, None)?;
        let groups = weights.cols.div_ceil(GROUP);
        let token_scales = if per_group { groups } else { 1 };
        if let ProductParams::Packed { gemm_params, .. } = &mut product.params {
            gemm_params.pack_scales = u32::from(token_scales > 1);
        }
        let bytes = [weights.cols, token_scales * size_of::<f32>()];
        let quantized_bytes =
            bytes.map(|bytes| (tokens as u64).saturating_mul(bytes as u64).next_multiple_of(16));
        Ok(Self { product, token_scales, quantized_bytes })
    }

    /// Bytes of workspace, semaphores not counted: quantized activations, and the product's
    /// workspace.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        let [codes, scales] = self.quantized_bytes;
        codes.saturating_add(scales).saturating_add(self.product.workspace_bytes())
    }

    /// The kernels of the product, in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.product.kernels().into_iter().flatten()
    }
}
