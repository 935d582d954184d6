//! Products of quantized matrices and quantized vectors on a GPU, from host memory or on the device.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::driver::doing;
use super::gemv_choices::GemvChoices;
use super::gemv_kernel::GemvKernel;
use super::handle::Gpu;
use super::launch;
use super::memory::DeviceViewMut;
use super::tensor::DeviceTensor;
use super::tensor_view::DeviceTensorView;
use crate::element::Element;
use crate::error::Result;
use crate::gemv::Batch;
use crate::shape::Shape;
use crate::view::QuantizedView;

impl Gpu {
    /// Multiplies host memory, as [`crate::gemv`] does: copies the operands over, multiplies, copies the
    /// result back, and waits for it.
    ///
    /// # Errors
    /// Those of [`Self::gemv_on`].
    pub fn gemv<'a, 'b, T: Element>(
        &self,
        matrix: impl Into<QuantizedView<'a>>,
        vectors: impl Into<QuantizedView<'b>>,
        batch: Batch,
        out: &mut [T],
    ) -> Result<()> {
        let (matrix, vectors) = (matrix.into(), vectors.into());
        let rows = batch.check(matrix.shape(), vectors.shape(), out.len())?;
        let results = Shape::new(batch.count, rows).elements();
        if results == 0 {
            return Ok(());
        }
        let [matrix, vectors] = [matrix, vectors].map(|tensor| DeviceTensor::from_host(&self.stream, tensor));
        let mut there = self.stream.alloc_zeros::<T>(results).map_err(doing("allocating the output"))?;
        self.gemv_on(&self.stream, &matrix?, &vectors?, batch, &mut there)?;
        self.stream.memcpy_dtoh(&there, &mut out[..results]).map_err(doing("copying the output back"))
    }

    /// Multiplies matrices with vectors in device memory, as [`crate::gemv`] does, with the same bits:
    /// enqueues one kernel and returns. Allocates nothing and does not wait.
    ///
    /// # Errors
    /// Those of [`crate::gemv`], [`crate::OperandFault::Limit`], and [`crate::Error::Gpu`].
    pub fn gemv_on<'m, 'v, 'o, T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        matrix: impl Into<DeviceTensorView<'m>>,
        vectors: impl Into<DeviceTensorView<'v>>,
        batch: Batch,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let matrix = matrix.into();
        let kernel = GemvChoices::<GemvKernel>::built_in().kernel(matrix.rows(), matrix.cols());
        self.gemv_with(kernel, stream, matrix, vectors, batch, out)
    }

    /// [`Self::gemv_on`] by a chosen kernel: for tests and comparisons.
    ///
    /// # Errors
    /// Those of [`Self::gemv_on`].
    #[doc(hidden)]
    pub fn gemv_with<'m, 'v, 'o, T: Element>(
        &self,
        kernel: GemvKernel,
        stream: &Arc<CudaStream>,
        matrix: impl Into<DeviceTensorView<'m>>,
        vectors: impl Into<DeviceTensorView<'v>>,
        batch: Batch,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let (matrix, vectors, out) = (matrix.into(), vectors.into(), out.into());
        let rows = batch.check(matrix.shape(), vectors.shape(), out.len())?;
        launch::gemv(&self.kernels, stream, kernel, matrix, vectors, batch, rows, out)
    }
}
