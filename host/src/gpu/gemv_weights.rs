//! Products of weights in four bits and activations in 16 on a GPU, and the choice of their kernel.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::driver::doing;
use super::gemv_choices::GemvWeightsChoices;
use super::gemv_weights_kernel::GemvWeightsKernel;
use super::handle::Gpu;
use super::launch;
use super::memory::{DeviceView, DeviceViewMut};
use super::tensor::DeviceTensor;
use super::tensor_view::DeviceTensorView;
use crate::error::Result;
use crate::gemv::{TensorCoreActivation, check_weights};
use crate::shape::{QuantizedShape, Shape};
use crate::view::QuantizedView;

impl GemvWeightsKernel {
    /// Chooses the kernel for weights of a shape and so many tokens.
    pub fn choose(shape: QuantizedShape, tokens: usize) -> Self {
        Self::for_more_than_eight(shape, tokens).map_or_else(
            || GemvWeightsChoices::built_in().kernel(shape.format, shape.rows, shape.cols, tokens).on(shape),
            |(kernel, _)| kernel,
        )
    }

    /// The kernel for more than eight tokens, but not very many, and weights of a shape, and about how many microseconds an H200 takes; none
    /// for others.
    pub(super) fn for_more_than_eight(shape: QuantizedShape, tokens: usize) -> Option<(Self, f64)> {
        let with_times = Self::all().filter_map(|kernel| Some((kernel, kernel.microseconds(shape, tokens)?)));
        with_times.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}

impl Gpu {
    /// Multiplies host memory, as [`crate::gemv_weights`] does: copies the operands over, multiplies, copies
    /// the result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`].
    pub fn gemv_weights<'a, T: TensorCoreActivation>(
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
        let weights = DeviceTensor::from_host(&self.stream, weights)?;
        // There are no empty buffers.
        let nothing = [T::default()];
        let activations =
            if weights.cols() == 0 { &nothing } else { &activations[..tokens * weights.cols()] };
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemv_weights_on(&self.stream, &weights, &activations, tokens, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies weights with activations in device memory, as [`crate::gemv_weights`] does but for the last
    /// bits: enqueues one kernel and returns. Allocates nothing and does not wait. The same operands give the
    /// same bits each time.
    ///
    /// Tensor cores add the products: [`microscale_formats::weights`] says how far results may be from the
    /// exact sum. Which kernel does it is a table by format, size and tokens, measured on an H200. Weights
    /// whose rows have a number of scales that is not a multiple of four, or 2^24 columns and more, take a
    /// slower one, which has the bound of several tokens for one, too.
    ///
    /// Results have the CPU's bits, more slowly, where rows are not a multiple of 32 and where activations do
    /// not start on 16 bytes; by kernels for several tokens, for rows with MXFP4 scales that leave the
    /// activations' dtype no room for its products, and rows that are multiplied together with them; by those
    /// for one, where a sum is infinite or NaN on the way, as from bf16 activations of 2^24. So the last bits
    /// of a row may depend on which rows are beside it.
    ///
    /// # Errors
    /// Those of [`crate::gemv_weights`], [`crate::OperandFault::Limit`], and [`crate::Error::Gpu`].
    pub fn gemv_weights_on<'w, 'a, 'o, T: TensorCoreActivation>(
        &self,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let weights = weights.into();
        let kernel = GemvWeightsKernel::choose(weights.shape(), tokens);
        self.gemv_weights_with(kernel, stream, weights, activations, tokens, out)
    }

    /// [`Self::gemv_weights_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`].
    #[doc(hidden)]
    pub fn gemv_weights_with<'w, 'a, 'o, T: TensorCoreActivation>(
        &self,
        kernel: GemvWeightsKernel,
        stream: &Arc<CudaStream>,
        weights: impl Into<DeviceTensorView<'w>>,
        activations: impl Into<DeviceView<'a, T>>,
        tokens: usize,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let (weights, activations, out) = (weights.into(), activations.into(), out.into());
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        launch::gemv_weights(&self.kernels, stream, kernel, weights, activations, tokens, out)
    }
}
