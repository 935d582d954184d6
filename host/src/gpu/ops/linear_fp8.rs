//! Products of 4-bit weights and FP8 activations (W4A8) on a GPU: plan once, then run.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::activations::COLUMN_LIMIT;
use microscale_kernels_abi::gemm::TOKEN_LIMIT;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::element::Dtype;
#[cfg(doc)]
use crate::error::OperandFault;
use crate::error::{ActivationFault, Error, Result};
use crate::fp8::Fp8Options;
use crate::gemv::{Activation, ProductOf};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, apply_global, limited};
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::ops::linear::with_semaphores;
use crate::gpu::plan::fp8::{Fp8Layout, Fp8Plan, most_fp8_workspace_bytes};
use crate::gpu::plan::request::Request;
use crate::shape::{QuantizedShape, Shape};

/// Activations of a W4A8 product, `[N, K]` without gaps.
#[derive(Clone, Copy, Debug)]
pub enum Fp8Activations<'a, T> {
    /// Values in f16 or bf16. They are quantized first, as
    /// [`quantize_activations`](crate::quantize_activations()) does.
    Values(DeviceView<'a, T>),
    /// E4M3 codes and f32 scales, which multiply codes: `[N]`, or per group `[N, K / 128]`, rounded
    /// up. Codes start on 8 bytes.
    Quantized {
        /// Codes.
        codes: DeviceView<'a, u8>,
        /// Scales.
        scales: DeviceView<'a, f32>,
    },
}

/// A product of 4-bit weights and FP8 activations to plan: `out[n, m] = Σₖ weights[m, k] ·
/// activations[n, k]`, and the epilogue.
///
/// Made by [`Gpu::linear_fp8`]. `T` is the dtype of unquantized activations and of the epilogue's
/// bias, f16 or bf16, and `O` the dtype of the results.
#[derive(Clone, Copy)]
pub struct LinearFp8<'a, T, O> {
    gpu: &'a Gpu,
    weights: DeviceTensorView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    options: Fp8Options,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for LinearFp8<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("LinearFp8");
        linear.field("weights", &self.weights.shape()).field("options", &self.options);
        linear.field("epilogue", &self.epilogue).finish_non_exhaustive()
    }
}

/// The kernels of a product of a number of tokens, with their workspace.
///
/// Plans are cached: making one again, and running it, allocates nothing on the host or the GPU.
pub struct PlanFp8<'a, T, O> {
    linear: LinearFp8<'a, T, O>,
    tokens: usize,
    /// `None` if there is nothing to multiply.
    plan: Option<Arc<Fp8Plan>>,
}

/// Shows the configuration.
impl<T, O> fmt::Debug for PlanFp8<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.plan.as_ref().map(|plan| plan.product.config.to_string());
        let mut plan = f.debug_struct("PlanFp8");
        plan.field("tokens", &self.tokens).field("config", &config).finish_non_exhaustive()
    }
}

impl<T: Activation> Fp8Activations<'_, T> {
    /// Calls `product` with the addresses of codes and scales of `rows` rows of `cols` columns.
    /// Values are quantized first, to the memory at `into`.
    ///
    /// # Errors
    /// [`OperandFault::Limit`] for more columns than are quantized, errors about lengths,
    /// [`Error::Alignment`], [`Error::OtherContext`], [`Error::Gpu`], and the errors of `product`.
    ///
    /// # Safety
    /// `into` has the bytes of `layout`, which is for `rows` rows or more, on 16 bytes. Nothing
    /// else uses them until the kernels that `product` enqueues have ended.
    pub(in crate::gpu) unsafe fn enqueue(
        self,
        gpu: &Gpu,
        stream: &Arc<CudaStream>,
        [rows, cols]: [usize; 2],
        layout: Fp8Layout,
        into: u64,
        product: impl FnOnce([u64; 2]) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Values(values) => {
                Shape::new(rows, cols).check("the activations", values.len())?;
                limited("columns of unquantized activations", cols, COLUMN_LIMIT)?;
                let (values, _read) = values.read(stream, "the activations", 1)?;
                let [codes_bytes, _] = layout.bytes;
                let [codes, scales] = [into, into + codes_bytes];
                let (kernels, per_group) = (&gpu.kernels, layout.token_scales > 1);
                let addresses = [values, codes, scales];
                if cols > 0 {
                    // SAFETY: the lengths were checked, and the caller promises room for codes and
                    // scales, which start on 16 bytes. The guard keeps the values until the launch
                    // is enqueued.
                    unsafe {
                        let size = [rows, cols];
                        launch::quantize_rows_fp8(kernels, stream, T::DTYPE, size, per_group, addresses)?;
                    }
                }
                product([codes, scales])
            }
            Self::Quantized { codes, scales } => {
                Shape::new(rows, cols).check("the codes of the activations", codes.len())?;
                Shape::new(rows, layout.token_scales).check("the scales of the activations", scales.len())?;
                let (codes, _codes_read) = codes.read(stream, "the codes of the activations", 8)?;
                let (scales, _scales_read) = scales.read(stream, "the scales of the activations", 1)?;
                product([codes, scales])
            }
        }
    }
}

/// Checks that weights of a shape can be multiplied by FP8 activations from values in `T`.
///
/// # Errors
/// [`ActivationFault::Dtype`] for f32, [`OperandFault::RoundedWeights`] for NVFP4 weights that must
/// not be rounded, [`OperandFault::Weights`] and [`OperandFault::Layout`].
pub(in crate::gpu) fn check_operands<T: Activation>(
    weights: QuantizedShape,
    options: Fp8Options,
) -> Result<()> {
    if T::DTYPE == Dtype::F32 {
        return Err(Error::Activations(ActivationFault::Dtype));
    }
    options.check_weights(weights)
}

