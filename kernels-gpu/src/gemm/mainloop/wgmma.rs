//! The mainloop for compute capability 9.0. Producer warps copy. Consumer warp groups decode
//! weights and multiply them by all tokens of the work tile; one group multiplies while another
//! decodes.

use microscale_kernels_abi::gemm::stage::{MOST_STAGES, ScalePieces, WORD_OFFSET};
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::gemm::cluster_exchange;
use crate::gemm::fragment::{FragmentLoader, out_of_range_is_zero};
use crate::gemm::params::{Launch, Params};
use crate::gemm::pipeline::{self, PipelineState};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::{KRange, TileScheduler, WorkTile};
use crate::gemm::weight_loader::{WeightLoader, stage_for};
use crate::gemm::work_queue::WorkQueue;
use crate::hardware::warp_group::{self, MultiplyTokens, Registers, core_matrices};
use crate::hardware::{cluster, mbarrier, ptx, shared, warp};
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Producer threads per thread block.
const PRODUCERS: u32 = 4 * WARP;

/// Multiplies weights by packed activations.
///
/// The packing kernel runs before this one, and this kernel waits for it. The packing kernel itself
/// has waited for all earlier work before it let this kernel start, so weights and the experts'
/// plan can be read at once.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: WeightFormat, D: Activations, T: Tile>(params: &Params<'_>)
where
    D::Wgmma: MultiplyTokens<T::Accumulators>,
{
    const {
        assert!(T::CONFIG.threads() == T::CONFIG.consumer_warps() * WARP + PRODUCERS);
        T::MATCHES_THE_LIST
    };
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    let number = warp::number();
    // In shared memory, so that the assembler does not know the value: it would copy a known one to
    // a register at each use.
    let table = warp::shared::<u32>().wrapping_add(WORD_OFFSET as usize / 4);
    // Warp 0 initializes the barriers while warp 1 writes the word and the plan.
    if warp::thread() < MOST_STAGES {
        // SAFETY: each thread has its own stage, and no thread uses the barriers yet. A producer
        // thread arrives with its copies; the first one also arrives for the activations.
        unsafe {
            let consumers = const { T::CONFIG.consumer_warps() * T::CONFIG.row_sharers() };
            pipeline::init(base, warp::thread(), PRODUCERS + 1, consumers);
        }
        mbarrier::fence_init();
    } else if number == 1 {
        // SAFETY: the word is in the launch's shared memory, before the stages. No thread reads it
        // or the plan before the barrier.
        unsafe {
            if warp::lane() == 0 {
                *table = D::TABLE;
            }
            params.launch.write_plan(&params.problem.routed);
        }
    }
    // With many accumulators, consumers take registers from producers.
    if number < const { T::CONFIG.consumer_warps() } {
        // SAFETY: all lanes of the warp are here.
        unsafe { barrier::<T>() };
        if T::Accumulators::LEN > 64 {
            warp_group::set_registers(Registers::Many);
        }
        // SAFETY: whole warp groups are here, and the barriers and the plan are initialized.
        unsafe { consume::<F, D, T>(params, base, number, *table) };
        return;
    }
    if T::Accumulators::LEN > 64 {
        warp_group::set_registers(Registers::Few);
    }
    let Params { problem, launch: Launch { gemm, .. }, .. } = *params;
    // SAFETY: exactly the producer warps are here.
    unsafe {
        // Kernels with clusters never multiply experts' rows.
        if T::CONFIG.cluster > 1 || problem.routed.plan.is_null() {
            // The schedule is read from the parameters, so that the first work tile is found before
            // the barrier.
            let launch = Launch { gemm, schedule: &gemm.schedule };
            produce::<F, T>(&Params { launch, ..*params }, base, true);
        } else {
            barrier::<T>();
            produce::<F, T>(params, base, false);
        }
    }
}

/// The barrier of the thread block, with multicast of the cluster: its thread blocks write to each
/// other's stages and barriers.
///
/// # Safety
/// All lanes of the warp call it.
#[inline(always)]
unsafe fn barrier<T: Tile>() {
    if T::MULTICAST {
        // SAFETY: all lanes arrive and wait.
        unsafe {
            cluster::arrive();
            cluster::wait();
        }
    } else {
        warp::barrier();
    }
}

