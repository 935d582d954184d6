//! Weights in four bits times activations in 16, on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::{DeviceTensor, Gpu, doing, launch};
use crate::error::Result;
use crate::gemv::{Activation, check_weights};
use crate::recipe::Words;
use crate::tensor::{QuantizedTensor, Shape};

/// A kernel for weights times activations. They differ in the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemvWeightsKernel {
    /// A warp takes 16 rows, and eight warps share them.
    Rows16,
    /// A warp takes 32 rows.
    Rows32,
}

impl Words for GemvWeightsKernel {
    const WORDS: &'static [(&'static str, Self)] = &[("rows16", Self::Rows16), ("rows32", Self::Rows32)];
}

impl Gpu {
    /// Multiplies host memory, as [`crate::gemv_weights`] does: copies the operands over, multiplies, copies the result back, and waits
    /// for it.
    ///
    /// # Errors
    /// Those of [`crate::gemv_weights`], and [`crate::Error::Gpu`].
    pub fn gemv_weights<T: Activation>(
        &self,
        weights: &QuantizedTensor,
        activations: &[T],
        tokens: usize,
        out: &mut [T],
    ) -> Result<()> {
        let rows = check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        let results = Shape::new(tokens, rows).elements();
        if results == 0 {
            return Ok(());
        }
        let weights = DeviceTensor::from_host(&self.stream, weights)?;
        let activations = &activations[..tokens * weights.cols()];
        let activations =
            self.stream.clone_htod(activations).map_err(doing("copying the activations over"))?;
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemv_weights_on(&self.stream, &weights, &activations, tokens, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies weights with activations in device memory, as [`crate::gemv_weights`] does but for the last bits: enqueues one kernel and
    /// returns. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// Those of [`crate::gemv_weights`], and [`crate::Error::Gpu`].
    pub fn gemv_weights_on<T: Activation>(
        &self,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        self.gemv_weights_with(GemvWeightsKernel::Rows32, stream, weights, activations, tokens, out)
    }

    /// [`Self::gemv_weights_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemv_weights_on`].
    pub fn gemv_weights_with<T: Activation>(
        &self,
        kernel: GemvWeightsKernel,
        stream: &Arc<CudaStream>,
        weights: &DeviceTensor,
        activations: &impl DevicePtr<T>,
        tokens: usize,
        out: &mut impl DevicePtrMut<T>,
    ) -> Result<()> {
        check_weights(weights.shape(), activations.len(), tokens, out.len())?;
        launch::gemv_weights(&self.module, stream, kernel, weights, activations, tokens, out)
    }
}
