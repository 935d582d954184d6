//! Workspaces that serve products of any number of tokens up to one.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::GemmConfig;
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::gemm::TOKEN_LIMIT;

use crate::element::Dtype;
use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, OperandFault};
use crate::fp8::Fp8Options;
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::limited;
use crate::gpu::memory::experts_view::DeviceExpertsView;
use crate::gpu::memory::workspace::{GemmWorkspace, SEMAPHORE_BYTES};
use crate::gpu::plan::fp4::{
    decoded_bytes, factor_bytes, most_fp4_workspace_bytes, sums_bytes, whole_blocks,
};
use crate::gpu::plan::fp8::{most_fp8_experts_workspace_bytes, most_fp8_workspace_bytes};
use crate::gpu::plan::linear::{most_workspace_bytes, multiplied, parts_bytes};
use crate::gpu::plan::planned::{Kind, PlanKey, gpu_plan_bytes, most_experts_bytes, slot_bytes};
use crate::gpu::plan::product::{ExpertTokenTiles, ProductPlan};
use crate::shape::QuantizedShape;

/// Bytes of a workspace with its semaphores; 0 if there is none.
pub(in crate::gpu) fn with_semaphores(bytes: u64) -> usize {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if bytes == 0 { 0 } else { bytes.saturating_add(SEMAPHORE_BYTES) }
}

/// The key of a product with experts' weights, of activations in 16 bits that start on 16 bytes.
fn experts_key(experts: DeviceExpertsView<'_>, kind: Kind, pairs: usize) -> PlanKey {
    let (weights, experts) = (experts.shape(), Some(experts.count()));
    PlanKey { kind, weights, experts, rows: pairs, dtype: Dtype::Bf16, aligned: true }
}

impl Gpu {
    /// Bytes of a workspace that serves products of weights of a shape with any number of tokens up
    /// to `tokens`, whose activations have a dtype; 0 if they need none, as up to eight tokens in
    /// 16 bits. One for f32 serves the others too.
    ///
    /// # Errors
    /// [`crate::OperandFault::Limit`] for more tokens than a GPU multiplies.
    pub fn gemm_workspace_bytes(
        &self,
        weights: QuantizedShape,
        tokens: usize,
        activations: Dtype,
    ) -> Result<usize> {
        let bytes = most_workspace_bytes(&self.kernels, weights, tokens, activations)?;
        Ok(with_semaphores(bytes))
    }

    /// Makes a workspace of [`Self::gemm_workspace_bytes`].
    ///
    /// # Errors
    /// The errors of [`Self::gemm_workspace_bytes`], and [`crate::Error::Gpu`] when memory is
    /// short.
    pub fn gemm_workspace(
        &self,
        stream: &Arc<CudaStream>,
        weights: QuantizedShape,
        tokens: usize,
        activations: Dtype,
    ) -> Result<GemmWorkspace> {
        GemmWorkspace::new(stream, self.gemm_workspace_bytes(weights, tokens, activations)?)
    }

    /// Bytes of a workspace that serves [`Self::linear_fp4`] with weights of a shape and any number
    /// of tokens up to `tokens`, which have a global scale each if `per_token`. 0 if there is
    /// nothing to multiply.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more tokens or columns than a GPU multiplies.
    pub fn fp4_workspace_bytes(
        &self,
        weights: QuantizedShape,
        tokens: usize,
        per_token: bool,
    ) -> Result<usize> {
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        let bytes = most_fp4_workspace_bytes(&self.kernels, weights, tokens)?;
        let sums = if per_token { sums_bytes(tokens, weights) } else { 0 };
        Ok(with_semaphores(bytes.saturating_add(sums)))
    }

    /// Bytes of a workspace that serves [`Self::linear_fp8`] with weights of a shape and any number
    /// of tokens up to `tokens`, with scales per token or per group. 0 if there is nothing to
    /// multiply, or no kernel.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more tokens or columns than a GPU multiplies.
    pub fn fp8_workspace_bytes(&self, weights: QuantizedShape, tokens: usize) -> Result<usize> {
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        most_fp8_workspace_bytes(&self.kernels, weights, tokens).map(with_semaphores)
    }

