//! Launches of the kernel that sums quantization errors.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, PushKernelArg};
use microscale_formats::errors::ERROR_PART;
use microscale_kernels_abi::Errors;

use crate::element::Element;
use crate::error::Result;
use crate::gpu::launch::arguments::{by_rows, config};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::Shape;

/// Enqueues the sums of a matrix' quantization errors, one set of sums per part of a row.
///
/// The caller has checked that `values` holds `shape`, that `back` holds its rows without gaps, and
/// that `sums` has room for [`error_parts`] parts of each row.
pub(in crate::gpu) fn errors<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    values: &impl DevicePtr<T>,
    shape: Shape,
    back: &CudaSlice<f32>,
    sums: &mut CudaSlice<u64>,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.device_ptr(stream);
    let ready = kernels.ready(Errors::Errors.of(T::DTYPE))?;
    let grid = by_rows(shape, ERROR_PART as usize)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&values).arg(back).arg(sums).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values` by
    // rows, and the caller checked the lengths of `values`, `back` and `sums`. The borrows, held
    // past the launch, keep the buffers from overlapping.
    unsafe { launch.launch(config(&ready.kernel, grid.0.blocks * u64::from(ERROR_PART))?) }
        .map_err(doing("launching an errors kernel"))?;
    Ok(())
}

/// Parts per row. The errors of each part are summed separately.
pub(in crate::gpu) fn error_parts(shape: Shape) -> usize {
    shape.cols.div_ceil(ERROR_PART as usize)
}
