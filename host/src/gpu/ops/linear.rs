//! Products of 4-bit weights and activations on a GPU: plan once, then run.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::element::Dtype;
use crate::error::Result;
use crate::gemv::{Activation, ProductOf, check_multiplied, check_weights, check_weights_shape};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::{Operands, Routed, Steps, apply_global};
use crate::gpu::memory::tensor::DeviceTensor;
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::memory::workspace::{GemmWorkspace, GemmWorkspaceMut, SEMAPHORE_BYTES};
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::plan::linear::{LinearPlan, most_workspace_bytes, multiplied};
use crate::gpu::plan::request::Request;
use crate::gpu::runtime::driver::doing;
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

/// A product of weights and activations to plan: `out[n, m] = Σₖ weights[m, k] · activations[n,
/// k]`, and the epilogue.
///
/// Made by [`Gpu::linear`]. `T` is the dtype of the activations, `O` the dtype of the results.
/// Weights are `[M, K]` in NVFP4 or MXFP4 with linear scales.
#[derive(Clone, Copy)]
pub struct Linear<'a, T, O> {
    gpu: &'a Gpu,
    weights: DeviceTensorView<'a>,
    epilogue: DeviceEpilogue<'a, T, O>,
    gemv_only: bool,
    given: Option<GemmConfig>,
}

/// Shows the shape and the steps of the epilogue.
impl<T, O> fmt::Debug for Linear<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("Linear");
        linear.field("weights", &self.weights.shape()).field("epilogue", &self.epilogue);
        linear.finish_non_exhaustive()
    }
}

/// The kernels of a product of a number of tokens, their launch parameters and their workspace.
///
/// Plans are cached by shape, tokens and dtype: making one again, and running it, allocates nothing
/// on the host or the GPU.
pub struct Plan<'a, T, O> {
    linear: Linear<'a, T, O>,
    tokens: usize,
    aligned: Arc<LinearPlan>,
    workspace_bytes: u64,
}

/// Shows the configuration and the bytes of workspace.
impl<T, O> fmt::Debug for Plan<'_, T, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.aligned.product.map(|product| product.config);
        let mut plan = f.debug_struct("Plan");
        plan.field("tokens", &self.tokens).field("config", &config.map(|config| config.to_string()));
        plan.field("workspace_bytes", &self.workspace_bytes).finish_non_exhaustive()
    }
}

/// Bytes of a workspace with its semaphores; 0 if there is none.
pub(in crate::gpu) fn with_semaphores(bytes: u64) -> usize {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if bytes == 0 { 0 } else { bytes.saturating_add(SEMAPHORE_BYTES) }
}

impl Gpu {
    /// A product with weights in device memory, `[M, K]`, to plan for a number of tokens.
    ///
    /// ```no_run
    /// # use half::bf16;
    /// # use microscale::Result;
    /// # use microscale::gpu::cudarc::driver::CudaSlice;
    /// # use microscale::gpu::{DeviceTensor, GemmWorkspace, Gpu};
    /// # fn forward(
    /// #     gpu: &Gpu,
    /// #     weights: &DeviceTensor,
    /// #     x: &CudaSlice<bf16>,
    /// #     y: &mut CudaSlice<bf16>,
    /// # ) -> Result<()> {
    /// let stream = gpu.stream();
    /// let plan = gpu.linear::<bf16, bf16>(weights).plan(64)?;
    /// let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    /// plan.run(stream, x, &mut workspace, y)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn linear<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        weights: impl Into<DeviceTensorView<'a>>,
    ) -> Linear<'a, T, O> {
        let epilogue = DeviceEpilogue::default();
        Linear { gpu: self, weights: weights.into(), epilogue, gemv_only: false, given: None }
    }

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

    /// Multiplies host memory: copies the operands over, multiplies, copies the results back, and
    /// waits. `activations` is `[N, K]` for N tokens, `out` `[N, M]`.
    ///
    /// Weights are copied by every call. To copy them once, use
    /// [`Device::load_weights`](crate::Device::load_weights), or [`Self::linear`] with a
    /// [`DeviceTensor`].
    ///
    /// # Errors
    /// The errors of [`Plan::run`].
    pub fn gemm_weights<'a, T: Activation>(
        &self,
        weights: impl Into<QuantizedView<'a>>,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let weights = weights.into();
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        if Shape::new(tokens, weights.rows()).is_empty() {
            return Ok(());
        }
        self.gemm_on_host(&DeviceTensor::from_host(&self.stream, weights)?, activations, tokens, out)
    }

    /// [`Self::gemm_weights`] with weights in device memory.
    pub(crate) fn gemm_on_host<T: Activation>(
        &self,
        weights: &DeviceTensor,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let shape = weights.shape();
        let rows = check_weights(shape, activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        // There are no empty buffers.
        let nothing = [T::default()];
        let activations = if shape.cols == 0 { &nothing } else { &activations[..tokens * shape.cols] };
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        let plan = self.linear::<T, T>(weights).plan(tokens)?;
        let mut workspace = GemmWorkspace::new(&self.stream, plan.workspace_bytes())?;
        plan.run(&self.stream, &activations, &mut workspace, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }
}

impl<'a, T: Activation, O: ProductOf<T>> Linear<'a, T, O> {
    /// The product followed by a bias, a gate and a residual, in this order, by the same kernels,
    /// before the only rounding. With a gate, `out` is `[N, M / 2]`.
    #[must_use]
    pub fn epilogue(self, epilogue: DeviceEpilogue<'a, T, O>) -> Self {
        Self { epilogue, ..self }
    }

    /// Only kernels that need no workspace: the GEMV's, up to 32 tokens at a time. Activations in
    /// f32 have none.
    #[must_use]
    pub fn without_workspace(self) -> Self {
        Self { gemv_only: true, ..self }
    }

    /// The product by a given configuration, for tests and measurements. Its formats and dtype are
    /// ignored.
    #[cfg(feature = "internals")]
    #[must_use]
    pub fn by(self, config: GemmConfig) -> Self {
        Self { given: Some(config), ..self }
    }

    /// Plans the product of `tokens` tokens, and compiles its kernels, or returns the plan that was
    /// made before. Kernels for activations that do not start on 16 bytes are compiled when they
    /// are first used. Measured times of the GPU decide which kernels are used (`docs/kernels.md`).
    ///
    /// # Errors
    /// [`crate::OperandFault::Weights`] and [`crate::OperandFault::Layout`] for weights that are
    /// not multiplied, [`crate::OperandFault::Limit`] beyond the kernels' limits,
    /// [`crate::OperandFault::Gate`] for an odd number of rows under a gate, errors about the
    /// lengths of the epilogue's operands, and [`crate::Error::Gpu`].
    pub fn plan(self, tokens: usize) -> Result<Plan<'a, T, O>> {
        check_weights_shape(self.weights.shape())?;
        self.epilogue.check(self.weights.rows(), 1, tokens)?;
        let aligned = self.planned(tokens, true)?;
        self.gpu.kernels.ready_all(aligned.kernels())?;
        let mut workspace_bytes = aligned.workspace_bytes();
        if self.given.is_none() {
            // Activations that do not start on 16 bytes may get other kernels.
            workspace_bytes = workspace_bytes.max(self.planned(tokens, false)?.workspace_bytes());
        }
        Ok(Plan { linear: self, tokens, aligned, workspace_bytes })
    }

    /// The plan for activations that start on 16 bytes or not.
    fn planned(&self, tokens: usize, aligned: bool) -> Result<Arc<LinearPlan>> {
        let Self { gpu, weights, gemv_only, given, .. } = self;
        let key = Request {
            weights: weights.shape(),
            tokens,
            activations: T::DTYPE,
            aligned: aligned || multiplied(T::DTYPE).0 > 1,
            gemv_only: *gemv_only,
        };
        if given.is_some() {
            return LinearPlan::new(&gpu.kernels, key, *given).map(Arc::new);
        }
        gpu.plans.linear.get(key, || LinearPlan::new(&gpu.kernels, key, None))
    }
}

