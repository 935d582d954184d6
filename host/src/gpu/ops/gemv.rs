//! Products of quantized matrices and quantized vectors on a GPU, from host or device memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::element::Element;
use crate::error::Result;
use crate::gemv::Batch;
use crate::gpu::handle::Gpu;
use crate::gpu::launch;
use crate::gpu::memory::tensor::DeviceTensor;
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::runtime::driver::doing;
use crate::shape::Shape;
use crate::view::QuantizedView;

impl Gpu {
    /// Multiplies matrices and vectors in host memory, as [`crate::gemv`] does.
    ///
    /// Copies the operands to the GPU, multiplies, copies the result back, and waits for it.
    ///
    /// # Errors
    /// As for [`Self::gemv_on`].
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

    /// Multiplies matrices with vectors in device memory, as [`crate::gemv`] does.
    ///
    /// The results have the same bits. Enqueues one kernel and returns. Allocates nothing and does
    /// not wait.
    ///
    /// # Errors
    /// As for [`crate::gemv`], [`crate::OperandFault::Limit`], and [`crate::Error::Gpu`].
    pub fn gemv_on<'m, 'v, 'o, T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        matrix: impl Into<DeviceTensorView<'m>>,
        vectors: impl Into<DeviceTensorView<'v>>,
        batch: Batch,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let matrix = matrix.into();
        let rows_per_warp = rows_per_warp(matrix.rows(), matrix.cols());
        self.gemv_with(rows_per_warp, stream, matrix, vectors, batch, out)
    }

    /// [`Self::gemv_on`] with 1, 2 or 4 rows per warp. All give the same bits.
    ///
    /// # Errors
    /// As for [`Self::gemv_on`].
    pub(in crate::gpu) fn gemv_with<'m, 'v, 'o, T: Element>(
        &self,
        rows_per_warp: u32,
        stream: &Arc<CudaStream>,
        matrix: impl Into<DeviceTensorView<'m>>,
        vectors: impl Into<DeviceTensorView<'v>>,
        batch: Batch,
        out: impl Into<DeviceViewMut<'o, T>>,
    ) -> Result<()> {
        let (matrix, vectors, out) = (matrix.into(), vectors.into(), out.into());
        let rows = batch.check(matrix.shape(), vectors.shape(), out.len())?;
        launch::gemv(&self.kernels, stream, rows_per_warp, matrix, vectors, batch, rows, out)
    }
}

/// The largest number of columns that each column of [`ROWS_PER_WARP`] covers.
const COLS: [usize; 6] = [256, 1024, 2048, 4096, 8192, 16384];

/// Limits of all matrices' rows together, with the fastest rows per warp for each of [`COLS`].
///
/// Measured on an H200 in NVFP4.
const ROWS_PER_WARP: [(usize, [u32; COLS.len()]); 8] = [
    (128, [1, 1, 1, 1, 2, 2]),
    (512, [2, 1, 1, 2, 2, 2]),
    (1024, [2, 1, 1, 2, 2, 2]),
    (2048, [2, 2, 2, 2, 2, 2]),
    (4096, [2, 2, 4, 4, 4, 2]),
    (8192, [4, 4, 4, 4, 4, 4]),
    (16384, [4, 4, 4, 4, 4, 4]),
    (usize::MAX, [4, 4, 4, 4, 4, 4]),
];

/// The rows per warp for a matrix, from the next larger measured size.
fn rows_per_warp(rows: usize, cols: usize) -> u32 {
    let column = COLS.iter().position(|most| cols <= *most).unwrap_or(COLS.len() - 1);
    ROWS_PER_WARP.iter().find(|(most, _)| rows <= *most).map_or(4, |(_, warps)| warps[column])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_between_measured_ones_take_the_next_larger() {
        let sizes = [(128, 256), (129, 256), (128, 16385), (4096, 1025), (4097, 1), (usize::MAX, usize::MAX)];
        assert_eq!(sizes.map(|(rows, cols)| rows_per_warp(rows, cols)), [1, 2, 2, 4, 4, 4]);
    }
}
