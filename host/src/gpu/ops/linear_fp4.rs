//! Products of 4-bit weights and 4-bit activations on a GPU: plan once, then run.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::gemm::TOKEN_LIMIT;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::error::{Error, OperandFault, Result};
use crate::gemv::{Activation, ProductOf, check_weights_shape};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, apply_global, limited, scale_grid};
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::ops::linear::with_semaphores;
use crate::gpu::plan::fp4::{FACTOR_BYTES, Fp4Plan, most_fp4_workspace_bytes};
use crate::gpu::plan::request::Request;
use crate::shape::{QuantizedShape, Shape};

/// A product of weights and activations, both in NVFP4 or both in MXFP4, to plan: `out[n, m] =
/// alpha · Σₖ weights[m, k] · activations[n, k]`, and the epilogue.
///
/// Made by [`Gpu::linear_fp4`]. `T` is the dtype of the epilogue's bias and `O` the dtype of the
/// results.
#[derive(Clone, Copy)]
pub struct LinearFp4<'a, T, O> {
    gpu: &'a Gpu,
    weights: DeviceTensorView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    alpha: f32,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for LinearFp4<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("LinearFp4");
        linear.field("weights", &self.weights.shape()).field("alpha", &self.alpha);
        linear.field("epilogue", &self.epilogue).finish_non_exhaustive()
    }
}

/// The kernels of a product of a number of tokens, with their workspace.
///
/// Plans are cached: making one again, and running it, allocates nothing on the host or the GPU.
pub struct PlanFp4<'a, T, O> {
    linear: LinearFp4<'a, T, O>,
    tokens: usize,
    /// `None` if there is nothing to multiply.
    plan: Option<Arc<Fp4Plan>>,
}

/// Shows the configuration and the bytes of workspace.
impl<T, O> fmt::Debug for PlanFp4<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.plan.as_ref().map(|plan| plan.product.config.to_string());
        let mut plan = f.debug_struct("PlanFp4");
        plan.field("tokens", &self.tokens).field("config", &config).finish_non_exhaustive()
    }
}

impl Gpu {
    /// A product with weights in device memory, `[M, K]`, and activations in the same format, to
    /// plan for a number of tokens.
    ///
    /// Blackwell GPUs multiply codes and scales as they are stored (`tcgen05` on compute capability
    /// 10.0, `mma.sync` with block scales on 12.0). There, K must be a multiple of 64 in NVFP4.
    /// Other GPUs, and other K, decode the activations to bf16, or NVFP4 to f16 if `T` is f16, and
    /// multiply as [`Self::linear`] does. Decoding is exact.
    ///
    /// ```no_run
    /// # use half::bf16;
    /// # use microscale::Result;
    /// # use microscale::gpu::cudarc::driver::CudaSlice;
    /// # use microscale::gpu::{DeviceTensor, GemmWorkspace, Gpu};
    /// # fn forward(
    /// #     gpu: &Gpu,
    /// #     weights: &DeviceTensor,
    /// #     x: &DeviceTensor,
    /// #     y: &mut CudaSlice<bf16>,
    /// # ) -> Result<()> {
    /// let stream = gpu.stream();
    /// let plan = gpu.linear_fp4::<bf16, bf16>(weights).alpha(0.5).plan(x.shape().rows)?;
    /// let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    /// plan.run(stream, x, &mut workspace, y)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn linear_fp4<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        weights: impl Into<DeviceTensorView<'a>>,
    ) -> LinearFp4<'a, T, O> {
        let epilogue = DeviceEpilogue::default();
        LinearFp4 { gpu: self, weights: weights.into(), epilogue, alpha: 1.0, given: None }
    }

    /// Bytes of a workspace that serves [`Self::linear_fp4`] with weights of a shape and any number
    /// of tokens up to `tokens`. 0 if there is nothing to multiply.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more tokens or columns than a GPU multiplies.
    pub fn fp4_workspace_bytes(&self, weights: QuantizedShape, tokens: usize) -> Result<usize> {
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        most_fp4_workspace_bytes(&self.kernels, weights, tokens).map(with_semaphores)
    }
}

impl<'a, T: Activation, O: ProductOf<T>> LinearFp4<'a, T, O> {
    /// Multiplies the sums by a number, before the epilogue.
    #[must_use]
    pub fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// The product followed by a bias, a gate and a residual, in this order, by the same kernels.
    /// With a gate, `out` is `[N, M / 2]`: rows of gate and up take turns
    /// ([`interleave_rows`](crate::interleave_rows)).
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

