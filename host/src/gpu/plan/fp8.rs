//! The kernels of a product of 4-bit weights and FP8 activations, dense and by expert.

use microscale_formats::activations::GROUP;
use microscale_kernels_abi::experts::PlanGrid;
use microscale_kernels_abi::{Experts, GemmConfig, KernelId};

use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::gpu::plan::choose::{choose_for_mean_rows, choose_fp8, otherwise};
use crate::gpu::plan::estimate::Estimator;
use crate::gpu::plan::experts::{ExpertsKey, gpu_plan_bytes, most_experts_bytes, of_experts};
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
        if let ProductParams::Packed { gemm_params, .. } = &mut product.params {
            gemm_params.pack_scales = u32::from(self.token_scales > 1);
        }
    }
}

/// The kernels of a product: one packs activations, one multiplies. Without columns, one writes
/// what the epilogue makes of zeros.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp8Plan {
    pub(in crate::gpu) product: ProductPlan,
    pub(in crate::gpu) layout: Fp8Layout,
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
            _ if weights.cols == 0 => Some(without_columns(weights, dtype)),
            Some(config) => {
                let config = GemmConfig { weights: format, activations: dtype, ..config };
                Some(config).filter(|config| config.mainloop.takes_fp8())
            }
            None => choose_fp8(Estimator::of_gpu(kernels.gpu_name()), kernels.facts(), request),
        };
        let config = config.ok_or(Error::Operands(OperandFault::NoFp8))?;
        let mut product = ProductPlan::new(kernels, config, weights, tokens, true, None)?;
        let layout = Fp8Layout::new([tokens, weights.cols], per_group);
        layout.describe(&mut product);
        Ok(Self { product, layout })
    }

    /// Bytes of workspace, semaphores not counted: quantized activations, and the product's
    /// workspace.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        self.layout.total_bytes().saturating_add(self.product.workspace_bytes())
    }

    /// The kernels of the product, in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.product.kernels().into_iter().flatten()
    }
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
    let quantized = Fp8Layout::new([tokens, weights.cols], true).total_bytes();
    Ok(if most == 0 { 0 } else { most.saturating_add(quantized) })
}

/// Bytes of workspace, semaphores not counted, that serve products with experts' weights of any
/// number of pairs up to `pairs`.
pub(in crate::gpu) fn most_fp8_experts_workspace_bytes(kernels: &Kernels, key: ExpertsKey) -> u64 {
    let ExpertsKey { shape, pairs, packable, .. } = key;
    if shape.rows == 0 || pairs == 0 || key.experts == 0 {
        return 0;
    }
    if shape.cols == 0 {
        let config = without_columns(shape, Dtype::Bf16);
        return most_experts_bytes(kernels, std::iter::once(config), key);
    }
    if !packable {
        return 0;
    }
    let configs = GemmConfig::for_fp8(shape.format, Dtype::Bf16);
    let most = most_experts_bytes(kernels, configs, key);
    let quantized = Fp8Layout::new([pairs, shape.cols], true).total_bytes();
    if most == 0 { 0 } else { most.saturating_add(quantized) }
}

/// The kernels of a product with experts' weights.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Fp8ExpertsPlan {
    /// The product, and how rows are cut into its token tiles.
    pub(in crate::gpu) product: ProductPlan,
    pub(in crate::gpu) grid: PlanGrid,
    pub(in crate::gpu) layout: Fp8Layout,
}

impl Fp8ExpertsPlan {
    /// Plans a product of at least one pair and expert, and weights of at least one row. `given` is
    /// a configuration for tests and measurements.
    ///
    /// # Errors
    /// [`OperandFault::NoFp8`], [`OperandFault::Fp8Experts`], and the errors of
    /// [`ProductPlan::new`].
    pub(in crate::gpu) fn new(
        kernels: &Kernels,
        key: ExpertsKey,
        per_group: bool,
        given: Option<GemmConfig>,
    ) -> Result<Self> {
        let ExpertsKey { experts, shape, pairs, activations, packable, .. } = key;
        let takes = |config: &GemmConfig| config.mainloop.takes_fp8() && config.cluster == 1;
        let config = match given {
            _ if shape.cols == 0 => Some(without_columns(shape, activations)),
            Some(config) => Some(GemmConfig { weights: shape.format, activations, ..config }).filter(takes),
            None => {
                let configs = GemmConfig::for_fp8(shape.format, activations);
                choose_for_mean_rows(kernels.facts(), configs, [experts, pairs])
            }
        };
        let config = config.ok_or(Error::Operands(OperandFault::NoFp8))?;
        if shape.cols > 0 && !packable {
            return Err(Error::Operands(OperandFault::Fp8Experts { rows: shape.rows, cols: shape.cols }));
        }
        let found = of_experts(kernels, config, key, 1, true)?;
        let (mut product, grid) = found.ok_or(Error::NoKernel { format: shape.format })?;
        let layout = Fp8Layout::new([pairs, shape.cols], per_group);
        layout.describe(&mut product);
        Ok(Self { product, grid, layout })
    }

    /// Bytes of the plan that is made on the GPU.
    pub(in crate::gpu) fn plan_bytes(&self) -> u64 {
        gpu_plan_bytes(self.grid)
    }

    /// Bytes of workspace, semaphores not counted: the plan that is made on the GPU, quantized
    /// activations, and the product's workspace.
    pub(in crate::gpu) fn workspace_bytes(&self) -> u64 {
        let before = self.plan_bytes().saturating_add(self.layout.total_bytes());
        before.saturating_add(self.product.workspace_bytes())
    }

    /// The kernels in the order of their launches.
    pub(in crate::gpu) fn kernels(&self) -> impl Iterator<Item = KernelId> {
        [Some(Experts::Plan.id())].into_iter().chain(self.product.kernels()).flatten()
    }
}
