//! The mainloop for compute capability 9.0 and 16-bit activations. Producer warps copy, and for few
//! tokens pack activations. Consumer warp groups decode weights and multiply them by all tokens of
//! the work tile; one group multiplies while another decodes.

use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::stage::WORD_OFFSET;

use super::warp_specialized::{Consumer, consume, run};
use crate::gemm::cluster_exchange;
use crate::gemm::fragment::{FragmentLoader, out_of_range_is_zero};
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
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
        let consumer = #[inline(always)]
        || {
            // In shared memory, so that the assembler does not know the value: it would copy a
            // known one to a register at each use.
            let table = warp::shared::<u32>().wrapping_add(WORD_OFFSET as usize / 4);
            let table = *table;
            consume::<F, T>(
                params,
                base,
                warp::number(),
                #[inline(always)]
                |consumer, packs, tile| {
                    multiply::<F, D, T>(params, consumer, packs, tile, base, table);
                },
            );
        };
        run::<F, D, T>(params, base, D::TABLE, consumer, || {});
    }
}

/// Multiplies and finishes the work tile that the consumer reads, of `packs` packs. The warp has
/// tile `tile` of it.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn multiply<F: WeightFormat, D: Activations, T: Tile>(
    params: &Params<'_>,
    consumer: &mut Consumer<F, T>,
    packs: u32,
    tile: u32,
    base: u32,
    table: u32,
) where
    D::Wgmma: MultiplyTokens<T::Accumulators>,
{
    let mut accumulators = T::Accumulators::ZEROS;
    let Consumer { fragments, state, .. } = consumer;
    // SAFETY: the whole warp group is here.
    unsafe {
        let scale_offset =
            mainloop::<F, D, T, T::Accumulators>(&mut accumulators, fragments, state, packs, table);
        let work_tile = consumer.work_tile();
        let in_range = scale_offset <= F::last_in_range::<D>() || {
            let problem = params.problem.of_expert::<F>(work_tile.expert);
            out_of_range_is_zero::<F, D, T>(&problem, work_tile.row_tile, tile, &work_tile.k_range)
        };
        let in_range = F::ALWAYS_IN_RANGE || warp::ballot(in_range) == u32::MAX;
        if T::CONFIG.k_sharers() > 1 {
            consumer.state.consumer_release_previous::<T>(true);
            let (kept, in_range) = cluster_exchange::add::<T>(base, tile, &accumulators, in_range);
            let slice = TokenSlice::of_cluster(cluster::rank());
            params.finish::<F, D, T, T::Half, 1>(&work_tile, tile, slice, [kept], in_range);
            cluster::wait();
        } else {
            consumer.finish::<D>(params, &work_tile, tile, accumulators, in_range);
        }
    }
}

/// Waits until a stage can be multiplied, and returns its address.
#[inline(always)]
fn wait_until_ready<T: Tile>(state: &PipelineState) -> u32 {
    if T::PACKS_ACTIVATIONS { state.wait_until_prepared() } else { state.consumer_wait() }
}

/// Adds all products of a work tile's K-iterations to the accumulators, and releases all stages but
/// the last one. Returns the largest [offset](WeightFormat::scale_offset) of the scales.
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
    let mut stage = wait_until_ready::<T>(state);
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
                    stage = wait_until_ready::<T>(&state.next_if(left > 1));
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
    // SAFETY: the whole warp group is here.
    unsafe { D::Wgmma::wait(accumulators) };
    scale_offset
}
