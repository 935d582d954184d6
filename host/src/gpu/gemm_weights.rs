//! Products of weights in four bits and activations in 16 of many tokens, on a GPU.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::driver::doing;
use super::gemm_weights_kernel::{GemmWeightsKernel, GemmWorkspace};
use super::gemm_workspace::{COUNTER_BYTES, GemmWorkspaceMut};
use super::handle::Gpu;
use super::launch;
use super::memory::{DeviceView, DeviceViewMut};
use super::tensor::DeviceTensor;
use super::tensor_view::DeviceTensorView;
use crate::error::Result;
use crate::gemv::{TensorCoreActivation, check_weights};
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

impl Gpu {
    /// Makes a workspace for products of weights of a shape with as many tokens as given, and with fewer.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] when memory is short.
    pub fn gemm_workspace(
        &self,
        stream: &Arc<CudaStream>,
        weights: QuantizedShape,
        tokens: usize,
    ) -> Result<GemmWorkspace> {
        let bytes = launch::gemm_workspace(&self.kernels, weights, tokens)?;
        GemmWorkspace::new(stream, bytes)
    }

    /// Bytes of a workspace in memory that is somebody else's ([`GemmWorkspaceMut::from_raw_parts`]), for products of
    /// weights of a shape with as many tokens as given, and with fewer.
    ///
    /// # Errors
    /// [`crate::OperandFault::Limit`] for more tokens than a GPU multiplies, and [`crate::Error::Gpu`] for more than a launch
    /// covers.
    pub fn gemm_workspace_bytes(&self, weights: QuantizedShape, tokens: usize) -> Result<usize> {
        Ok(COUNTER_BYTES + launch::gemm_workspace(&self.kernels, weights, tokens)?)
    }

    /// Multiplies host memory, as [`crate::gemv_weights`] does but for the last bits: copies the operands over, multiplies,
    /// copies the result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`].
    pub fn gemm_weights<'a, T: TensorCoreActivation>(
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
        let mut workspace = self.gemm_workspace(&self.stream, weights.shape(), tokens)?;
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
    /// Up to eight tokens are [`Self::gemv_weights_on`]'s; so are NVFP4 weights whose rows have a number of scales that is not
    /// a multiple of four, eight tokens at a time. Rows with MXFP4 scales that leave the activations' dtype no room for its
    /// products have the CPU's bits, more slowly, together with rows beside them.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`], and [`crate::OperandFault::Workspace`].
    pub fn gemm_weights_on<'w, 'a, 's, 'o, T: TensorCoreActivation>(
        &self,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let weights = weights.into();
        let Some(kernel) = self.gemm_kernel(weights.shape(), tokens) else {
            return self.gemv_weights_on(stream, weights, activations, tokens, out);
        };
        self.gemm_weights_with(kernel, stream, weights, activations, tokens, workspace, out)
    }

    /// [`Self::gemm_weights_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemm_weights_on`].
    #[doc(hidden)]
    #[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
    pub fn gemm_weights_with<'w, 'a, 's, 'o, T: TensorCoreActivation>(
        &self,
        kernel: GemmWeightsKernel,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let (weights, activations) = (weights.into(), activations.into());
        let (workspace, out) = (workspace.into(), out.into());
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        launch::gemm_weights(&self.kernels, stream, kernel, weights, activations, tokens, workspace, out)
    }

    /// The kernel that [`Self::gemm_weights_on`] chooses; none if it leaves the product to [`Self::gemv_weights_on`].
    #[doc(hidden)]
    pub fn gemm_kernel(&self, weights: QuantizedShape, tokens: usize) -> Option<GemmWeightsKernel> {
        if tokens <= FEW { None } else { launch::choose_gemm(&self.kernels, weights, tokens) }
    }

    /// The kernels for products of many tokens that this GPU's target has.
    #[doc(hidden)]
    pub fn gemm_kernels(&self) -> impl Iterator<Item = GemmWeightsKernel> {
        GemmWeightsKernel::of(self.kernels.target())
    }
}

/// The most tokens for which kernels of fewer are faster.
const FEW: usize = 8;