    /// Plans the product of `tokens` tokens, and compiles its kernels, or returns the plan that was
    /// made before.
    ///
    /// # Errors
    /// [`OperandFault::Weights`] and [`OperandFault::Layout`] for weights that are not multiplied,
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    pub fn plan(self, tokens: usize) -> Result<PlanFp4<'a, T, O>> {
        let Self { gpu, weights, epilogue, given, .. } = self;
        let shape = weights.shape();
        check_weights_shape(shape)?;
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        epilogue.check(shape.rows, 1, tokens)?;
        let make = || Fp4Plan::new(&gpu.kernels, shape, tokens, T::DTYPE, given);
        let key = Request { weights: shape, tokens, activations: T::DTYPE, aligned: true, gemv_only: false };
        let plan = match given {
            _ if shape.rows == 0 || tokens == 0 => None,
            Some(_) => Some(Arc::new(make()?)),
            None => Some(gpu.plans.fp4.get(key, make)?),
        };
        gpu.kernels.ready_all(plan.iter().flat_map(|plan| plan.kernels()))?;
        Ok(PlanFp4 { linear: self, tokens, plan })
    }
}

impl<T: Activation, O: ProductOf<T>> PlanFp4<'_, T, O> {
    /// Bytes of workspace for [`Self::run`]; 0 if there is nothing to multiply.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.plan.as_ref().map_or(0, |plan| plan.workspace_bytes()))
    }

    /// The kernels, in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.plan.iter().flat_map(|plan| plan.kernels())
    }

    /// The configuration; `None` if there is nothing to multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.plan.as_ref().map(|plan| plan.product.config)
    }

    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[N, K]` in the format of the weights, with linear or swizzled scales, and
    /// `out` is `[N, M]` or under a gate `[N, M / 2]`, without gaps. Sums are multiplied by a
    /// [factor](microscale_formats::fp4_dot::factor), alpha times both global scales.
    ///
    /// With block scales, sums have the bits of [`microscale_formats::fp4_dot`], except where
    /// thread blocks share the K of a tile of results: they add their parts in f32. Otherwise
    /// [`microscale_formats::weights`] says how far results may be from the exact sum.
    ///
    /// # Errors
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`OperandFault::Workspace`] if there are fewer bytes than
    /// [`Self::workspace_bytes`], errors about lengths, [`Error::Alignment`],
    /// [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<DeviceTensorView<'x>>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let LinearFp4 { gpu, weights, epilogue, alpha, .. } = self.linear;
        let (activations, mut workspace, mut out) = (activations.into(), workspace.into(), out.into());
        let (shape, x) = (weights.shape(), activations.shape());
        if x.format != shape.format {
            let fault = OperandFault::Formats { matrix: shape.format, vector: x.format };
            return Err(Error::Operands(fault));
        }
        if x.cols != shape.cols {
            let fault = OperandFault::Activations { weights: shape.cols, activations: x.cols };
            return Err(Error::Operands(fault));
        }
        Shape::new(self.tokens, x.cols).check("the activations", x.rows.saturating_mul(x.cols))?;
        let results = epilogue.check(shape.rows, 1, self.tokens)?;
        Shape::new(self.tokens, results).check("the output", out.len())?;
        let Some(plan) = &self.plan else { return Ok(()) };
        let (x_addresses, _activations_read) = activations.read(stream)?;
        let ([codes, scales, slot], _weights_read) = weights.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, plan.product.config.activations)?;
        let ([semaphores, factor], _used) = workspace.write(stream, plan.workspace_bytes())?;
        let workspace = [semaphores, factor, factor + FACTOR_BYTES];
        let params = Fp4Params {
            scales: scale_grid(x).0,
            eights: self.tokens as u64 * (x.blocks_per_row() * x.format.block() / 8) as u64,
            alpha,
            matrices: 1,
            activation_slots: 1,
            weights: apply_global(weights).0,
            activations: apply_global(activations).0,
            reserved: 0,
        };
        let apply = apply_global(weights);
        let operands = Operands { codes, scales, slot, activations: 0, out, apply, steps };
        // SAFETY: formats, layouts and lengths were checked above, and the plan is for this shape.
        // Views start on 16 bytes. The borrows keep the buffers from overlapping, until the
        // launches are enqueued.
        unsafe {
            let (x, routed) = ((x_addresses, params), Routed::default());
            launch::product_fp4(&gpu.kernels, stream, plan, x, &operands, routed, workspace)
        }
    }
}
