//! Products of experts' weights and activations, on a GPU.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::epilogue::DeviceEpilogue;
use super::experts::DeviceRouting;
use super::experts_kernel::ExpertsKernel;
use super::experts_view::DeviceExpertsView;
use super::gemm_weights_kernel::GemmWorkspace;
use super::gemm_workspace::{COUNTER_BYTES, GemmWorkspaceMut};
use super::handle::Gpu;
use super::launch;
use super::memory::{DeviceView, DeviceViewMut};
use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::experts::{ExpertRows, check_pairs};
use crate::gemv::{Activation, ProductOf};
use crate::shape::QuantizedShape;

impl Gpu {
    /// Sorts pairs of a token and an expert by expert, as [`Self::gemm_experts_on`] needs them: `chosen` is `[tokens, top_k]`, the experts
    /// of each token. A number that is no expert's, as of one on another GPU, leaves its pair out. Enqueues one kernel and returns;
    /// allocates nothing and does not wait. Captured, it sorts when the graph runs: a product that runs before does nothing, unless as many
    /// pairs of as many tokens were sorted already.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if `routing` is of too few pairs, [`OperandFault::TopK`] if `chosen` is not of whole tokens, and
    /// [`Error::Gpu`].
    pub fn route_on<'a>(
        &self,
        stream: &Arc<CudaStream>,
        chosen: impl Into<DeviceView<'a, u32>>,
        top_k: usize,
        routing: &mut DeviceRouting,
    ) -> Result<()> {
        let chosen = chosen.into();
        let pairs = chosen.len();
        if pairs > routing.room {
            let DeviceRouting { experts, room, .. } = *routing;
            return Err(Error::Operands(OperandFault::Routing { experts, pairs: room }));
        }
        check_pairs(pairs, top_k)?;
        launch::route(&self.kernels, stream, chosen, top_k, routing)?;
        (routing.pairs, routing.top_k) = (pairs, top_k);
        Ok(())
    }

    /// Makes a workspace for products of experts' weights and activations of a dtype with as many pairs of a token and an expert as given,
    /// and with fewer. One for f32 serves the others too.
    ///
    /// # Errors
    /// [`Error::Gpu`] when memory is short.
    pub fn experts_workspace<'e>(
        &self,
        stream: &Arc<CudaStream>,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        activations: Dtype,
    ) -> Result<GemmWorkspace> {
        let bytes = launch::experts_workspace(&self.kernels, experts.into(), pairs, activations)?;
        GemmWorkspace::new(stream, bytes)
    }

    /// Bytes of a workspace in memory that is somebody else's ([`GemmWorkspaceMut::from_raw_parts`]), as [`Self::experts_workspace`] makes
    /// one.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more pairs than a GPU multiplies.
    pub fn experts_workspace_bytes<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        activations: Dtype,
    ) -> Result<usize> {
        Ok(COUNTER_BYTES + launch::experts_workspace(&self.kernels, experts.into(), pairs, activations)?)
    }

    /// Multiplies rows of activations with their experts' weights: for each sorted pair of `routing`, `out[row, m] =
    /// Σₖ weights[expert, m, k] · activations[row, k]`. [`ExpertRows`] says which rows these are. Enqueues two or three kernels and
    /// returns; allocates nothing, does not wait, and nobody needs to know how many rows an expert has. The same operands give the same
    /// bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]`, and `out` `[pairs, M]`, without gaps. How far results may be from the exact sums is
    /// as for [`Self::gemv_weights_on`] and [`Self::gemm_weights_on`], and activations in f32 are multiplied as of the latter: as three in
    /// bf16, which takes as long as three times as many pairs, and two small kernels more.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts, those of lengths, [`OperandFault::Workspace`],
    /// [`OperandFault::Limit`], [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, and where it is")]
    pub fn gemm_experts_on<'e, 'a, 's, 'o, T: Activation>(
        &self,
        stream: &Arc<CudaStream>,
        experts: impl Into<DeviceExpertsView<'e>>,
        activations: impl Into<DeviceView<'a, T>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let experts = experts.into();
        let nothing = DeviceEpilogue::default();
        self.gemm_experts_fused_on(stream, experts, activations, routing, rows, nothing, workspace, out)
    }

    /// [`Self::gemm_experts_on`], and then what the epilogue says, by the same kernels: a bias, `[experts, M]`, a gate, a residual, which lies
    /// as the results do, before the only rounding. With a gate `out` is `[pairs, M / 2]`; results may be in f32.
    ///
    /// # Errors
    /// Those of [`Self::gemm_experts_on`], for the epilogue's operands too, and [`OperandFault::Gate`].
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, and where it is")]
    pub fn gemm_experts_fused_on<'e, 'a, 's, 'o, T: Activation, O: ProductOf<T>>(
        &self,
        stream: &Arc<CudaStream>,
        experts: impl Into<DeviceExpertsView<'e>>,
        activations: impl Into<DeviceView<'a, T>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        epilogue: DeviceEpilogue<'_, T, O>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let experts = experts.into();
        let kernel = self.experts_kernel(experts, routing.pairs, T::DTYPE);
        self.gemm_experts_with(kernel, stream, experts, activations, routing, rows, epilogue, workspace, out)
    }

    /// [`Self::gemm_experts_fused_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemm_experts_fused_on`].
    #[doc(hidden)]
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
    pub fn gemm_experts_with<'e, 'a, 's, 'o, T: Activation, O: ProductOf<T>>(
        &self,
        kernel: ExpertsKernel,
        stream: &Arc<CudaStream>,
        experts: impl Into<DeviceExpertsView<'e>>,
        activations: impl Into<DeviceView<'a, T>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        epilogue: DeviceEpilogue<'_, T, O>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let experts = experts.into();
        if routing.experts != experts.count() {
            let DeviceRouting { experts, room, .. } = *routing;
            return Err(Error::Operands(OperandFault::Routing { experts, pairs: room }));
        }
        let (activations, out) = (activations.into(), out.into());
        let results = epilogue.check(experts.shape().rows, experts.count(), routing.pairs)?;
        let shape = QuantizedShape { rows: results, ..experts.shape() };
        rows.check(shape, [routing.pairs, routing.top_k], activations.len(), out.len())?;
        launch::gemm_experts(
            &self.kernels,
            stream,
            kernel,
            experts,
            activations,
            (routing, rows),
            epilogue,
            workspace.into(),
            out,
        )
    }

    /// The kernel that [`Self::gemm_experts_on`] chooses.
    #[doc(hidden)]
    pub fn experts_kernel<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
        activations: Dtype,
    ) -> ExpertsKernel {
        launch::choose_experts(&self.kernels, experts.into(), pairs, activations)
    }

    /// The kernels for experts' weights that this GPU's target has.
    #[doc(hidden)]
    pub fn experts_kernels(&self) -> impl Iterator<Item = ExpertsKernel> {
        ExpertsKernel::of(self.kernels.target())
    }
}
