//! Products of experts' 4-bit weights and FP8 activations (W4A8) on a GPU: plan once, then run.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr};
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{ActivationFault, Error, OperandFault};
use crate::experts::ExpertRows;
use crate::fp8::Fp8Options;
use crate::gemv::{Activation, ProductOf};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, apply_direction, limited};
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::experts_view::DeviceExpertsView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::ops::linear::with_semaphores;
use crate::gpu::ops::linear_experts::{check_routing, experts_key, lists, slot_bytes};
use crate::gpu::ops::linear_fp8::{Fp8Activations, check_operands};
use crate::gpu::plan::experts::ExpertsKey;
use crate::gpu::plan::fp8::{Fp8ExpertsPlan, most_fp8_experts_workspace_bytes};
use crate::shape::Shape;

/// A product of rows of FP8 activations and their experts' weights to plan.
///
/// Made by [`Gpu::linear_experts_fp8`]. `T` is the dtype of unquantized activations and of the
/// epilogue's bias, f16 or bf16, and `O` the dtype of the results.
#[derive(Clone, Copy)]
pub struct LinearExpertsFp8<'a, T, O> {
    gpu: &'a Gpu,
    experts: DeviceExpertsView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    options: Fp8Options,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for LinearExpertsFp8<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("LinearExpertsFp8");
        linear.field("experts", &self.experts.count()).field("weights", &self.experts.shape());
        linear.field("options", &self.options).field("epilogue", &self.epilogue).finish_non_exhaustive()
    }
}

/// The kernels of a product with experts' weights for a number of pairs, with its workspace.
pub struct ExpertsPlanFp8<'a, T, O> {
    linear: LinearExpertsFp8<'a, T, O>,
    pairs: usize,
    /// `None` if there is nothing to multiply.
    plan: Option<Arc<Fp8ExpertsPlan>>,
}

/// Shows the configuration.
impl<T, O> fmt::Debug for ExpertsPlanFp8<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.config().map(|config| config.to_string());
        let mut plan = f.debug_struct("ExpertsPlanFp8");
        plan.field("pairs", &self.pairs).field("config", &config).finish_non_exhaustive()
    }
}

impl Gpu {
    /// A product with experts' weights in device memory, `[experts, M, K]` in MXFP4 or NVFP4, and
    /// activations in FP8 (E4M3), to plan for a number of pairs.
    ///
    /// Rows are routed as for [`Self::linear_experts`]. Needs a GPU of compute capability 9.0, like
    /// [`Self::linear_fp8`].
    pub fn linear_experts_fp8<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExpertsFp8<'a, T, O> {
        LinearExpertsFp8 {
            gpu: self,
            experts: experts.into(),
            epilogue: DeviceEpilogue::default(),
            options: Fp8Options::default(),
            given: None,
        }
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
        let bytes = match most_fp8_experts_workspace_bytes(&self.kernels, key::<half::bf16>(experts, pairs)) {
            0 => 0,
            bytes => bytes.max(slot_bytes(experts)),
        };
        Ok(with_semaphores(bytes))
    }
}

/// The key of a product's plan. Codes of activations start on 8 bytes.
fn key<T: Activation>(experts: DeviceExpertsView<'_>, pairs: usize) -> ExpertsKey {
    experts_key::<T>(experts, experts.shape(), pairs)
}

impl<'a, T: Activation, O: ProductOf<T>> LinearExpertsFp8<'a, T, O> {
    /// How activations are scaled, and whether NVFP4 weights may be rounded.
    #[must_use]
    pub fn options(self, options: Fp8Options) -> Self {
        Self { options, ..self }
    }

