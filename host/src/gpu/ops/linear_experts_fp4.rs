//! Products of experts' 4-bit weights and 4-bit activations on a GPU: plan once, then run.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, SyncOnDrop};
use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::experts::{PlanGrid, Sorted};
use microscale_kernels_abi::gemm::fp4::Fp4Params;
use microscale_kernels_abi::{GemmConfig, GlobalSlot, KernelId};

use crate::element::Dtype;
use crate::error::{Error, OperandFault, Result};
use crate::experts::ExpertRows;
use crate::gemv::{Activation, ProductOf};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, apply_direction, limited, scale_grid};
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::experts_view::DeviceExpertsView;
use crate::gpu::memory::tensor::DeviceTensor;
use crate::gpu::memory::tensor_view::{DeviceTensorView, GLOBAL_WORDS};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::ops::linear::with_semaphores;
use crate::gpu::ops::linear_experts::{check_routing, experts_key, lists};
use crate::gpu::plan::experts::{ExpertsKey, most_experts_bytes};
use crate::gpu::plan::fp4::{decoded_bytes, whole_blocks};
use crate::gpu::plan::fp4_experts::{Fp4ExpertsPlan, factor_bytes};
use crate::shape::Shape;

const SLOTS: &str = "the global scales of the activations";

/// Rows of FP4 activations of a product with experts' weights: `[tokens, K]`, or `[pairs, K]` if
/// each pair has its own row, with linear or swizzled scales.
///
/// A tensor has one global scale, or none. [`Self::global_slots`] gives one per expert.
#[derive(Clone, Copy, Debug)]
pub struct Fp4Activations<'a> {
    rows: DeviceTensorView<'a>,
    slots: Option<(Direction, DeviceView<'a, u32>)>,
}

impl<'a> Fp4Activations<'a> {
    /// Applies a global scale per expert instead of one for all rows: the rows of an expert were
    /// quantized with its global scale.
    ///
    /// Slots lie as in [`DeviceExpertsView::with_global_slots`].
    #[must_use]
    pub fn global_slots(self, direction: Direction, slots: impl Into<DeviceView<'a, u32>>) -> Self {
        Self { slots: Some((direction, slots.into())), ..self }
    }

    /// The direction of the global scales, or `None` if there are none.
    fn direction(&self) -> Option<Direction> {
        self.slots.map_or(self.rows.direction(), |(direction, _)| Some(direction))
    }

