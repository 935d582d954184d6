//! Products of 4-bit weights and activations on a GPU: plan once, then run.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use microscale_formats::nvfp4::Direction;
use microscale_kernels_abi::gemm::TOKEN_LIMIT;
use microscale_kernels_abi::{GemmConfig, KernelId};

use crate::activations::ActivationRecipe;
use crate::element::Dtype;
#[cfg(doc)]
use crate::error::OperandFault;
use crate::error::{ActivationFault, Error, Result};
use crate::fp8::Fp8Options;
use crate::gemv::{Activation, ProductOf, check_weights_shape};
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::launch::arguments::limited;
use crate::gpu::memory::experts_view::DeviceExpertsView;
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::workspace::results_bytes;
use crate::gpu::ops::epilogue::DeviceEpilogue;
use crate::gpu::ops::linear_workspaces::with_semaphores;
use crate::gpu::ops::results::check_results;
use crate::gpu::plan::linear::multiplied;
use crate::gpu::plan::planned::{Kind, PlanKey, Planned};
use crate::gpu::plan::{fp4, fp8, linear};
use crate::shape::QuantizedShape;

/// A product of activations that are values in f32, f16 or bf16: the usual kind of a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub struct Values;

/// A product of activations in the format of the weights, NVFP4 or MXFP4: a kind of a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub struct Fp4;

/// A product of activations in FP8 (E4M3): a kind of a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8;

/// A product of weights and activations to plan: `out[n, m] = Σₖ weights[m, k] · activations[n,
/// k]`, and the epilogue.
///
/// Made by [`Gpu::linear`] and the functions next to it. Weights are `[M, K]` in NVFP4 or MXFP4
/// with linear scales. `T` is the dtype of values and of the epilogue's bias, `O` the dtype of the
/// results. `K` is the kind of activations, [`Values`], [`Fp4`] or [`Fp8`]. `W` is the type of the
/// weights: a view of experts' weights makes it a [`LinearExperts`].
#[derive(Clone, Copy)]
pub struct Linear<'a, T, O, K = Values, W = DeviceTensorView<'a>> {
    pub(super) gpu: &'a Gpu,
    pub(super) weights: Weights<'a>,
    pub(super) epilogue: DeviceEpilogue<'a, T, O>,
    pub(super) options: Options,
    pub(super) quantized_results: Option<ActivationRecipe>,
    given: Option<GemmConfig>,
    kind: PhantomData<(K, W)>,
}

/// A product of rows of activations and their experts' weights to plan: for each sorted pair of a
/// routing, `out[row, m] = Σₖ weights[expert, m, k] · activations[row, k]`, followed by the
/// epilogue.
///
/// Made by [`Gpu::linear_experts`] and the functions next to it.
/// [`ExpertRows`](crate::ExpertRows) says which rows belong to a pair.
pub type LinearExperts<'a, T, O, K = Values> = Linear<'a, T, O, K, DeviceExpertsView<'a>>;

/// The weights of a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Weights<'a> {
    One(DeviceTensorView<'a>),
    Experts(DeviceExpertsView<'a>),
}

impl Weights<'_> {
    /// The shape of the matrix, or of each expert's.
    pub(super) fn shape(&self) -> QuantizedShape {
        match self {
            Self::One(weights) => weights.shape(),
            Self::Experts(experts) => experts.shape(),
        }
    }

    /// The number of experts; `None` for one matrix.
    pub(super) fn experts(&self) -> Option<usize> {
        match self {
            Self::One(_) => None,
            Self::Experts(experts) => Some(experts.count()),
        }
    }

    /// The number of matrices.
    pub(super) fn count(&self) -> usize {
        self.experts().unwrap_or(1)
    }

    /// The direction of the global scales.
    pub(super) fn direction(&self) -> Option<Direction> {
        match self {
            Self::One(weights) => weights.direction(),
            Self::Experts(experts) => experts.direction(),
        }
    }
}

/// The kind of activations, with its options.
#[derive(Clone, Copy, Debug)]
pub(super) enum Options {
    Values { gemv_only: bool },
    Fp4 { alpha: f32, per_token: bool, fast_accumulation: bool },
    Fp8(Fp8Options),
}

