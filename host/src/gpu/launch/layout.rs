//! Launches of scale layout conversions.

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};
use microscale_formats::ScaleLayout;
use microscale_kernels_abi::{Divider, Layout, ScaleGrid};

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, config};
use crate::gpu::memory::tensor_view::{DeviceTensorView, SCALES, SCALES_ALIGNMENT};
use crate::gpu::memory::view::DeviceViewMut;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

/// Enqueues the conversion of scales to the other layout.
///
/// The caller has checked that `target` has the bytes of that layout.
pub(in crate::gpu) fn convert_scales(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    source: DeviceTensorView<'_>,
    to: ScaleLayout,
    target: &mut DeviceViewMut<'_, u8>,
) -> Result<()> {
    let shape = source.shape();
    if shape.rows == 0 || shape.cols == 0 {
        return Ok(());
    }
    let (_, bytes) = shape.with_scale_layout(ScaleLayout::Swizzled).bytes()?;
    let kernel = match to {
        ScaleLayout::Swizzled => Layout::ToSwizzled,
        ScaleLayout::Linear => Layout::ToLinear,
    };
    let ready = kernels.ready(kernel.id())?;
    let rows = shape.rows as u64;
    let grid = ScaleGrid::swizzled(shape.blocks_per_row() as u64);
    let tiles = Argument(Divider::new(grid.tiles_per_row));
    let grid = Argument(grid);
    let ([_, source, _], _read) = source.read(stream)?;
    let (target, _written) = target.write(stream, SCALES, SCALES_ALIGNMENT)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&source).arg(&target).arg(&rows).arg(&grid).arg(&tiles);
    // SAFETY: the arguments are the kernel's, in order. `source` and `target` have the bytes of the
    // shape in their layouts, as their constructors and the caller checked, and there is one thread
    // per four bytes of the swizzled side.
    unsafe { launch.launch(config(&ready.kernel, bytes as u64)?) }
        .map_err(doing("launching a layout kernel"))?;
    Ok(())
}
