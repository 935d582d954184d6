//! Products of weights in four bits and activations in 16 of many tokens, on a GPU.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::driver::doing;
use super::epilogue::DeviceEpilogue;
use super::gemm_weights_kernel::{GemmWeightsKernel, GemmWorkspace};
use super::gemm_workspace::{COUNTER_BYTES, GemmWorkspaceMut};
use super::handle::Gpu;
use super::launch;
use super::memory::{DeviceView, DeviceViewMut};
use super::tensor::DeviceTensor;
use super::tensor_view::DeviceTensorView;
use crate::element::Dtype;
use crate::error::Result;
use crate::gemv::{Activation, ProductOf, check_multiplied, check_weights};
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

impl Gpu {
    /// Makes a workspace for products of weights of a shape with activations of a dtype of as many tokens as given, and of fewer. One for
    /// f32 serves the others too.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] when memory is short.
    pub fn gemm_workspace(
        &self,
        stream: &Arc<CudaStream>,
        weights: QuantizedShape,
        tokens: usize,
        activations: Dtype,
    ) -> Result<GemmWorkspace> {
        let bytes = launch::gemm_workspace(&self.kernels, weights, tokens, activations)?;
        GemmWorkspace::new(stream, bytes)
    }

    /// Bytes of a workspace in memory that is somebody else's ([`GemmWorkspaceMut::from_raw_parts`]), for products of
    /// weights of a shape with activations of a dtype of as many tokens as given, and of fewer.
    ///
    /// # Errors
    /// [`crate::OperandFault::Limit`] for more tokens than a GPU multiplies, and [`crate::Error::Gpu`] for more than a launch
    /// covers.
    pub fn gemm_workspace_bytes(
        &self,
        weights: QuantizedShape,
        tokens: usize,
        activations: Dtype,
    ) -> Result<usize> {
        Ok(COUNTER_BYTES + launch::gemm_workspace(&self.kernels, weights, tokens, activations)?)
    }

    /// Multiplies host memory, as [`crate::gemv_weights`] does but for the last bits: copies the operands over, multiplies,
    /// copies the result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`].
    pub fn gemm_weights<'a, T: Activation>(
        &self,
        weights: impl Into<QuantizedView<'a>>,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let weights = weights.into();
        let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        let mut workspace = self.gemm_workspace(&self.stream, weights.shape(), tokens, T::DTYPE)?;
        let weights = DeviceTensor::from_host(&self.stream, weights)?;
        // There are no empty buffers.
        let nothing = [T::default()];
        let activations =
            if weights.cols() == 0 { &nothing } else { &activations[..tokens * weights.cols()] };
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemm_weights_on(&self.stream, &weights, &activations, tokens, &mut workspace, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies weights with activations of any number of tokens in device memory: `out[n, m] = Σₖ weights[m, k] ·
    /// activations[n, k]`. Enqueues one kernel that arranges the activations and one that multiplies, and returns. Allocates
    /// nothing and does not wait. The same operands give the same bits each time, on the same GPU.
    ///
    /// `weights` is `[M, K]`, with linear scales; `activations` is `[N, K]` and `out` `[N, M]`, without gaps. Tensor cores
    /// add the products: [`microscale_formats::weights`] says how far results may be from the exact sum.
    ///
    /// Up to eight tokens are [`Self::gemv_weights_on`]'s; so are up to 96, if their activations start on 16 bytes, where its kernels should be
    /// faster, which they are for small matrices, and NVFP4 weights whose rows have a number of scales that is not a multiple of four, eight
    /// tokens at a time. Rows with MXFP4 scales that leave the activations' dtype no room for its
    /// products have the CPU's bits, more slowly, together with rows beside them.
    ///
    /// Activations in f32 are not rounded: each is multiplied as three in bf16, whose sum it is but for what is below 2^−133, and results
    /// are in f32. They take as long as three times as many tokens, and two small kernels more. Results of f16 and bf16 activations may
    /// be in f32, too.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`], and [`crate::OperandFault::Workspace`].
    pub fn gemm_weights_on<'w, 'a, 's, 'o, T: Activation, O: ProductOf<T>>(
        &self,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let nothing = DeviceEpilogue::default();
        self.gemm_weights_fused_on(stream, weights, activations, tokens, nothing, workspace, out)
    }

    /// [`Self::gemm_weights_on`], and then what the epilogue says, by the same kernels: a bias, a gate, a residual, before the only
    /// rounding. With a gate `out` is `[N, M / 2]`.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`], for the epilogue's operands too, and [`crate::OperandFault::Gate`].
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, and where it is")]
    pub fn gemm_weights_fused_on<'w, 'a, 's, 'o, T: Activation, O: ProductOf<T>>(
        &self,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        epilogue: DeviceEpilogue<'_, T, O>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        self.gemm_weights_with(None, stream, weights, activations, tokens, epilogue, workspace, out)
    }

    /// [`Self::gemm_weights_fused_on`] by a chosen kernel, if one is given: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_fused_on`].
    #[doc(hidden)]
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
    pub fn gemm_weights_with<'w, 'a, 's, 'o, T: Activation, O: ProductOf<T>>(
        &self,
        kernel: Option<GemmWeightsKernel>,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        epilogue: DeviceEpilogue<'_, T, O>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, O>>,
    ) -> Result<()> {
        let (weights, activations) = (weights.into(), activations.into());
        let (workspace, out) = (workspace.into(), out.into());
        check_multiplied(weights.shape(), activations.len(), tokens)?;
        let results = epilogue.check(weights.rows(), 1, tokens)?;
        Shape::new(tokens, results).check("the output", out.len())?;
        launch::gemm_weights(
            &self.kernels,
            stream,
            kernel,
            weights,
            activations,
            tokens,
            epilogue,
            workspace,
            out,
        )
    }

    /// The kernel that [`Self::gemm_weights_on`] chooses for activations that start on 16 bytes; none if it leaves the product to [`Self::gemv_weights_on`].
    #[doc(hidden)]
    pub fn gemm_kernel(&self, weights: QuantizedShape, tokens: usize) -> Option<GemmWeightsKernel> {
        launch::gemm_kernel(&self.kernels, weights, tokens, true)
    }

    /// Returns whether [`Self::gemm_weights_on`] may work in a workspace for so many tokens' activations in 16 bits.
    #[doc(hidden)]
    pub fn gemm_may_need_workspace(&self, weights: QuantizedShape, tokens: usize) -> bool {
        launch::may_need_workspace(weights, tokens)
    }

    /// The kernels for products of many tokens that this GPU's target has.
    #[doc(hidden)]
    pub fn gemm_kernels(&self) -> impl Iterator<Item = GemmWeightsKernel> {
        GemmWeightsKernel::of(self.kernels.target())
    }
}
