//! Products of experts' weights and activations on a GPU: plan once, then run.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr};
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::{GemmConfig, GlobalSlot};

use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::experts::{ExpertRows, check_pairs};
use crate::gemv::{Activation, ProductOf, check_weights_shape};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, Steps, apply_direction, limited};
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::experts_view::DeviceExpertsView;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::memory::workspace::{GemmWorkspace, GemmWorkspaceMut, SEMAPHORE_BYTES};
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::plan::choose::is_packable;
use crate::gpu::plan::experts::{ExpertsKey, PlannedExperts, gpu_plan_bytes};
use crate::gpu::plan::linear::{multiplied, parts_bytes};
use crate::gpu::plan::product::{ExpertTokenTiles, ProductPlan};
use crate::shape::QuantizedShape;

/// A product of rows of activations and their experts' weights to plan: for each sorted pair of a
/// routing, `out[row, m] = Σₖ weights[expert, m, k] · activations[row, k]`, followed by the
/// epilogue.
///
/// Made by [`Gpu::linear_experts`]. [`ExpertRows`] says which rows belong to a pair.
pub struct LinearExperts<'a, T, O> {
    gpu: &'a Gpu,
    experts: DeviceExpertsView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for LinearExperts<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("LinearExperts");
        linear.field("experts", &self.experts.count()).field("weights", &self.experts.shape());
        linear.field("epilogue", &self.epilogue).finish_non_exhaustive()
    }
}

/// The kernels of a product with experts' weights for a number of pairs, with its workspace.
pub struct ExpertsPlan<'a, T, O> {
    linear: LinearExperts<'a, T, O>,
    pairs: usize,
    aligned: Arc<PlannedExperts>,
    workspace_bytes: u64,
    dtypes: PhantomData<(T, O)>,
}

/// Shows the configuration and the bytes of workspace.
impl<T, O> fmt::Debug for ExpertsPlan<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.aligned.product.map(|(product, _)| product.config.to_string());
        let mut plan = f.debug_struct("ExpertsPlan");
        plan.field("pairs", &self.pairs).field("config", &config).finish_non_exhaustive()
    }
}

/// Returns whether kernels that pack activations take experts' weights: each expert's scales must
/// start on 4 bytes.
pub(in crate::gpu) fn experts_are_packable(experts: DeviceExpertsView<'_>) -> bool {
    let shape = experts.shape();
    is_packable(shape) && (shape.rows * shape.blocks_per_row()).is_multiple_of(4)
}

/// The key of a product's plan, for activations that start on 16 bytes and experts whose weights
/// are multiplied as matrices of `shape`.
pub(in crate::gpu) fn experts_key<T: Activation>(
    experts: DeviceExpertsView<'_>,
    shape: QuantizedShape,
    pairs: usize,
) -> ExpertsKey {
    ExpertsKey {
        experts: experts.count(),
        shape,
        pairs,
        activations: T::DTYPE,
        aligned: true,
        packable: experts_are_packable(experts),
    }
}

/// Bytes of the slots of global scales. Kernels load a word of an expert's slot also where experts
/// have no global scales, and ignore it: the workspace is at least as long as slots are.
pub(in crate::gpu) fn slot_bytes(experts: DeviceExpertsView<'_>) -> u64 {
    experts.count() as u64 * size_of::<GlobalSlot>() as u64
}

/// Checks that a routing is of this number of experts and of sorted pairs.
pub(in crate::gpu) fn check_routing(routing: &DeviceRouting, experts: usize, pairs: usize) -> Result<()> {
    if routing.experts == experts && routing.pairs == pairs {
        return Ok(());
    }
    let DeviceRouting { experts, pairs, .. } = *routing;
    Err(Error::Operands(OperandFault::Routing { experts, pairs }))
}

