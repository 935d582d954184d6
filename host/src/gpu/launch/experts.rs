//! Launches of the kernels before products with experts' weights: sorting, and planning tiles.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, PushKernelArg};
use microscale_kernels_abi::experts::{EXPERT_LIMIT, PlanGrid, RouteGrid};
use microscale_kernels_abi::{Divider, Experts};

use crate::error::Result;
use crate::gpu::launch::arguments::{Argument, config, limited};
use crate::gpu::launch::enqueue::{Launch, argument, enqueue};
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::view::DeviceView;
use crate::gpu::runtime::driver::doing;
use crate::gpu::runtime::kernels::Kernels;

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<RouteGrid> {}

/// The limit of pairs: every number of pairs is below it.
pub(in crate::gpu) const PAIR_LIMIT: u64 = 1 << 24;

/// Enqueues the sorting of pairs. The caller has checked that `routing` has room for them.
pub(in crate::gpu) fn route(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    chosen: DeviceView<'_, u32>,
    top_k: usize,
    routing: &mut DeviceRouting,
) -> Result<()> {
    let (experts, pairs) = (routing.experts, chosen.len());
    limited("pairs of a token and an expert", pairs, PAIR_LIMIT)?;
    limited("experts", experts, EXPERT_LIMIT)?;
    if experts == 0 {
        return Ok(());
    }
    let grid = RouteGrid { top_k: Divider::new(top_k as u64), pairs: pairs as u32, experts: experts as u32 };
    let ready = kernels.ready(Experts::Route.id())?;
    let (chosen, _read) = chosen.read(stream, "the chosen experts", 1)?;
    let grid = Argument(grid);
    let mut launch = stream.launch_builder(&ready.function);
    launch.arg(&chosen).arg(&mut routing.ends).arg(&mut routing.tokens).arg(&mut routing.order);
    launch.arg(&mut routing.sorted).arg(&grid);
    // SAFETY: the arguments are the kernel's, in order, and the launch has one warp per expert.
    // The routing has room for `experts` experts, and for `pairs` pairs as the caller checked.
    unsafe { launch.launch(config(&ready.kernel, experts as u64)?) }
        .map_err(doing("sorting tokens by expert"))?;
    Ok(())
}

/// Enqueues the planning of token tiles at the address `plan`.
///
/// # Safety
/// `plan` has room for the plan of `grid`'s token tiles, and no other work uses it meanwhile.
pub(in crate::gpu) unsafe fn plan_experts(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    routing: &DeviceRouting,
    grid: PlanGrid,
    plan: u64,
) -> Result<()> {
    let (ends, _ends) = routing.ends.device_ptr(stream);
    let (sorted, _sorted) = routing.sorted.device_ptr(stream);
    let arguments = &mut [argument(&ends), argument(&sorted), argument(&plan), argument(&grid)];
    let programmatic = kernels.target().since_sm90;
    let launch = Launch { programmatic, ..Launch::of_elements(Experts::Plan.id(), 1) };
    // SAFETY: the arguments are the kernel's, in order, and the launch is one warp. The routing's
    // lists are of the pairs that were sorted, or zeros, and the caller guarantees room for the
    // plan.
    unsafe { enqueue(kernels, stream, &launch, arguments, "planning products with experts") }
}