impl<T: Activation, O: ProductOf<T>> Plan<'_, T, O> {
    /// Bytes of workspace for [`Self::run`]; 0 if it needs none.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.workspace_bytes)
    }

    /// The kernels for activations that start on 16 bytes, in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.aligned.kernels()
    }

    /// The configuration for activations that start on 16 bytes; `None` if there is nothing to
    /// multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.aligned.product.map(|product| product.config)
    }

    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[N, K]` and `out` `[N, M]`, without gaps. Tensor cores add the products:
    /// [`microscale_formats::weights`] says how far results may be from the exact sum. Activations
    /// in f32 are not rounded: each is multiplied as three in bf16, whose sum it is, except for
    /// bits below 2^−133.
    ///
    /// Rows that are not a multiple of 32 columns, and MXFP4 scales that leave the activations'
    /// dtype no room for the products, take the reference, more slowly; its last bits are the
    /// CPU's.
    ///
    /// # Errors
    /// [`crate::OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// errors about lengths, [`crate::Error::Alignment`], [`crate::Error::OtherContext`] and
    /// [`crate::Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<DeviceView<'x, T>>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let Linear { gpu, weights, epilogue, .. } = self.linear;
        let (activations, mut workspace, mut out) = (activations.into(), workspace.into(), out.into());
        let (shape, tokens, kernels) = (weights.shape(), self.tokens, &gpu.kernels);
        check_multiplied(shape, activations.len(), tokens)?;
        let results = epilogue.check(shape.rows, 1, tokens)?;
        Shape::new(tokens, results).check("the output", out.len())?;
        if shape.rows == 0 || tokens == 0 {
            return Ok(());
        }
        let (activations, _activations_read) = activations.read(stream, "the activations", 1)?;
        let ([codes, scales, slot], _weights_read) = weights.read(stream)?;
        let (out, _written) = out.write(stream, "the output", 1)?;
        let (steps, _steps_read) = epilogue.read(stream, T::DTYPE)?;
        let other;
        let plan = if activations.is_multiple_of(16) {
            &self.aligned
        } else {
            other = self.linear.planned(tokens, false)?;
            &other
        };
        let Some(product) = &plan.product else { return Ok(()) };
        let ([semaphores, memory], _used) = workspace.write(stream, self.workspace_bytes)?;
        let apply = apply_global(weights);
        let operands = Operands { codes, scales, slot, activations, out, apply, steps };
        let routed = Routed::default();
        let Some([parts_bytes, sums_bytes]) = plan.parts else {
            // SAFETY: layout and lengths were checked above, and the plan is for this shape, dtype
            // and alignment. The borrows keep the buffers from overlapping, until the launches are
            // enqueued.
            return unsafe {
                launch::product(kernels, stream, product, &operands, routed, [semaphores, memory])
            };
        };
        let [parts, sums] = [memory, memory + parts_bytes];
        let products = Operands { activations: parts, out: sums, steps: Steps::SUMS, ..operands };
        // SAFETY: as for the product without parts. Parts, their products and the workspace of the
        // product follow each other, with the planned bytes, and each kernel reads the output of
        // the one before has written.
        unsafe {
            launch::split(kernels, stream, activations, parts, routed, [tokens, shape.cols])?;
            let memory = [semaphores, sums + sums_bytes];
            launch::product(kernels, stream, product, &products, routed, memory)?;
            launch::merge(kernels, stream, sums, out, steps, routed, [tokens, shape.rows])
        }
    }
}