/// The addresses of the lists of rows of activations and of results, given a routing's lists of
/// tokens and of pairs; 0 for rows in sorted order.
pub(in crate::gpu) const fn lists(rows: ExpertRows, [tokens, order]: [u64; 2]) -> [u64; 2] {
    match rows {
        ExpertRows::Gathered => [tokens, 0],
        ExpertRows::Sorted => [0, 0],
        ExpertRows::Scattered => [0, order],
        ExpertRows::Indexed => [tokens, order],
        ExpertRows::Paired => [order, order],
    }
}

impl Gpu {
    /// Sorts pairs of a token and an expert by expert, for [`Self::linear_experts`]. `chosen` is
    /// `[tokens, top_k]`, the experts of each token. Numbers outside of the experts, as of experts
    /// on another GPU, leave their pairs out. Enqueues one kernel and returns; allocates nothing
    /// and does not wait.
    ///
    /// Captured, it sorts when the graph runs. A product that runs before that does nothing, unless
    /// the same number of pairs and tokens was sorted before.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if `routing` has room for fewer pairs, [`OperandFault::TopK`] if
    /// `chosen` is not of whole tokens, and [`Error::Gpu`].
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

    /// A product with experts' weights in device memory, `[experts, M, K]`, to plan for a number of
    /// pairs.
    pub fn linear_experts<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExperts<'a, T, O> {
        let epilogue = DeviceEpilogue::default();
        LinearExperts { gpu: self, experts: experts.into(), epilogue, given: None }
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
        let shape = experts.shape();
        let (rows_each, dtype) = multiplied(activations);
        let [parts, sums] = if rows_each > 1 { parts_bytes(pairs, shape) } else { [0; 2] };
        let sorted = Sorted { pairs: pairs as u32, top_k: 1 };
        let mut most = slot_bytes(experts);
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
            if gemv || !experts_are_packable(experts) || shape.rows == 0 {
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
}

impl<'a, T: Activation, O: ProductOf<T>> LinearExperts<'a, T, O> {
    /// The product followed by a bias, `[experts, M]`, a gate and a residual, which lies as the
    /// results do, by the same kernels, before the only rounding. With a gate, `out` is `[pairs, M
    /// / 2]`.
    #[must_use]
    pub fn epilogue(self, epilogue: DeviceEpilogue<'a, T, O>) -> Self {
        Self { epilogue, ..self }
    }

    /// The product by a given configuration, for tests and measurements. Its formats and dtype are
    /// ignored.
    #[cfg(feature = "internals")]
    #[must_use]
    pub fn by(self, config: GemmConfig) -> Self {
        Self { given: Some(config), ..self }
    }

    /// Plans the product of `pairs` pairs of a token and an expert, and compiles its kernels, or
    /// returns the plan that was made before. How many rows each expert has is decided on the GPU.
    ///
    /// # Errors
    /// [`OperandFault::Weights`] and [`OperandFault::Layout`] for weights that are not multiplied,
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    pub fn plan(self, pairs: usize) -> Result<ExpertsPlan<'a, T, O>> {
        check_weights_shape(self.experts.shape())?;
        limited("pairs of a token and an expert", pairs, launch::PAIR_LIMIT)?;
        self.epilogue.check(self.experts.shape().rows, self.experts.count(), pairs)?;
        let aligned = self.planned(pairs, true)?;
        self.gpu.kernels.ready_all(aligned.kernels())?;
        let mut workspace_bytes = aligned.workspace_bytes();
        // Activations that do not start on 16 bytes may get other kernels.
        workspace_bytes = workspace_bytes.max(self.planned(pairs, false)?.workspace_bytes());
        workspace_bytes = workspace_bytes.max(slot_bytes(self.experts));
        Ok(ExpertsPlan { linear: self, pairs, aligned, workspace_bytes, dtypes: PhantomData })
    }

