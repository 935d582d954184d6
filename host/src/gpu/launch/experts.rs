//! Launching products of experts' weights, and the kernels in front of them.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, PushKernelArg};
use microscale_kernels_abi::experts::{EXPERT_LIMIT, Plan, PlanGrid, RouteGrid, Sorted};
use microscale_kernels_abi::weights::TokenTiles;
use microscale_kernels_abi::{Divider, Experts, GlobalSlot};

use super::{gemm, weights};
use crate::error::{Error, Result};
use crate::experts::ExpertRows;
use crate::gemv::{ProductOf, TensorCoreActivation};
use crate::gpu::arguments::{Argument, Operands, Routed, apply_direction, config, limited};
use crate::gpu::driver::doing;
use crate::gpu::epilogue::DeviceEpilogue;
use crate::gpu::experts::DeviceRouting;
use crate::gpu::experts_kernel::ExpertsKernel;
use crate::gpu::experts_view::DeviceExpertsView;
use crate::gpu::gemm_workspace::GemmWorkspaceMut;
use crate::gpu::gemv_weights_kernel::GemvWeightsKernel;
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::{DeviceView, DeviceViewMut};

// SAFETY: a `repr(C)` structure of numbers, without pointers.
unsafe impl DeviceRepr for Argument<RouteGrid> {}
// SAFETY: as above.
unsafe impl DeviceRepr for Argument<PlanGrid> {}

/// The first number of pairs that is too large.
const PAIR_LIMIT: u64 = 1 << 24;

/// Enqueues the sorting of pairs. The caller has checked that there is room for them.
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
    // SAFETY: the arguments are the kernel's, in order, and the launch is the grid's. The routing has room for so many experts and pairs.
    unsafe { launch.launch(config(&ready.kernel, experts as u64)?) }
        .map_err(doing("sorting tokens by expert"))?;
    Ok(())
}

/// The kernel for experts and so many pairs.
pub(in crate::gpu) fn choose_experts(
    kernels: &Kernels,
    experts: DeviceExpertsView<'_>,
    pairs: usize,
) -> ExpertsKernel {
    let target = kernels.target();
    ExpertsKernel::choose(target, takes_many(experts), experts.shape(), [experts.count(), pairs])
}

/// Returns whether kernels for many rows take the weights: each expert's scales must start on 4 bytes.
fn takes_many(experts: DeviceExpertsView<'_>) -> bool {
    let shape = experts.shape();
    gemm::takes(shape) && (shape.rows * shape.blocks_per_row()).is_multiple_of(4)
}

/// Token tiles of a kernel for pairs of so many experts a token, and bytes of memory for their plan.
fn plan_grid(
    kernel: ExpertsKernel,
    experts: DeviceExpertsView<'_>,
    [pairs, top_k]: [usize; 2],
) -> Option<(PlanGrid, u64)> {
    let sorted = Sorted { pairs: pairs as u32, top_k: top_k as u32 };
    let grid = PlanGrid::new(experts.count() as u64, sorted, kernel.tile_bits())?;
    Some((grid, Plan::bytes(u64::from(grid.most_tiles)).next_multiple_of(256)))
}

/// Bytes of slots of global scales. Kernels load a word of an expert's also where experts have no global scales, and do nothing with it:
/// what products work in is as long as slots are.
fn slot_bytes(experts: DeviceExpertsView<'_>) -> u64 {
    experts.count() as u64 * size_of::<GlobalSlot>() as u64
}

/// Bytes that products of experts' weights with so many pairs, or fewer, work in.
pub(in crate::gpu) fn experts_workspace(
    kernels: &Kernels,
    experts: DeviceExpertsView<'_>,
    pairs: usize,
) -> Result<usize> {
    limited("pairs of a token and an expert", pairs, PAIR_LIMIT)?;
    let mut most = slot_bytes(experts);
    for kernel in ExpertsKernel::of(kernels.target()) {
        let Some((grid, plan)) = plan_grid(kernel, experts, [pairs, 1]) else { continue };
        most = most.max(plan);
        if let ExpertsKernel::Many(kernel) = kernel
            && takes_many(experts)
            && experts.shape().rows > 0
        {
            let tiles = u64::from(grid.most_tiles);
            // A GPU may have too little shared memory for a kernel.
            let grids = gemm::Grids::of_experts(kernels, kernel, experts.shape(), tiles, true);
            most = most.max(grids.map_or(0, |grids| plan + grids.bytes(kernel)));
        }
    }
    Ok(most as usize)
}