    /// Bytes of a workspace that serves products with experts' weights of any number of pairs of a
    /// token and an expert up to `pairs`, whose activations have a dtype. One for f32 serves the
    /// others too.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more pairs than a GPU multiplies.
    pub fn experts_workspace_bytes<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        activations: Dtype,
    ) -> Result<usize> {
        let experts = experts.into();
        limited("pairs of a token and an expert", pairs, launch::PAIR_LIMIT)?;
        let key = experts_key(experts, Kind::Values { gemv_only: false }, pairs);
        let shape = experts.shape();
        let (rows_each, dtype) = multiplied(activations);
        let [parts, sums] = if rows_each > 1 { parts_bytes(pairs, shape) } else { [0; 2] };
        let sorted = Sorted { pairs: pairs as u32, top_k: 1 };
        let mut most = slot_bytes(experts.count());
        for config in GemmConfig::for_operands(shape.format, dtype) {
            if !config.mainloop.traits().targets.contain(self.kernels.target()) || config.cluster > 1 {
                continue;
            }
            let gemv = config.mainloop.is_gemv();
            // With fewer rows per expert, the GEMV has smaller token tiles, and more of them.
            let tile_rows = if gemv { 1 } else { config.tile_n };
            let grid = PlanGrid::new(experts.count() as u64, sorted, rows_each as u32, tile_rows);
            let Some(grid) = grid else { continue };
            let before = gpu_plan_bytes(grid).saturating_add(parts).saturating_add(sums);
            most = most.max(before);
            if gemv || !key.is_packable() || shape.rows == 0 {
                continue;
            }
            let tiles = ExpertTokenTiles { most: u64::from(grid.most_tiles), rows: tile_rows };
            let rows = pairs * rows_each;
            // A GPU may have too little shared memory for a configuration.
            if let Ok(plan) = ProductPlan::new(&self.kernels, config, shape, rows, true, Some(tiles)) {
                most = most.max(before.saturating_add(plan.workspace_bytes()));
            }
        }
        Ok(usize::try_from(most).unwrap_or(usize::MAX).saturating_add(SEMAPHORE_BYTES))
    }

    /// Makes a workspace of [`Self::experts_workspace_bytes`].
    ///
    /// # Errors
    /// The errors of [`Self::experts_workspace_bytes`], and [`Error::Gpu`] when memory is short.
    pub fn experts_workspace<'e>(
        &self,
        stream: &Arc<CudaStream>,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        activations: Dtype,
    ) -> Result<GemmWorkspace> {
        GemmWorkspace::new(stream, self.experts_workspace_bytes(experts, pairs, activations)?)
    }

    /// Bytes of a workspace that serves [`Self::linear_experts_fp4`] with any number of pairs of a
    /// token and an expert up to `pairs`. If `per_token`, rows of activations have a global scale
    /// each.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more pairs than a GPU multiplies.
    pub fn experts_fp4_workspace_bytes<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        per_token: bool,
    ) -> Result<usize> {
        let experts = experts.into();
        let shape = experts.shape();
        let of_decoded = self.experts_workspace_bytes(experts, pairs, Dtype::Bf16)?;
        let kind = Kind::Fp4 { per_token, fast_accumulation: false };
        let key = PlanKey { weights: whole_blocks(shape), ..experts_key(experts, kind, pairs) };
        let configs = GemmConfig::for_fp4(shape.format, Dtype::Bf16).filter(|_| key.is_packable());
        let native = with_semaphores(most_experts_bytes(&self.kernels, configs, &key));
        let sums = if per_token { sums_bytes(pairs, shape) } else { 0 };
        let before = factor_bytes(experts.count()).saturating_add(decoded_bytes(pairs, key.weights));
        let before = before.saturating_add(sums);
        Ok(of_decoded.max(native).saturating_add(usize::try_from(before).unwrap_or(usize::MAX)))
    }

    /// Bytes of a workspace that serves [`Self::linear_experts_fp8`] with any number of pairs of a
    /// token and an expert up to `pairs`, with scales per token or per group. 0 if there is nothing
    /// to multiply, or no kernel.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more pairs than a GPU multiplies.
    pub fn experts_fp8_workspace_bytes<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
    ) -> Result<usize> {
        let experts = experts.into();
        limited("pairs of a token and an expert", pairs, launch::PAIR_LIMIT)?;
        let key = experts_key(experts, Kind::Fp8(Fp8Options::default()), pairs);
        let bytes = match most_fp8_experts_workspace_bytes(&self.kernels, &key) {
            0 => 0,
            bytes => bytes.max(slot_bytes(experts.count())),
        };
        Ok(with_semaphores(bytes))
    }
}