impl Options {
    /// FP4 activations without options.
    const FP4: Self = Self::Fp4 { alpha: 1.0, per_token: false, fast_accumulation: false };
}

/// Shows the shape, the options and the steps of the epilogue.
impl<T, O, K, W> fmt::Debug for Linear<'_, T, O, K, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut linear = f.debug_struct("Linear");
        linear.field("experts", &self.weights.experts()).field("weights", &self.weights.shape());
        linear.field("options", &self.options).field("epilogue", &self.epilogue);
        linear.field("quantized_results", &self.quantized_results).finish_non_exhaustive()
    }
}

/// The kernels of a product of a number of tokens, their launch parameters and their workspace.
///
/// Plans are cached by shape, tokens and dtype: making one again, and running it, allocates nothing
/// on the host or the GPU.
pub struct Plan<'a, T, O, K = Values, W = DeviceTensorView<'a>> {
    pub(super) linear: Linear<'a, T, O, K, W>,
    /// Tokens, or pairs of a token and an expert.
    pub(super) rows: usize,
    /// For values that start on 16 bytes; `None` if there is nothing to multiply.
    pub(super) planned: Option<Arc<Planned>>,
    /// Bytes for the kernels of the product, a multiple of 16 if quantized results follow.
    pub(super) memory_bytes: u64,
    /// Bytes for results that are quantized, after these.
    pub(super) results_bytes: u64,
    /// The kernel that quantizes the results.
    quantizer: Option<KernelId>,
}

/// The kernels of a product with experts' weights for a number of pairs, with its workspace.
pub type ExpertsPlan<'a, T, O, K = Values> = Plan<'a, T, O, K, DeviceExpertsView<'a>>;

/// Shows the configuration and the bytes of workspace.
impl<T, O, K, W> fmt::Debug for Plan<'_, T, O, K, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut plan = f.debug_struct("Plan");
        plan.field("rows", &self.rows).field("config", &self.config().map(|config| config.to_string()));
        plan.field("workspace_bytes", &self.workspace_bytes()).finish_non_exhaustive()
    }
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
        Linear::new(self, Weights::One(weights.into()), Options::Values { gemv_only: false })
    }

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
    ) -> Linear<'a, T, O, Fp4> {
        Linear::new(self, Weights::One(weights.into()), Options::FP4)
    }

    /// A product with weights in device memory, `[M, K]` in MXFP4 or NVFP4, and activations in FP8
    /// (E4M3), to plan for a number of tokens.
    ///
    /// `T` is f16 or bf16. Needs a GPU of compute capability 9.0, whose tensor cores multiply FP8
    /// at twice the rate of bf16. [`microscale_formats::fp8_dot`] defines the results: with MXFP4
    /// weights and few tokens they are [`block_row`](microscale_formats::fp8_dot::block_row). MXFP4
    /// weights lose nothing. NVFP4 weights are rounded, which [`Fp8Options::round_weights`] must
    /// allow.
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
    ) -> Linear<'a, T, O, Fp8> {
        Linear::new(self, Weights::One(weights.into()), Options::Fp8(Fp8Options::default()))
    }

    /// A product with experts' weights in device memory, `[experts, M, K]`, to plan for a number of
    /// pairs.
    pub fn linear_experts<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExperts<'a, T, O> {
        Linear::new(self, Weights::Experts(experts.into()), Options::Values { gemv_only: false })
    }

    /// A product with experts' weights in device memory, `[experts, M, K]`, and activations in the
    /// same format, NVFP4 or MXFP4, to plan for a number of pairs.
    ///
    /// Rows are routed as for [`Self::linear_experts`], and multiplied as by [`Self::linear_fp4`].
    /// Blackwell GPUs multiply codes and scales as they are stored if each expert's scales
    /// start on 4 bytes. Other GPUs, and other experts, decode the activations.
    ///
    /// A batched product, `[batch, N, K]` times `[batch, M, K]`, has an expert per matrix: route
    /// `batch * N` pairs with a `top_k` of 1, the first N to expert 0, and run it with
    /// [`ExpertRows::Sorted`](crate::ExpertRows::Sorted).
    pub fn linear_experts_fp4<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExperts<'a, T, O, Fp4> {
        Linear::new(self, Weights::Experts(experts.into()), Options::FP4)
    }

    /// A product with experts' weights in device memory, `[experts, M, K]` in MXFP4 or NVFP4, and
    /// activations in FP8 (E4M3), to plan for a number of pairs.
    ///
    /// Rows are routed as for [`Self::linear_experts`]. Needs a GPU of compute capability 9.0, like
    /// [`Self::linear_fp8`].
    pub fn linear_experts_fp8<'a, T: Activation, O: ProductOf<T>>(
        &'a self,
        experts: impl Into<DeviceExpertsView<'a>>,
    ) -> LinearExperts<'a, T, O, Fp8> {
        Linear::new(self, Weights::Experts(experts.into()), Options::Fp8(Fp8Options::default()))
    }
}