/// Enqueues a plan and a product. The caller has checked that the routing is these experts', that there are so many rows of activations,
/// and that `out` has room.
#[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
pub(in crate::gpu) fn gemm_experts<T: TensorCoreActivation, O: ProductOf<T>>(
    kernels: &Kernels,
    stream: &Arc<CudaStream>,
    kernel: ExpertsKernel,
    experts: DeviceExpertsView<'_>,
    activations: DeviceView<'_, T>,
    (routing, rows): (&DeviceRouting, ExpertRows),
    epilogue: DeviceEpilogue<'_, T, O>,
    mut workspace: GemmWorkspaceMut<'_>,
    mut out: DeviceViewMut<'_, O>,
) -> Result<()> {
    let (shape, pairs) = (experts.shape(), routing.pairs);
    limited("pairs of a token and an expert", pairs, PAIR_LIMIT)?;
    let Some((mut grid, plan_bytes)) = plan_grid(kernel, experts, [pairs, routing.top_k]) else {
        return Ok(());
    };
    if shape.rows == 0 {
        return Ok(());
    }
    let token_tiles = TokenTiles { count: u64::from(grid.most_tiles), bits: grid.tile_bits };
    let (activations, _read) = activations.read(stream, "the activations", 1)?;
    let ((codes, scales, slots), _weights) = experts.read(stream)?;
    let (out, _written) = out.write(stream, "the output", 1)?;
    let (steps, _steps_read) = epilogue.read(stream)?;
    let aligned = activations.is_multiple_of(16) && shape.cols.is_multiple_of(8);
    let many = match kernel {
        ExpertsKernel::Many(_) if !takes_many(experts) => {
            return Err(Error::NoKernel { format: shape.format });
        }
        ExpertsKernel::Many(kernel) => {
            let ids = gemm::ids(kernel, shape, T::DTYPE)?;
            Some((
                (kernel, ids),
                gemm::Grids::of_experts(kernels, kernel, shape, token_tiles.count, aligned)?,
            ))
        }
        ExpertsKernel::Few(_) => None,
    };
    let more = many.as_ref().map_or(0, |((kernel, _), grids)| grids.bytes(*kernel));
    let ([counters, plan], _used) = workspace.write(stream, (plan_bytes + more).max(slot_bytes(experts)))?;
    if let Some(((kernel, _), grids)) = &many {
        [grid.row_tiles, grid.k_iterations] = grids.row_tiles_and_k_iterations(*kernel);
        grid.at_once = kernels.multiprocessors();
    }
    let (ends, _ends) = routing.ends.device_ptr(stream);
    let (tokens, _tokens) = routing.tokens.device_ptr(stream);
    let (order, _order) = routing.order.device_ptr(stream);
    let (sorted, _sorted) = routing.sorted.device_ptr(stream);
    let ready = kernels.ready(Experts::Plan.id())?;
    let mut launch = stream.launch_builder(&ready.function);
    let of_plan = Argument(grid);
    launch.arg(&ends).arg(&sorted).arg(&plan).arg(&of_plan);
    // SAFETY: the arguments are the kernel's, in order, and the launch is one warp. The routing's lists are what it says was sorted, or
    // zeros, and there is room for the plan.
    unsafe { launch.launch(config(&ready.kernel, 1)?) }.map_err(doing("planning products with experts"))?;

    let slot = slots.unwrap_or(plan);
    let apply = apply_direction(experts.direction());
    let operands = Operands { codes, scales, slot, activations, out, apply, steps };
    let (from, to) = match rows {
        ExpertRows::Gathered => (tokens, 0),
        ExpertRows::Sorted => (0, 0),
        ExpertRows::Scattered => (0, order),
        ExpertRows::Indexed => (tokens, order),
        ExpertRows::Paired => (order, order),
    };
    let routed = Routed { plan, from, to };
    // SAFETY: experts' weights are linear, each starts on what kernels ask for, and each has a slot, or as many bytes. The plan is made for these token
    // tiles, and the lists have the rows of all sorted pairs. The borrows keep the buffers from overlapping, and until the launches are
    // enqueued.
    unsafe {
        match (&many, kernel) {
            (Some((kernel, grids)), _) => {
                let memory = [counters, plan + plan_bytes];
                gemm::enqueue(kernels, stream, *kernel, &operands, routed, grids, memory)
            }
            (None, ExpertsKernel::Few(few)) => {
                let (of, tiles) = ((shape, T::DTYPE), (pairs, Some(token_tiles)));
                // Pipelined kernels find rows of activations by offsets of 32 bits.
                let far = (pairs as u64).saturating_mul(shape.cols as u64 * 2) >= 1 << 32;
                let kernel = if far { GemvWeightsKernel::OTHERWISE } else { few.kernel() };
                weights::enqueue(kernels, stream, kernel, of, &operands, routed, tiles)
            }
            (None, ExpertsKernel::Many(_)) => Err(Error::NoKernel { format: shape.format }),
        }
    }
}
