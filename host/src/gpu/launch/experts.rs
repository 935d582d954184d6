//! Launching products of experts' weights, and the kernels in front of them.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, PushKernelArg};
use microscale_kernels_abi::experts::{EXPERT_LIMIT, Plan, PlanGrid, RouteGrid, Sorted};
use microscale_kernels_abi::weights::TokenTiles;
use microscale_kernels_abi::{Divider, Experts, GlobalSlot};

use super::{gemm, parts, weights};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::experts::ExpertRows;
use crate::gemv::{Activation, ProductOf};
use crate::gpu::arguments::{Argument, Operands, Routed, Steps, apply_direction, config, limited};
use crate::gpu::driver::doing;
use crate::gpu::epilogue::DeviceEpilogue;
use crate::gpu::experts::DeviceRouting;
use crate::gpu::experts_kernel::ExpertsKernel;
use crate::gpu::experts_view::DeviceExpertsView;
use crate::gpu::gemm_workspace::GemmWorkspaceMut;
use crate::gpu::gemv_weights_kernel::GemvWeightsKernel;
use crate::gpu::kernels::Kernels;
use crate::gpu::memory::{DeviceView, DeviceViewMut};
use crate::shape::QuantizedShape;

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

/// Rows of activations of a dtype for each pair, and the dtype in which they are multiplied.
fn multiplied(dtype: Dtype) -> (usize, Dtype) {
    if dtype == Dtype::F32 { (parts::ROWS, Dtype::Bf16) } else { (1, dtype) }
}

/// The kernel for experts and so many pairs with activations of a dtype.
pub(in crate::gpu) fn choose_experts(
    kernels: &Kernels,
    experts: DeviceExpertsView<'_>,
    pairs: usize,
    dtype: Dtype,
) -> ExpertsKernel {
    let target = kernels.target();
    let counts = [experts.count(), pairs, multiplied(dtype).0];
    ExpertsKernel::choose(target, takes_many(experts), experts.shape(), counts)
}

/// Returns whether kernels for many rows take the weights: each expert's scales must start on 4 bytes.
fn takes_many(experts: DeviceExpertsView<'_>) -> bool {
    let shape = experts.shape();
    gemm::takes(shape) && (shape.rows * shape.blocks_per_row()).is_multiple_of(4)
}

/// Token tiles of a kernel for pairs of so many experts a token, with so many rows each, and bytes of memory for their plan.
fn plan_grid(
    kernel: ExpertsKernel,
    experts: DeviceExpertsView<'_>,
    [pairs, top_k, of_pair]: [usize; 3],
) -> Option<(PlanGrid, u64)> {
    let sorted = Sorted { pairs: pairs as u32, top_k: top_k as u32 };
    let grid = PlanGrid::new(experts.count() as u64, sorted, of_pair as u32, kernel.tile_bits())?;
    Some((grid, Plan::bytes(u64::from(grid.most_tiles)).next_multiple_of(256)))
}

/// Bytes of slots of global scales. Kernels load a word of an expert's also where experts have no global scales, and do nothing with it:
/// what products work in is as long as slots are.
fn slot_bytes(experts: DeviceExpertsView<'_>) -> u64 {
    experts.count() as u64 * size_of::<GlobalSlot>() as u64
}

/// Bytes that activations of a dtype in front of a product work in, and the sums behind it.
fn around_bytes(shape: QuantizedShape, pairs: usize, dtype: Dtype) -> [u64; 2] {
    if dtype == Dtype::F32 { parts::bytes(pairs, shape.rows, shape.cols) } else { [0; 2] }
}