impl<'a, T: Activation, O: ProductOf<T>> Linear<'a, T, O> {
    /// Only kernels that need no workspace: the GEMV's, up to 32 tokens at a time. Activations in
    /// f32 have none.
    #[must_use]
    pub fn without_workspace(self) -> Self {
        Self { options: Options::Values { gemv_only: true }, ..self }
    }
}

impl<'a, T: Activation, O: ProductOf<T>, W> Linear<'a, T, O, Fp4, W> {
    /// Multiplies the sums by a number, before the epilogue.
    #[must_use]
    pub fn alpha(mut self, number: f32) -> Self {
        if let Options::Fp4 { alpha, .. } = &mut self.options {
            *alpha = number;
        }
        self
    }

    /// Takes activations in NVFP4 with a global scale per token
    /// ([`Fp4Activations::token_scales`](crate::gpu::Fp4Activations::token_scales)), instead of one
    /// for all or one per expert.
    ///
    /// Products are stored to the workspace in f32. A kernel multiplies them by the factors of
    /// their tokens, and computes the epilogue.
    #[must_use]
    pub fn global_scale_per_token(mut self) -> Self {
        if let Options::Fp4 { per_token, .. } = &mut self.options {
            *per_token = true;
        }
        self
    }

    /// Allows products of MXFP4 by MXFP4 on Hopper's FP8 tensor cores, which keep 13 fraction bits
    /// of sums. Products of many tokens are faster.
    ///
    /// Activations become E4M3 with a scale per token, and all of K is added in the tensor cores:
    /// [`microscale_formats::fp8_dot`] defines the results
    /// ([`fast_row`](microscale_formats::fp8_dot::fast_row)) and bounds their error. Weights lose
    /// nothing. Activations whose block scale is at least 2^−14 of their token's largest scale lose
    /// nothing, others up to 2^−16 of that scale. A plan uses these tensor cores if measured times
    /// predict that they are faster, or, without measured times, from 512 tokens on. The option has
    /// no effect on products in NVFP4, with experts' weights or with a bias in f32, or on other
    /// GPUs.
    #[must_use]
    pub fn fast_accumulation(mut self) -> Self {
        if let Options::Fp4 { fast_accumulation, .. } = &mut self.options {
            *fast_accumulation = true;
        }
        self
    }
}

impl<'a, T: Activation, O: ProductOf<T>, W> Linear<'a, T, O, Fp8, W> {
    /// How activations are scaled, and whether NVFP4 weights may be rounded.
    #[must_use]
    pub fn options(self, options: Fp8Options) -> Self {
        Self { options: Options::Fp8(options), ..self }
    }
}

impl<'a, T: Activation, O: ProductOf<T>, K, W> Linear<'a, T, O, K, W> {
    fn new(gpu: &'a Gpu, weights: Weights<'a>, options: Options) -> Self {
        let epilogue = DeviceEpilogue::default();
        let quantized_results = None;
        Self { gpu, weights, epilogue, options, quantized_results, given: None, kind: PhantomData }
    }

    /// The product followed by a bias, `[M]` or `[experts, M]`, a gate and a residual, which lies
    /// as the results do, in this order, by the same kernels, before the only rounding.
    ///
    /// With a gate, `out` is `[N, M / 2]`: rows of gate and up take turns
    /// ([`interleave_rows`](crate::interleave_rows)).
    #[must_use]
    pub fn epilogue(self, epilogue: DeviceEpilogue<'a, T, O>) -> Self {
        Self { epilogue, ..self }
    }

