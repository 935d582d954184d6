//! Launches of the amax search, and of the kernel that makes a plan of its result.

use std::sync::Arc;

use cudarc::driver::{CudaStream, PushKernelArg};
use microscale_formats::mx;
use microscale_kernels_abi::Amax;

use super::quantize::Options;
use crate::element::Element;
use crate::error::Result;
use crate::gpu::launch::arguments::{config, grid};
use crate::gpu::memory::view::{DeviceView, DeviceViewMut};
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;
use crate::recipe::Recipe;
use crate::shape::Shape;

/// The block size that the kernels count in.
const AMAX_BLOCK: usize = mx::BLOCK;

/// Enqueues the search for a matrix' amax, which updates the amax in `slot`.
///
/// Before a first search the slot holds the amax of no elements. The caller has checked that
/// `values` holds `shape`, and that the slot has the words of an amax.
pub(in crate::gpu) fn amax<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    values: DeviceView<'_, T>,
    shape: Shape,
    slot: &mut DeviceViewMut<'_, u32>,
) -> Result<()> {
    if shape.is_empty() {
        return Ok(());
    }
    let (values, _read) = values.read(stream, "the input", 1)?;
    let (slot, _written) = slot.write(stream, "the amax", 1)?;
    let grid = grid(shape, AMAX_BLOCK)?;
    let kind = if grid.is_aligned::<T>(values) { Amax::Aligned } else { Amax::Unaligned };
    let ready = kernels.ready(kind.of(T::DTYPE))?;
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&values).arg(&slot).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order. `grid` describes the matrix at `values`,
    // whose length the caller checked. The kernel for aligned rows is chosen only if every row
    // starts on 16 bytes. The slot has the words of an amax, which the caller checked. `_read` and
    // `_written` are held past the launch.
    unsafe { launch.launch(config(&ready.kernel, grid.0.blocks * AMAX_BLOCK as u64)?) }
        .map_err(doing("launching an amax kernel"))?;
    Ok(())
}

/// Enqueues the kernel that makes an NVFP4 plan in a tensor's slot.
///
/// The plan is made of the amax in the slot, or of the global scale there if `given`. The slot has
/// [`GLOBAL_WORDS`](crate::gpu::memory::tensor_view::GLOBAL_WORDS) words.
pub(in crate::gpu) fn plan<T: Element>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    recipe: &Recipe,
    slot: &mut DeviceViewMut<'_, u32>,
    given: bool,
) -> Result<()> {
    let Options::Nv(options) = Options::of::<T>(recipe)? else { return Ok(()) };
    let ready = kernels.ready(Amax::Nvfp4Plan.of(T::DTYPE))?;
    let (slot, _written) = slot.write(stream, "the amax", 1)?;
    let given = u32::from(given);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&slot).arg(&options).arg(&given);
    // SAFETY: the arguments are the kernel's, in order. The slot is a whole `GlobalSlot`, as the
    // caller guarantees, and `_written` is held past the launch.
    unsafe { launch.launch(config(&ready.kernel, 1)?) }.map_err(doing("launching a plan kernel"))?;
    Ok(())
}