/// Copies everything that the thread block multiplies. If `barrier_ahead`, the thread block's
/// barrier is still to come: until then the stages' barriers are not initialized.
///
/// # Safety
/// The kernel's contract. Exactly the producer warps call it.
#[inline(always)]
unsafe fn produce<F: WeightFormat, T: Tile>(params: &Params<'_>, base: u32, mut barrier_ahead: bool) {
    let gemm = params.launch.gemm;
    let thread = warp::thread() - const { T::CONFIG.consumer_warps() * WARP };
    let stage_shape = stage_for::<F, T>(params.problem);
    let mut state = PipelineState::new(&stage_shape, gemm.shared, base);
    let mut queue = WorkQueue::new(base);
    let mut packed_are_there = false;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let work_tile = params.work_tile::<T>(k_range);
        let WorkTile { row_tile, token_tile, .. } = work_tile;
        let problem = params.problem.of_expert::<F>(work_tile.expert);
        let pack = u64::from(token_tile) * gemm.k_iterations.divisor + u64::from(k_range.start);
        let pack_bytes = const { T::STAGE.activation_bytes() };
        let mut pack = params.packed.wrapping_add((pack * u64::from(pack_bytes)) as usize);
        let mut weights =
            WeightLoader::<F, T, PRODUCERS>::new(&problem, &stage_shape, row_tile, &k_range, thread);
        let k_iterations = k_range.end - k_range.start;
        let mut left = k_iterations;
        if barrier_ahead {
            // SAFETY: all lanes of the warp are here.
            unsafe { barrier::<T>() };
            barrier_ahead = false;
        }
        while left > 0 {
            state.producer_acquire();
            // SAFETY: all consumer warps have released the stage.
            unsafe {
                weights.copy(state.stage_address());
                state.producer_commit();
            }
            if thread == 0 {
                if !packed_are_there {
                    ptx::wait_for_previous_kernel();
                    packed_are_there = true;
                }
                // SAFETY: this thread has acquired the stage. The pack is in the packed
                // activations, which are there now; its bytes are a multiple of 16.
                unsafe {
                    if left == k_iterations {
                        queue.push(&work_tile);
                    }
                    mbarrier::arrive_expecting(state.full_barrier(), pack_bytes);
                    let to = state.stage_address() + const { T::STAGE.codes_bytes() };
                    let barrier = state.full_barrier();
                    if T::MULTICAST {
                        let bytes = const { T::STAGE.activation_bytes() / T::CONFIG.row_sharers() };
                        let blocks = const { (1 << T::CONFIG.row_sharers()) - 1 };
                        let first = cluster::rank() * bytes;
                        let from = pack.wrapping_add(first as usize);
                        mbarrier::copy_multicast(to + first, from, bytes, barrier, blocks);
                    } else {
                        mbarrier::copy(to, pack, pack_bytes, barrier);
                    }
                }
                pack = pack.wrapping_add(pack_bytes as usize);
            }
            state.advance();
            left -= 1;
        }
        queue.advance();
        scheduler.advance(&k_range);
    }
    if barrier_ahead {
        // SAFETY: all lanes of the warp are here.
        unsafe { barrier::<T>() };
    }
    // Memory is idle from now on.
    ptx::start_next_kernel();
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

/// Packs of a range that have columns: the last K-iteration may have one less.
#[inline(always)]
fn packs_of<T: Tile>(problem: &Problem, k_range: &KRange) -> u32 {
    let of_row = (problem.shape.cols as u32).div_ceil(PACK_COLUMNS);
    of_row.min(k_range.end * T::PACKS) - k_range.start * T::PACKS
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
    let [mut next] = unsafe { fragments.load::<D, 1>(stage, 0) };
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
                    [next] = fragments.load::<D, 1>(stage, pack + 1);
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    [next] = fragments.load::<D, 1>(stage, 0);
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