    /// Quantizes the results for the next layer: [`QuantizedResults`](crate::gpu::QuantizedResults)
    /// is the output then. The recipe has no row operation.
    ///
    /// Results are rounded to `O`, f16 or bf16, and quantized as
    /// [`Gpu::quantize_activations_on`] does, to the same bytes as by these two calls. The kernel
    /// that quantizes starts when the product has ended. Unquantized results are in the workspace.
    ///
    /// ```no_run
    /// # use half::bf16;
    /// # use microscale::Result;
    /// # use microscale::gpu::cudarc::driver::CudaSlice;
    /// # use microscale::gpu::{DeviceQuantizedActivations, DeviceTensor, GemmWorkspace, Gpu};
    /// use microscale::formats::nvfp4::Direction;
    /// use microscale::gpu::{DeviceScales, QuantizedResults};
    /// use microscale::{ActivationFormat, ActivationRecipe, ActivationScale};
    ///
    /// # fn forward(
    /// #     gpu: &Gpu,
    /// #     weights: &DeviceTensor,
    /// #     x: &CudaSlice<bf16>,
    /// #     y: DeviceQuantizedActivations<'_>,
    /// #     tokens: usize,
    /// # ) -> Result<()> {
    /// let format = ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor));
    /// let linear = gpu.linear::<bf16, bf16>(weights);
    /// let plan = linear.quantize_results(ActivationRecipe::new(format)).plan(tokens)?;
    /// # let stream = gpu.stream();
    /// # let mut workspace = GemmWorkspace::new(stream, plan.workspace_bytes())?;
    /// let y = QuantizedResults::new(y, DeviceScales::Host(2688.0 / 20.0));
    /// plan.run(stream, x, &mut workspace, y)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn quantize_results(self, recipe: impl Into<Option<ActivationRecipe>>) -> Self {
        Self { quantized_results: recipe.into(), ..self }
    }

    /// The product by a given configuration, for tests and measurements. Its formats and dtype are
    /// ignored.
    #[cfg(feature = "internals")]
    #[must_use]
    pub fn by(self, config: GemmConfig) -> Self {
        Self { given: Some(config), ..self }
    }

    /// Plans the product of `rows` tokens, or pairs of a token and an expert, and compiles its
    /// kernels, or returns the plan that was made before. Kernels for values that do not start on
    /// 16 bytes are compiled when they are first used. Measured times of the GPU decide which
    /// kernels are used (`docs/kernels.md`). How many rows each expert has is decided on the GPU.
    ///
    /// # Errors
    /// [`OperandFault::Weights`] and [`OperandFault::Layout`] for weights that are not multiplied,
    /// [`OperandFault::Limit`] beyond the kernels' limits, [`OperandFault::Gate`] for an odd number
    /// of rows under a gate, [`OperandFault::Results`] for results in f32 that shall be quantized
    /// or a recipe with a row operation, errors about the lengths of the epilogue's operands, and
    /// [`Error::Gpu`].
    ///
    /// For FP4 also [`Error::NoGlobalScale`] for MXFP4 with a global scale per token.
    ///
    /// For FP8 also [`OperandFault::NoFp8`] on other GPUs than of compute capability 9.0,
    /// [`ActivationFault::Dtype`] for values in f32, [`OperandFault::RoundedWeights`] for NVFP4
    /// weights without [`Fp8Options::round_weights`], [`Error::NoKernel`] for NVFP4 if K is not a
    /// multiple of 64, and [`OperandFault::Fp8Experts`] for experts whose scales do not start on 4
    /// bytes.
    pub fn plan(self, rows: usize) -> Result<Plan<'a, T, O, K, W>> {
        let shape = self.weights.shape();
        match self.options {
            Options::Fp8(_) if T::DTYPE == Dtype::F32 => {
                return Err(Error::Activations(ActivationFault::Dtype));
            }
            Options::Fp4 { per_token: true, .. } if !shape.format.has_global_scale() => {
                return Err(Error::NoGlobalScale { format: shape.format });
            }
            Options::Fp8(options) => options.check_weights(shape)?,
            Options::Values { .. } | Options::Fp4 { .. } => check_weights_shape(shape)?,
        }
        match self.weights {
            Weights::One(_) => limited("rows of activations", rows, TOKEN_LIMIT)?,
            Weights::Experts(_) => limited("pairs of a token and an expert", rows, launch::PAIR_LIMIT)?,
        }
        let results = self.epilogue.check(shape.rows, self.weights.count(), rows)?;
        let mut quantizer = None;
        if let Some(recipe) = &self.quantized_results {
            check_results(recipe, O::DTYPE)?;
            quantizer = Some(launch::activation_quantizer(recipe, O::DTYPE)?);
        }
        if self.key(rows, true).is_empty() {
            return Ok(Plan {
                linear: self,
                rows,
                planned: None,
                memory_bytes: 0,
                results_bytes: 0,
                quantizer,
            });
        }
        let planned = self.planned(rows, true)?;
        self.gpu.kernels.ready_all(planned.kernels().chain(quantizer))?;
        let mut memory_bytes = planned.workspace_bytes();
        // Values that do not start on 16 bytes may get other kernels. A given configuration for one
        // matrix has no others.
        if self.given.is_none() || self.weights.experts().is_some() {
            memory_bytes = memory_bytes.max(self.planned(rows, false)?.workspace_bytes());
        }
        if quantizer.is_some() {
            memory_bytes = memory_bytes.checked_next_multiple_of(16).unwrap_or(u64::MAX);
        }
        let results_bytes = quantizer.map_or(0, |_| results_bytes(rows, results));
        Ok(Plan { linear: self, rows, planned: Some(planned), memory_bytes, results_bytes, quantizer })
    }

    /// The key of the plan, for values that start on 16 bytes or not.
    fn key(&self, rows: usize, aligned: bool) -> PlanKey {
        let (kind, aligned) = match self.options {
            // Parts of f32 start on 16 bytes.
            Options::Values { gemv_only } => {
                (Kind::Values { gemv_only }, aligned || multiplied(T::DTYPE).0 > 1)
            }
            Options::Fp4 { per_token, fast_accumulation, .. } => {
                (Kind::Fp4 { per_token, fast_accumulation }, true)
            }
            Options::Fp8(options) => (Kind::Fp8(options), true),
        };
        let (weights, experts) = (self.weights.shape(), self.weights.experts());
        PlanKey { kind, weights, experts, rows, dtype: T::DTYPE, aligned }
    }

    /// The plan for values that start on 16 bytes or not.
    pub(super) fn planned(&self, rows: usize, aligned: bool) -> Result<Arc<Planned>> {
        let key = self.key(rows, aligned);
        let (kernels, given) = (&self.gpu.kernels, self.given);
        let make = || match key.kind {
            Kind::Values { gemv_only } => linear::plan(kernels, key, gemv_only, given),
            Kind::Fp4 { .. } => fp4::plan(kernels, key, given),
            Kind::Fp8(options) => fp8::plan(kernels, key, options, given),
        };
        if given.is_some() { make().map(Arc::new) } else { self.gpu.plans.get(key, make) }
    }
}

impl<T, O, K, W> Plan<'_, T, O, K, W> {
    /// Bytes of workspace for `run`; 0 if it needs none.
    pub fn workspace_bytes(&self) -> usize {
        with_semaphores(self.needed_bytes())
    }

    /// Bytes of workspace after the semaphores.
    pub(super) fn needed_bytes(&self) -> u64 {
        self.memory_bytes.saturating_add(self.results_bytes)
    }

    /// The kernels for values that start on 16 bytes, in the order of their launches, but for the
    /// one that quantizes values to FP8.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> {
        self.planned.iter().flat_map(|planned| planned.kernels().chain(self.quantizer))
    }

    /// The configuration for values that start on 16 bytes; `None` if there is nothing to multiply.
    pub fn config(&self) -> Option<GemmConfig> {
        self.planned.as_ref().map(|planned| planned.product.config)
    }
}
