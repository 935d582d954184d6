//! Launches of dequantizers.

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};
use microscale_formats::Format;
use microscale_kernels_abi::{Dequantize, KernelId};

use crate::element::{Dtype, Element};
use crate::error::{Error, Result};
use crate::gpu::launch::arguments::{apply_global, blocks_in_elements, config, grid, scale_grid};
use crate::gpu::memory::tensor_view::DeviceTensorView;
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use crate::shape::Shape;

/// The kernel that dequantizes a format. `aligned`: every row starts on 16 bytes.
///
/// # Errors
/// [`Error::NoKernel`].
pub(in crate::gpu) fn dequantizer(format: Format, dtype: Dtype, aligned: bool) -> Result<KernelId> {
    let kind = match (format, aligned) {
        (Format::Mxfp4, true) => Dequantize::Mxfp4Aligned,
        (Format::Mxfp4, false) => Dequantize::Mxfp4Unaligned,
        (Format::Nvfp4, true) => Dequantize::Nvfp4Aligned,
        (Format::Nvfp4, false) => Dequantize::Nvfp4Unaligned,
        (Format::Mxfp8E4m3, true) => Dequantize::Mxfp8E4m3Aligned,
        (Format::Mxfp8E4m3, false) => Dequantize::Mxfp8E4m3Unaligned,
        (Format::Mxfp8E5m2, true) => Dequantize::Mxfp8E5m2Aligned,
        (Format::Mxfp8E5m2, false) => Dequantize::Mxfp8E5m2Unaligned,
        (Format::Comparison(_), _) => return Err(Error::NoKernel { format }),
    };
    Ok(kind.of(dtype))
}

/// Enqueues dequantization. The caller has checked that `out` holds `shape`.
pub(in crate::gpu) fn dequantize<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    tensor: DeviceTensorView<'_>,
    mut out: DeviceViewMut<'_, T>,
    shape: Shape,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (out, _written) = out.write(stream, "the output", 1)?;
    let ([codes, scales, global], _read) = tensor.read(stream)?;
    let grid = grid(shape, tensor.format().block())?;
    let ready = kernels.ready(dequantizer(tensor.format(), T::DTYPE, grid.is_aligned::<T>(out))?)?;
    let scale_grid = scale_grid(tensor.shape());
    let apply = apply_global(tensor);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&codes).arg(&scales);
    if tensor.format() == Format::Nvfp4 {
        launch.arg(&global);
    }
    launch.arg(&out).arg(&grid).arg(&scale_grid);
    if tensor.format() == Format::Nvfp4 {
        launch.arg(&apply);
    }
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `out`, whose
    // length the caller checked. Codes and scales hold its blocks because `tensor` has the shape.
    // The kernel for aligned rows is chosen only if every row starts on 16 bytes. The borrows, held
    // past the launch, keep the buffers from overlapping.
    unsafe { launch.launch(config(&ready.kernel, blocks_in_elements(&grid, tensor.format()))?) }
        .map_err(doing("launching a dequantize kernel"))?;
    Ok(())
}
