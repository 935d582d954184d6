//! Launching the ladder's baselines, and the kernel that does nothing.

use std::sync::Arc;

use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};
use microscale_kernels_abi::Ladder;

use super::quantize::Options;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::gpu::arguments::{blocks_in_elements, config, grid};
use crate::gpu::driver::doing;
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::DeviceView;
use crate::gpu::tensor_view_mut::DeviceTensorViewMut;
use crate::recipe::Recipe;
use crate::shape::Shape;

/// Enqueues one of the ladder's MXFP4 quantizers: ties to even, −0 kept, non-finite blocks become NaN,
/// linear scales, no report.
pub(in crate::gpu) fn quantize_baseline<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: Ladder,
    values: DeviceView<'_, T>,
    shape: Shape,
    recipe: &Recipe,
    mut out: DeviceTensorViewMut<'_>,
) -> Result<()> {
    let Options::Mx(options) = Options::of::<T>(recipe)? else {
        return Err(Error::Gpu {
            doing: "choosing a baseline",
            code: None,
            message: "there is none for this format".into(),
        });
    };
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.read(stream, "the input", 1)?;
    let ready = kernels.ready(kernel.id())?;
    let grid = grid(shape, recipe.format().block())?;
    let ([codes, scales, _], _written) = out.write(stream)?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&values).arg(&codes).arg(&scales).arg(&grid).arg(&options);
    // SAFETY: as for `quantize`; these kernels access single elements.
    unsafe { launch.launch(config(&ready.kernel, blocks_in_elements(&grid, recipe.format()))?) }
        .map_err(doing("launching a baseline kernel"))?;
    Ok(())
}

/// Enqueues the kernel that does nothing.
pub(in crate::gpu) fn empty(kernels: &Kernels, stream: &Arc<CudaStream>) -> Result<()> {
    let ready = kernels.ready(Ladder::Empty.id())?;
    let config =
        LaunchConfig { grid_dim: (1, 1, 1), block_dim: (ready.kernel.threads, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel takes no arguments and touches nothing.
    unsafe { stream.launch_builder(&ready.function).launch(config) }
        .map_err(doing("launching the empty kernel"))?;
    Ok(())
}
