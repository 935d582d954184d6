//! The mainloop for compute capability 9.0 and 16-bit activations. Producer warps copy. Consumer
//! warp groups decode weights and multiply them by all tokens of the work tile; one group
//! multiplies while another decodes.

use microscale_kernels_abi::gemm::stage::{ScalePieces, WORD_OFFSET};
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_ROWS};

use super::warp_specialized::{packs_of, start};
use crate::gemm::cluster_exchange;
use crate::gemm::fragment::{FragmentLoader, out_of_range_is_zero};
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::TileScheduler;
use crate::gemm::tile_scheduler::WorkTile;
use crate::gemm::weight_loader::stage_for;
use crate::gemm::work_queue::WorkQueue;
use crate::hardware::warp_group::{MultiplyTokens, core_matrices};
use crate::hardware::{cluster, shared, warp};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: WeightFormat, D: Activations, T: Tile>(params: &Params<'_>)
where
    D::Wgmma: MultiplyTokens<T::Accumulators>,
{
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    // SAFETY: the same contract. Consumer warps are whole warp groups, and the barriers, the plan
    // and the word are initialized for them.
    unsafe {
        if start::<F, T>(params, base, D::TABLE) {
            // In shared memory, so that the assembler does not know the value: it would copy a
            // known one to a register at each use.
            let table = warp::shared::<u32>().wrapping_add(WORD_OFFSET as usize / 4);
            consume::<F, D, T>(params, base, warp::number(), *table);
        }
    }
}

/// Multiplies everything that the producers copy. Warp `tile` has tile `tile` of 16 rows; a warp
/// group has four tiles.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn consume<F: WeightFormat, D: Activations, T: Tile>(
    params: &Params<'_>,
    base: u32,
    tile: u32,
    table: u32,
) where
    D::Wgmma: MultiplyTokens<T::Accumulators>,
{
    let problem = params.problem;
    let stage_shape = stage_for::<F, T>(problem);
    let mut state = PipelineState::new(&stage_shape, params.launch.gemm.shared, base);
    let same_leads =
        (problem.shape.rows * problem.shape.blocks).is_multiple_of(u64::from(ScalePieces::MOST.bytes));
    if TileScheduler::<T>::new(params.launch).next().is_none() {
        return;
    }
    let mut queue = WorkQueue::new(base);
    loop {
        state.consumer_wait();
        // SAFETY: the work tile's first stage is full.
        let WorkTile { k_range, expert, .. } = unsafe { queue.front() };
        // The address of an expert's scales matters only where experts' leads differ.
        let of_expert = problem.of_expert::<F>(if same_leads { 0 } else { expert });
        let mut fragments = FragmentLoader::<F, T>::new(&of_expert, &stage_shape, tile, k_range.start);
        let mut accumulators = T::Accumulators::ZEROS;
        let packs = packs_of::<T>(problem, &k_range);
        let (all, fragments, state) = (&mut accumulators, &mut fragments, &mut state);
        // SAFETY: the whole warp group is here.
        let scale_offset =
            unsafe { mainloop::<F, D, T, T::Accumulators>(all, fragments, state, packs, table) };
        // The tile's number in the work tile.
        let tile = T::first_row() / TILE_ROWS + tile;
        // SAFETY: the whole warp group is here. The producer reuses the queue's entry only after
        // this warp has released the first stage of a later work tile.
        unsafe {
            let work_tile = queue.front();
            let in_range = scale_offset <= F::last_in_range::<D>() || {
                let problem = problem.of_expert::<F>(work_tile.expert);
                out_of_range_is_zero::<F, D, T>(&problem, work_tile.row_tile, tile, &work_tile.k_range)
            };
            let in_range = F::ALWAYS_IN_RANGE || warp::ballot(in_range) == u32::MAX;
            if T::CONFIG.k_sharers() > 1 {
                let (kept, in_range) = cluster_exchange::add::<T>(base, tile, &accumulators, in_range);
                let slice = TokenSlice::half(cluster::rank());
                params.finish::<F, D, T, T::Exchanged, 1>(&work_tile, tile, slice, [kept], in_range);
                cluster::wait();
            } else {
                let all = [accumulators];
                params.finish::<F, D, T, T::Accumulators, 1>(
                    &work_tile,
                    tile,
                    TokenSlice::ALL,
                    all,
                    in_range,
                );
            }
            // Thread blocks that exchange accumulators have one work tile each.
            if T::CONFIG.k_sharers() > 1 {
                return;
            }
            if queue.front_is_last() {
                if T::MULTICAST {
                    // The other thread block's consumers still release stages here.
                    cluster::arrive();
                    cluster::wait();
                }
                return;
            }
        }
        queue.advance();
    }
}

/// Adds all products of a work tile's K-iterations to the accumulators. Returns the largest
/// [offset](WeightFormat::scale_offset) of the scales.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: WeightFormat, D: Activations, T: Tile, A: Array>(
    accumulators: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
    table: u32,
) -> u32
where
    D::Wgmma: MultiplyTokens<A>,
{
    let mut scale_offset = 0;
    let mut left = packs;
    let mut first = true;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full.
    let [mut next] = unsafe { fragments.load::<1>(stage, 0, F::first_in_range::<D>()) };
    while left > 0 {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = core_matrices(at);
        for pack in 0..T::PACKS {
            let now = next;
            let factors = now.factors::<F, D>();
            scale_offset = now.scale_offset::<F, D>().max(scale_offset);
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                D::Wgmma::multiply_tokens(accumulators, now.decode::<D, 0>(&factors, table), tokens);
                if pack == 0 {
                    // `multiply_tokens` has waited for all products of the previous stage.
                    state.consumer_release_previous::<T>(!first);
                }
                D::Wgmma::multiply_tokens(accumulators, now.decode::<D, 1>(&factors, table), tokens + 32);
                // The next pack's weights are loaded while these are decoded. After the last pack,
                // its own stage is loaded again.
                if pack + 1 < T::PACKS {
                    [next] = fragments.load::<1>(stage, pack + 1, F::first_in_range::<D>());
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    [next] = fragments.load::<1>(stage, 0, F::first_in_range::<D>());
                }
                D::Wgmma::multiply_tokens(accumulators, now.decode::<D, 2>(&factors, table), tokens + 64);
                D::Wgmma::multiply_tokens(accumulators, now.decode::<D, 3>(&factors, table), tokens + 96);
            }
            tokens += const { T::N * PACK_COLUMNS * 2 / 16 };
            left -= 1;
            if left == 0 {
                break;
            }
        }
        state.advance();
        first = false;
    }
    // SAFETY: the whole warp group is here, and `wait` waits for all products.
    unsafe {
        D::Wgmma::wait(accumulators);
        state.consumer_release_previous::<T>(true);
    }
    scale_offset
}