    /// The kernels for activations that start on 16 bytes or not.
    fn planned(&self, pairs: usize, aligned: bool) -> Result<Arc<PlannedExperts>> {
        let Self { gpu, experts, given, .. } = self;
        let aligned = aligned || multiplied(T::DTYPE).0 > 1;
        let key = ExpertsKey { aligned, ..experts_key::<T>(*experts, experts.shape(), pairs) };
        if given.is_some() {
            return PlannedExperts::new(&gpu.kernels, key, *given).map(Arc::new);
        }
        gpu.plans.experts.get(key, || PlannedExperts::new(&gpu.kernels, key, None))
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlan<'_, T, O> {
    /// Bytes of workspace for [`Self::run`].
    pub fn workspace_bytes(&self) -> usize {
        usize::try_from(self.workspace_bytes).unwrap_or(usize::MAX).saturating_add(SEMAPHORE_BYTES)
    }

    /// The configuration for activations that start on 16 bytes; `None` if there is nothing to
    /// multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.aligned.product.map(|(product, _)| product.config)
    }

    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]`, as `rows` says, and `out` `[pairs, M]`,
    /// without gaps. Results are as far from the exact sums as results of
    /// [`Plan::run`](crate::gpu::Plan::run).
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`], errors
    /// about lengths, [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<DeviceView<'x, T>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let LinearExperts { gpu, experts, epilogue, .. } = &self.linear;
        let (activations, mut workspace, mut out) = (activations.into(), workspace.into(), out.into());
        let (shape, pairs, kernels) = (experts.shape(), self.pairs, &gpu.kernels);
        check_routing(routing, experts.count(), pairs)?;
        let results = epilogue.check(shape.rows, experts.count(), pairs)?;
        let of_results = QuantizedShape { rows: results, ..shape };
        rows.check(of_results, [pairs, routing.top_k], activations.len(), out.len())?;
        if shape.rows == 0 || pairs == 0 {
            return Ok(());
        }
        let (activations, _read) = activations.read(stream, "the activations", 1)?;
        let ((codes, scales, slots), _weights) = experts.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, T::DTYPE)?;
        let other;
        let planned = if activations.is_multiple_of(16) {
            &self.aligned
        } else {
            other = self.linear.planned(pairs, false)?;
            &other
        };
        let Some((product, grid)) = planned.product else { return Ok(()) };
        let ([semaphores, plan], _used) = workspace.write(stream, self.workspace_bytes)?;
        let sorted = Sorted { pairs: pairs as u32, top_k: routing.top_k as u32 };
        let grid = PlanGrid { sorted, ..grid };
        let (tokens, _tokens) = routing.tokens.device_ptr(stream);
        let (order, _order) = routing.order.device_ptr(stream);
        let [from, to] = lists(rows, [tokens, order]);
        let listed = Routed { plan, from, to };
        let (slot, apply) = (slots.unwrap_or(plan), apply_direction(experts.direction()));
        let operands = Operands { codes, scales, slot, activations, out, apply, steps };
        let [parts_bytes, sums_bytes] = planned.parts.unwrap_or_default();
        let parts = plan + planned.plan_bytes();
        let sums = parts + parts_bytes;
        let memory = [semaphores, sums + sums_bytes];
        // SAFETY: experts' weights are linear, each starts on what kernels ask for, and each has a
        // slot, or the bytes of one. The plan is made for the product's token tiles, and the lists
        // have the rows of all sorted pairs. Parts, their products and the product's workspace
        // follow the plan and each other, with the bytes that were asked for. The borrows keep the
        // buffers from overlapping, until the launches are enqueued.
        unsafe {
            launch::plan_experts(kernels, stream, routing, grid, plan)?;
            if planned.parts.is_none() {
                return launch::product(kernels, stream, &product, &operands, listed, memory);
            }
            launch::split(kernels, stream, activations, parts, listed, [pairs, shape.cols])?;
            let of_parts = Operands { activations: parts, out: sums, steps: Steps::SUMS, ..operands };
            let routed = Routed { plan, ..Routed::default() };
            launch::product(kernels, stream, &product, &of_parts, routed, memory)?;
            launch::merge(kernels, stream, sums, out, steps, listed, [pairs, shape.rows])
        }
    }
}