/// Bytes that products of experts' weights and activations of a dtype with so many pairs, or fewer, work in.
pub(in crate::gpu) fn experts_workspace(
    kernels: &Kernels,
    experts: DeviceExpertsView<'_>,
    pairs: usize,
    dtype: Dtype,
) -> Result<usize> {
    limited("pairs of a token and an expert", pairs, PAIR_LIMIT)?;
    let mut most = slot_bytes(experts);
    let (of_pair, _) = multiplied(dtype);
    let [parts, sums] = around_bytes(experts.shape(), pairs, dtype);
    for kernel in ExpertsKernel::of(kernels.target()) {
        let Some((grid, plan)) = plan_grid(kernel, experts, [pairs, 1, of_pair]) else { continue };
        let plan = plan + parts + sums;
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

/// Enqueues a plan and a product, with activations in f32 between the two kernels that make parts of them and add up their sums. The caller has checked that the routing is these experts', that there are so many rows of activations,
/// and that `out` has room.
#[expect(clippy::too_many_arguments, reason = "the operands of a product, where it is, and its kernel")]
pub(in crate::gpu) fn gemm_experts<T: Activation, O: ProductOf<T>>(
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
    let (of_pair, dtype) = multiplied(T::DTYPE);
    let Some((mut grid, plan_bytes)) = plan_grid(kernel, experts, [pairs, routing.top_k, of_pair]) else {
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
    // Parts lie on 16 bytes.
    let aligned = (of_pair > 1 || activations.is_multiple_of(16)) && shape.cols.is_multiple_of(8);
    let many = match kernel {
        ExpertsKernel::Many(_) if !takes_many(experts) => {
            return Err(Error::NoKernel { format: shape.format });
        }
        ExpertsKernel::Many(kernel) => {
            let ids = gemm::ids((kernel, false), shape, dtype)?;
            Some((
                (kernel, ids),
                gemm::Grids::of_experts(kernels, kernel, shape, token_tiles.count, aligned)?,
            ))
        }
        ExpertsKernel::Few(_) => None,
    };
    let more = many.as_ref().map_or(0, |((kernel, _), grids)| grids.bytes(*kernel));
    let [parts_bytes, sums_bytes] = around_bytes(shape, pairs, T::DTYPE);
    let bytes = plan_bytes + parts_bytes + sums_bytes + more;
    let ([counters, plan], _used) = workspace.write(stream, bytes.max(slot_bytes(experts)))?;
    let parts = plan + plan_bytes;
    let sums = parts + parts_bytes;
    let memory = [counters, sums + sums_bytes];
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
    let mut operands = Operands { codes, scales, slot, activations, out, apply, steps };
    let (from, to) = match rows {
        ExpertRows::Gathered => (tokens, 0),
        ExpertRows::Sorted => (0, 0),
        ExpertRows::Scattered => (0, order),
        ExpertRows::Indexed => (tokens, order),
        ExpertRows::Paired => (order, order),
    };
    let listed = Routed { plan, from, to };
    let mut routed = listed;
    // SAFETY: experts' weights are linear, each starts on what kernels ask for, and each has a slot, or as many bytes. The plan is made for these token
    // tiles, and the lists have the rows of all sorted pairs. Parts, sums and what the product works in lie behind the plan and each other,
    // with the room that was asked for; parts and sums are of sorted rows. The borrows keep the buffers from overlapping, and until the
    // launches are enqueued.
    unsafe {
        if of_pair > 1 {
            parts::split(kernels, stream, activations, parts, listed, [pairs, shape.cols])?;
            operands = Operands { activations: parts, out: sums, steps: Steps::SUMS, ..operands };
            routed = Routed { plan, ..Routed::default() };
        }
        match (&many, kernel) {
            (Some((kernel, grids)), _) => {
                gemm::enqueue(kernels, stream, *kernel, &operands, routed, grids, memory)?;
            }
            (None, ExpertsKernel::Few(few)) => {
                let rows = pairs * of_pair;
                let (of, tiles) = ((shape, dtype), (rows, Some(token_tiles)));
                // Pipelined kernels find rows of activations by offsets of 32 bits.
                let far = (rows as u64).saturating_mul(shape.cols as u64 * 2) >= 1 << 32;
                let kernel = if far { GemvWeightsKernel::OTHERWISE } else { few.kernel() };
                weights::enqueue(kernels, stream, kernel, of, &operands, routed, tiles)?;
            }
            (None, ExpertsKernel::Many(_)) => return Err(Error::NoKernel { format: shape.format }),
        }
        if of_pair > 1 {
            parts::merge(kernels, stream, sums, out, steps, listed, [pairs, shape.rows])?;
        }
    }
    Ok(())
}