    /// Checks slots for `experts` experts.
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`] if the format has no global scales, and [`Error::Length`] for too
    /// few slots.
    fn check_slots(&self, experts: usize) -> Result<()> {
        let Some((_, slots)) = self.slots else { return Ok(()) };
        if !self.rows.format().has_global_scale() {
            return Err(Error::NoGlobalScale { format: self.rows.format() });
        }
        Shape::new(experts, GLOBAL_WORDS).check(SLOTS, slots.len())
    }

    /// The addresses of codes, scales and slots.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    fn read(self, stream: &'a CudaStream) -> Result<([u64; 3], [SyncOnDrop<'a>; 4])> {
        let ([codes, scales, global], [codes_read, scales_read, global_read]) = self.rows.read(stream)?;
        let (slots, slots_read) = match self.slots {
            Some((_, slots)) => slots.read(stream, SLOTS, align_of::<GlobalSlot>())?,
            None => (global, SyncOnDrop::Record(None)),
        };
        Ok(([codes, scales, slots], [codes_read, scales_read, global_read, slots_read]))
    }
}

impl<'a> From<DeviceTensorView<'a>> for Fp4Activations<'a> {
    fn from(rows: DeviceTensorView<'a>) -> Self {
        Self { rows, slots: None }
    }
}

impl<'a> From<&'a DeviceTensor> for Fp4Activations<'a> {
    fn from(tensor: &'a DeviceTensor) -> Self {
        DeviceTensorView::from(tensor).into()
    }
}

/// A product of rows of FP4 activations and their experts' weights in the same format, to plan.
///
/// Made by [`Gpu::linear_experts_fp4`]. `T` is the dtype of the epilogue's bias and `O` the dtype of
/// the results.
#[derive(Clone, Copy)]
pub struct LinearExpertsFp4<'a, T, O> {
    gpu: &'a Gpu,
    experts: DeviceExpertsView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    alpha: f32,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for LinearExpertsFp4<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("LinearExpertsFp4");
        linear.field("experts", &self.experts.count()).field("weights", &self.experts.shape());
        linear.field("alpha", &self.alpha).field("epilogue", &self.epilogue).finish_non_exhaustive()
    }
}

/// The kernels of a product with experts' weights for a number of pairs, with its workspace.
pub struct ExpertsPlanFp4<'a, T, O> {
    linear: LinearExpertsFp4<'a, T, O>,
    pairs: usize,
    /// `None` if there is nothing to multiply.
    plan: Option<Arc<Fp4ExpertsPlan>>,
}

/// Shows the configuration.
impl<T, O> fmt::Debug for ExpertsPlanFp4<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.config().map(|config| config.to_string());
        let mut plan = f.debug_struct("ExpertsPlanFp4");
        plan.field("pairs", &self.pairs).field("config", &config).finish_non_exhaustive()
    }
}

impl Gpu {
    /// A product with experts' weights in device memory, `[experts, M, K]`, and activations in the
    /// same format, NVFP4 or MXFP4, to plan for a number of pairs.
    ///
    /// Rows are routed as for [`Self::linear_experts`], and multiplied as by [`Self::linear_fp4`].
    /// Blackwell GPUs multiply codes and scales as they are stored if each expert's scales
    /// start on 4 bytes. Other GPUs, and other experts, decode the activations.
    ///
    /// A batched product, `[batch, N, K]` times `[batch, M, K]`, has an expert per matrix: route
    /// `batch * N` pairs with a `top_k` of 1, the first N to expert 0, and run it with
    /// [`ExpertRows::Sorted`].
    pub fn linear_experts_fp4<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExpertsFp4<'a, T, O> {
        let epilogue = DeviceEpilogue::default();
        LinearExpertsFp4 { gpu: self, experts: experts.into(), epilogue, alpha: 1.0, given: None }
    }

    /// Bytes of a workspace that serves [`Self::linear_experts_fp4`] with any number of pairs of a
    /// token and an expert up to `pairs`.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more pairs than a GPU multiplies.
    pub fn experts_fp4_workspace_bytes<'e>(
        &self,
        experts: impl Into<DeviceExpertsView<'e>>,
        pairs: usize,
    ) -> Result<usize> {
        let experts = experts.into();
        let shape = experts.shape();
        let of_decoded = self.experts_workspace_bytes(experts, pairs, Dtype::Bf16)?;
        let key = key::<half::bf16>(experts, pairs);
        let configs = GemmConfig::for_fp4(shape.format, Dtype::Bf16).filter(|_| key.packable);
        let native = with_semaphores(most_experts_bytes(&self.kernels, configs, key));
        let before = factor_bytes(experts.count()).saturating_add(decoded_bytes(pairs, whole_blocks(shape)));
        Ok(of_decoded.max(native).saturating_add(usize::try_from(before).unwrap_or(usize::MAX)))
    }
}

/// The key of a product's plan.
fn key<T: Activation>(experts: DeviceExpertsView<'_>, pairs: usize) -> ExpertsKey {
    experts_key::<T>(experts, whole_blocks(experts.shape()), pairs)
}

impl<'a, T: Activation, O: ProductOf<T>> LinearExpertsFp4<'a, T, O> {
    /// Multiplies the sums by a number, before the epilogue.
    #[must_use]
    pub fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// The product followed by a bias, `[experts, M]`, a gate and a residual, which lies as the
    /// results do, by the same kernels. With a gate, `out` is `[pairs, M / 2]`.
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
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    pub fn plan(self, pairs: usize) -> Result<ExpertsPlanFp4<'a, T, O>> {
        let Self { gpu, experts, epilogue, given, .. } = self;
        let shape = experts.shape();
        limited("pairs of a token and an expert", pairs, launch::PAIR_LIMIT)?;
        epilogue.check(shape.rows, experts.count(), pairs)?;
        let key = key::<T>(experts, pairs);
        let make = || Fp4ExpertsPlan::new(&gpu.kernels, key, given);
        let plan = match given {
            _ if shape.rows == 0 || pairs == 0 => None,
            Some(_) => Some(Arc::new(make()?)),
            None => Some(gpu.plans.fp4_experts.get(key, make)?),
        };
        gpu.kernels.ready_all(plan.iter().flat_map(|plan| plan.kernels()))?;
        Ok(ExpertsPlanFp4 { linear: self, pairs, plan })
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlanFp4<'_, T, O> {
    /// Bytes of workspace for [`Self::run`]; 0 if there is nothing to multiply.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.memory_bytes())
    }

    /// Bytes of workspace, semaphores not counted.
    fn memory_bytes(&self) -> u64 {
        self.plan.as_ref().map_or(0, |plan| plan.workspace_bytes())
    }

    /// The kernels, in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.plan.iter().flat_map(|plan| plan.kernels())
    }
}

impl<T, O> ExpertsPlanFp4<'_, T, O> {
    /// The configuration; `None` if there is nothing to multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.plan.as_ref().map(|plan| plan.fp4.product.config)
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlanFp4<'_, T, O> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]` in the format of the weights, as `rows` says,
    /// and `out` `[pairs, M]`, or under a gate `[pairs, M / 2]`, without gaps. Sums are multiplied
    /// by a [factor](microscale_formats::fp4_dot::factor), alpha times the global scales of the
    /// expert and of its activations. [`PlanFp4::run`](crate::gpu::PlanFp4::run) says how exact
    /// results are.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`OperandFault::Workspace`] if there are fewer bytes than
    /// [`Self::workspace_bytes`], [`Error::NoGlobalScale`] for slots with MXFP4, errors about
    /// lengths, [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<Fp4Activations<'x>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let LinearExpertsFp4 { gpu, experts, epilogue, alpha, .. } = &self.linear;
        let (activations, mut workspace, mut out) = (activations.into(), workspace.into(), out.into());
        let (shape, pairs, kernels) = (experts.shape(), self.pairs, &gpu.kernels);
        let x = activations.rows.shape();
        check_routing(routing, experts.count(), pairs)?;
        if x.format != shape.format {
            let fault = OperandFault::Formats { matrix: shape.format, vector: x.format };
            return Err(Error::Operands(fault));
        }
        if x.cols != shape.cols {
            let fault = OperandFault::Activations { weights: shape.cols, activations: x.cols };
            return Err(Error::Operands(fault));
        }
        let x_rows = rows.activation_rows([pairs, routing.top_k]);
        Shape::new(x_rows, x.cols).check("the activations", x.rows.saturating_mul(x.cols))?;
        activations.check_slots(experts.count())?;
        let results = epilogue.check(shape.rows, experts.count(), pairs)?;
        Shape::new(pairs, results).check("the output", out.len())?;
        let Some(planned) = &self.plan else { return Ok(()) };
        let (x_addresses, _activations_read) = activations.read(stream)?;
        let ((codes, scales, slots), _weights) = experts.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, planned.fp4.product.config.activations)?;
        let ([semaphores, plan], _used) = workspace.write(stream, self.memory_bytes())?;
        let sorted = Sorted { pairs: pairs as u32, top_k: routing.top_k as u32 };
        let grid = PlanGrid { sorted, ..planned.grid };
        let (tokens, _tokens) = routing.tokens.device_ptr(stream);
        let (order, _order) = routing.order.device_ptr(stream);
        let [from, to] = lists(rows, [tokens, order]);
        let (routed, apply) = (Routed { plan, from, to }, apply_direction(experts.direction()));
        let count = experts.count() as u32;
        let params = Fp4Params {
            scales: scale_grid(x).0,
            eights: x_rows as u64 * (x.blocks_per_row() * x.format.block() / 8) as u64,
            alpha: *alpha,
            matrices: count,
            activation_slots: if activations.slots.is_some() { count } else { 1 },
            weights: apply.0,
            activations: apply_direction(activations.direction()).0,
            reserved: 0,
        };
        // Kernels ignore the bytes of absent global scales. The workspace is longer than slots are.
        let slot = slots.unwrap_or(plan);
        let operands = Operands { codes, scales, slot, activations: 0, out, apply, steps };
        let factors = plan + planned.plan_bytes();
        let memory = [semaphores, factors, factors + planned.factor_bytes()];
        // SAFETY: experts' weights are linear, each starts on what kernels ask for, and each has a
        // slot, or the bytes of one. Activations have their rows, and a slot or one per expert. The
        // plan is made for the product's token tiles, and the lists have the rows of all sorted
        // pairs. Factors, decoded activations, which have at most a row per pair, and the product's
        // workspace follow the plan and each other, with the bytes that were asked for. The borrows
        // keep the buffers from overlapping, until the launches are enqueued.
        unsafe {
            launch::plan_experts(kernels, stream, routing, grid, plan)?;
            let x = (x_addresses, params);
            launch::product_fp4(kernels, stream, &planned.fp4, x, &operands, routed, memory)
        }
    }
}