    /// The product followed by a bias, `[experts, M]`, a gate and a residual, which lies as the
    /// results do, by the same kernel. With a gate, `out` is `[pairs, M / 2]`.
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
    /// [`OperandFault::NoFp8`] on other GPUs, [`ActivationFault::Dtype`] for activations in f32,
    /// [`OperandFault::RoundedWeights`] for NVFP4 weights without [`Fp8Options::round_weights`],
    /// [`OperandFault::Fp8Experts`] for experts whose scales do not start on 4 bytes,
    /// [`OperandFault::Weights`] and [`OperandFault::Layout`] for weights that are not multiplied,
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    pub fn plan(self, pairs: usize) -> Result<ExpertsPlanFp8<'a, T, O>> {
        let Self { gpu, experts, epilogue, options, given } = self;
        let (shape, per_group) = (experts.shape(), options.per_group);
        check_operands::<T>(shape, options)?;
        limited("pairs of a token and an expert", pairs, launch::PAIR_LIMIT)?;
        epilogue.check(shape.rows, experts.count(), pairs)?;
        let key = key::<T>(experts, pairs);
        let make = || Fp8ExpertsPlan::new(&gpu.kernels, key, per_group, given);
        let plan = match given {
            _ if [shape.rows, pairs, experts.count()].contains(&0) => None,
            Some(_) => Some(Arc::new(make()?)),
            None => Some(gpu.plans.fp8_experts.get((key, per_group), make)?),
        };
        gpu.kernels.ready_all(plan.iter().flat_map(|plan| plan.kernels()))?;
        Ok(ExpertsPlanFp8 { linear: self, pairs, plan })
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlanFp8<'_, T, O> {
    /// Bytes of workspace for [`Self::run`]; 0 if there is nothing to multiply.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.memory_bytes())
    }

    /// Bytes of workspace, semaphores not counted.
    fn memory_bytes(&self) -> u64 {
        self.plan.as_ref().map_or(0, |plan| plan.workspace_bytes().max(slot_bytes(self.linear.experts)))
    }

    /// The kernels but for the one that quantizes activations, in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.plan.iter().flat_map(|plan| plan.kernels())
    }
}

impl<T, O> ExpertsPlanFp8<'_, T, O> {
    /// The configuration; `None` if there is nothing to multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.plan.as_ref().map(|plan| plan.product.config)
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlanFp8<'_, T, O> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]`, as `rows` says, and `out` `[pairs, M]`, or
    /// under a gate `[pairs, M / 2]`, without gaps. Sums have the bits of
    /// [`microscale_formats::fp8_dot`], except where thread blocks share the K of a tile of
    /// results: they add their parts in f32.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// [`OperandFault::Limit`] for more columns than are quantized, errors about lengths,
    /// [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'s, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: Fp8Activations<'_, T>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let LinearExpertsFp8 { gpu, experts, epilogue, .. } = &self.linear;
        let (mut workspace, mut out) = (workspace.into(), out.into());
        let (shape, pairs, kernels) = (experts.shape(), self.pairs, &gpu.kernels);
        check_routing(routing, experts.count(), pairs)?;
        let results = epilogue.check(shape.rows, experts.count(), pairs)?;
        Shape::new(pairs, results).check("the output", out.len())?;
        let Some(planned) = &self.plan else { return Ok(()) };
        let ((codes, scales, slots), _weights) = experts.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, planned.product.config.activations)?;
        let ([semaphores, plan], _used) = workspace.write(stream, self.memory_bytes())?;
        let sorted = Sorted { pairs: pairs as u32, top_k: routing.top_k as u32 };
        let grid = PlanGrid { sorted, ..planned.grid };
        let (tokens, _tokens) = routing.tokens.device_ptr(stream);
        let (order, _order) = routing.order.device_ptr(stream);
        let [from, to] = lists(rows, [tokens, order]);
        let listed = Routed { plan, from, to };
        let (slot, apply) = (slots.unwrap_or(plan), apply_direction(experts.direction()));
        let operands = Operands { codes, scales, slot, activations: 0, out, apply, steps };
        let (product, layout) = (&planned.product, planned.layout);
        let quantized = plan + planned.plan_bytes();
        let memory = [semaphores, quantized + layout.total_bytes()];
        let size = [rows.activation_rows([pairs, routing.top_k]), shape.cols];
        // SAFETY: experts' weights are linear, each starts on what kernels ask for, and each has a
        // slot, or the bytes of one. The plan is made for the product's token tiles, and the lists
        // have the rows of all sorted pairs. Quantized activations, which have at most a row per
        // pair, and the product's workspace follow the plan and each other, with the bytes that
        // were asked for. The borrows keep the buffers from overlapping, until the launches are
        // enqueued.
        unsafe {
            activations.enqueue(gpu, stream, size, layout, quantized, |x| {
                launch::plan_experts(kernels, stream, routing, grid, plan)?;
                let x = (x, layout.token_scales);
                launch::product_fp8(kernels, stream, product, x, &operands, listed, memory)
            })
        }
    }
}