impl Gpu {
    /// A product with weights in device memory, `[M, K]` in MXFP4 or NVFP4, and activations in FP8
    /// (E4M3), to plan for a number of tokens.
    ///
    /// Needs a GPU of compute capability 9.0, whose tensor cores multiply FP8 at twice the rate of
    /// bf16. [`microscale_formats::fp8_dot`] defines the results. MXFP4 weights lose nothing. NVFP4
    /// weights are rounded, which [`Fp8Options::round_weights`] must allow.
    ///
    /// ```no_run
    /// # use half::bf16;
    /// # use microscale::Result;
    /// # use microscale::gpu::cudarc::driver::CudaSlice;
    /// # use microscale::gpu::{DeviceTensor, Fp8Activations, GemmWorkspace, Gpu};
    /// # fn forward(
    /// #     gpu: &Gpu,
    /// #     weights: &DeviceTensor,
    /// #     x: &CudaSlice<bf16>,
    /// #     y: &mut CudaSlice<bf16>,
    /// #     tokens: usize,
    /// # ) -> Result<()> {
    /// let stream = gpu.stream();
    /// let plan = gpu.linear_fp8::<bf16, bf16>(weights).plan(tokens)?;
    /// let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    /// plan.run(stream, Fp8Activations::Values(x.into()), &mut workspace, y)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn linear_fp8<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        weights: impl Into<DeviceTensorView<'a>>,
    ) -> LinearFp8<'a, T, O> {
        LinearFp8 {
            gpu: self,
            weights: weights.into(),
            epilogue: DeviceEpilogue::default(),
            options: Fp8Options::default(),
            given: None,
        }
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
}

impl<'a, T: Activation, O: ProductOf<T>> LinearFp8<'a, T, O> {
    /// How activations are scaled, and whether NVFP4 weights may be rounded.
    #[must_use]
    pub fn options(self, options: Fp8Options) -> Self {
        Self { options, ..self }
    }

    /// The product followed by a bias, a gate and a residual, in this order, by the same kernel.
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
    /// [`OperandFault::NoFp8`] on other GPUs, [`ActivationFault::Dtype`] for activations in f32,
    /// [`OperandFault::RoundedWeights`] for NVFP4 weights without [`Fp8Options::round_weights`],
    /// [`OperandFault::Weights`] and [`OperandFault::Layout`] for
    /// weights that are not multiplied, [`Error::NoKernel`] for NVFP4 if K is not a multiple of 64,
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    pub fn plan(self, tokens: usize) -> Result<PlanFp8<'a, T, O>> {
        let Self { gpu, weights, epilogue, options, given } = self;
        let (shape, per_group) = (weights.shape(), options.per_group);
        check_operands::<T>(shape, options)?;
        limited("rows of activations", tokens, TOKEN_LIMIT)?;
        epilogue.check(shape.rows, 1, tokens)?;
        let make = || Fp8Plan::new(&gpu.kernels, shape, tokens, T::DTYPE, per_group, given);
        let key = Request { weights: shape, tokens, activations: T::DTYPE, aligned: true, gemv_only: false };
        let plan = match given {
            _ if shape.rows == 0 || tokens == 0 => None,
            Some(_) => Some(Arc::new(make()?)),
            None => Some(gpu.plans.fp8.get((key, per_group), make)?),
        };
        gpu.kernels.ready_all(plan.iter().flat_map(|plan| plan.kernels()))?;
        Ok(PlanFp8 { linear: self, tokens, plan })
    }
}

impl<T: Activation, O: ProductOf<T>> PlanFp8<'_, T, O> {
    /// Bytes of workspace for [`Self::run`]; 0 if there is nothing to multiply.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.plan.as_ref().map_or(0, |plan| plan.workspace_bytes()))
    }

    /// The kernels after the activations were quantized, in the order of their launches.
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
    /// `out` is `[N, M]`, or under a gate `[N, M / 2]`, without gaps. Sums have the bits of
    /// [`microscale_formats::fp8_dot`], except where thread blocks share the K of a tile of
    /// results: they add their parts in f32.
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// [`OperandFault::Limit`] for more columns than are quantized, errors about lengths,
    /// [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'s, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: Fp8Activations<'_, T>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let LinearFp8 { gpu, weights, epilogue, .. } = self.linear;
        let (mut workspace, mut out) = (workspace.into(), out.into());
        let shape = weights.shape();
        let results = epilogue.check(shape.rows, 1, self.tokens)?;
        Shape::new(self.tokens, results).check("the output", out.len())?;
        let Some(plan) = &self.plan else { return Ok(()) };
        let ([codes, scales, slot], _weights_read) = weights.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, plan.product.config.activations)?;
        let (workspace, _used) = workspace.write(stream, plan.workspace_bytes())?;
        let ([semaphores, quantized], layout) = (workspace, plan.layout);
        let memory = [semaphores, quantized + layout.total_bytes()];
        let apply = apply_global(weights);
        let operands = Operands { codes, scales, slot, activations: 0, out, apply, steps };
        let size = [self.tokens, shape.cols];
        // SAFETY: formats, layouts and lengths are checked here and by `enqueue`, and the plan is
        // for this shape. The workspace has room for quantized activations before the product's
        // memory. The borrows keep the buffers from overlapping, until the launches are enqueued.
        unsafe {
            activations.enqueue(gpu, stream, size, layout, quantized, |x| {
                let (product, x) = (&plan.product, (x, layout.token_scales));
                launch::product_fp8(&gpu.kernels, stream, product, x, &operands, Routed::default(), memory)
            })
        }
    }
}
