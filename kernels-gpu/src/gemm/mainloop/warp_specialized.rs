//! The parts that the mainloops for compute capability 9.0 share. Their thread blocks have producer
//! warps, which copy and for few tokens pack, and consumer warp groups, which multiply.

use microscale_kernels_abi::gemm::stage::{MOST_STAGES, ScalePieces, WORD_OFFSET};
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::gemm::activation_loader::{ActivationLoader, pack_copied};
use crate::gemm::fragment::FragmentLoader;
use crate::gemm::group_results::{LEAST_TOKENS, ResultBuffer};
use crate::gemm::params::{Launch, Params};
use crate::gemm::pipeline::{self, PipelineState, barrier, swizzled_front};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::Tile;
use crate::gemm::tile_scheduler::{KRange, TileScheduler, WorkTile};
use crate::gemm::weight_loader::{WeightLoader, stage_for};
use crate::gemm::work_queue::WorkQueue;
use crate::hardware::warp_group;
use crate::hardware::{cluster, mbarrier, ptx, warp};
use crate::product::problem::Problem;
use crate::product::product_format::ProductFormat;
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Producer threads per thread block.
const PRODUCERS: u32 = 4 * WARP;
/// Producer threads that copy in kernels that pack activations; the others pack. Threads that pack
/// fence their writes ([`fence_writes`](crate::hardware::shared::fence_writes)), which presumably
/// waits for all copies that they have started, too. Kernels whose threads did both took longer.
const FEW_COPIERS: u32 = 2 * WARP;

/// Initializes the thread block, and runs the parts of its warps: producer warps copy everything
/// that it multiplies, and some of them pack activations where the kernel does; consumer warps
/// `multiply`; decoder warps, if there are any, `decode`. `base` is the address of the front of the
/// stages in shared memory. `word` is written to the launch's shared memory for all threads.
///
/// A kernel that packs activations waits for all earlier work. Otherwise the packing kernel runs
/// before this one, and this kernel waits for it before it reads activations. The packing kernel
/// itself has waited for all earlier work before it let this kernel start, so weights and the
/// experts' plan can be read at once.
///
/// # Safety
/// The contract of the entry points of these mainloops. All threads call it once, at first.
#[inline(always)]
pub(super) unsafe fn run<F: ProductFormat, D: Activations, T: Tile>(
    params: &Params<'_>,
    base: u32,
    word: u32,
    multiply: impl Fn(),
    decode: impl Fn(),
) {
    const {
        let decoders = T::CONFIG.mainloop.traits().decoder_warps * WARP;
        assert!(T::CONFIG.threads() == T::CONFIG.consumer_warps() * WARP + PRODUCERS + decoders);
        let packers = T::CONFIG.packing_warps() * WARP;
        assert!(!T::PACKS_ACTIVATIONS || FEW_COPIERS + packers == PRODUCERS);
        T::MATCHES_THE_LIST
    };
    let number = warp::number();
    // Warp 0 initializes the barriers while warp 1 writes the word and the plan.
    if warp::thread() < MOST_STAGES {
        // SAFETY: each thread has its own stage, and no thread uses the barriers yet. A thread that
        // copies arrives with its copies; the first one also arrives for the queue and for packed
        // activations.
        unsafe {
            let copiers = const { if T::PACKS_ACTIVATIONS { FEW_COPIERS } else { PRODUCERS } };
            let consumers = const { T::CONFIG.consumer_warps() * T::CONFIG.row_sharers() };
            let preparers = const { T::CONFIG.mainloop.traits().decoder_warps + T::CONFIG.packing_warps() };
            pipeline::init(base, warp::thread(), copiers + 1, consumers, preparers);
        }
        mbarrier::fence_init();
    }
    if T::PACKS_ACTIVATIONS {
        ptx::wait_for_previous_kernel();
    }
    if number == 1 {
        // SAFETY: the word is in the launch's shared memory, before the stages. No thread reads it
        // or the plan before the barrier.
        unsafe {
            if warp::lane() == 0 {
                *warp::shared::<u32>().wrapping_add(WORD_OFFSET as usize / 4) = word;
            }
            params.launch.write_plan(&params.problem.routed);
        }
    }
    // With many accumulators, consumers take registers from producers.
    if number < const { T::CONFIG.consumer_warps() } {
        // SAFETY: all lanes of the warp are here.
        unsafe { barrier::<T>() };
        if T::CONFIG.mainloop.has_decoders() {
            warp_group::acquire_registers::<216>();
        } else if T::MANY_SUMS && const { T::CONFIG.consumer_warps() > 2 * warp_group::WARPS } {
            warp_group::acquire_registers::<160>();
        } else if T::MANY_SUMS {
            warp_group::acquire_registers::<232>();
        }
        return multiply();
    }
    if T::CONFIG.mainloop.has_decoders() && number >= const { T::CONFIG.consumer_warps() + PRODUCERS / WARP }
    {
        // SAFETY: all lanes of the warp are here.
        unsafe { barrier::<T>() };
        warp_group::release_registers::<48>();
        return decode();
    }
    if T::MANY_SUMS {
        warp_group::release_registers::<32>();
    }
    let Params { problem, launch: Launch { gemm, .. }, .. } = *params;
    if T::PACKS_ACTIVATIONS && number >= const { T::CONFIG.consumer_warps() + (FEW_COPIERS / WARP) } {
        // SAFETY: all lanes of the warp are here, and exactly the packing warps are.
        unsafe {
            barrier::<T>();
            return pack::<F, D, T>(params, base);
        }
    }
    // SAFETY: exactly the producer warps that copy are here.
    unsafe {
        // Kernels with clusters never multiply experts' rows.
        if T::CONFIG.cluster > 1 || problem.routed.plan.is_null() {
            // The schedule is read from the parameters, so that the first work tile is found before
            // the barrier.
            let launch = Launch { gemm, schedule: &gemm.schedule };
            copy::<F, T>(&Params { launch, ..*params }, base, true);
        } else {
            barrier::<T>();
            copy::<F, T>(params, base, false);
        }
    }
}

/// Runs a thread block with swizzled stages whose consumer warps decode for themselves: [`run`] and
/// [`consume`] with these `multiply`.
///
/// # Safety
/// The contract of the entry points of these mainloops. All threads call it once, at first.
#[inline(always)]
pub(super) unsafe fn run_consumers<F: WeightFormat, D: Activations, T: Tile>(
    params: &Params<'_>,
    multiply: impl Fn(&mut Consumer<F, T>, u32, u32) + Copy,
) {
    let base = swizzled_front();
    // SAFETY: the same contract. Consumer warps are whole warp groups, and the barriers and the
    // plan are initialized for them.
    unsafe {
        let consumer = #[inline(always)]
        || consume::<F, T>(params, base, warp::number(), multiply);
        run::<F, D, T>(params, base, 0, consumer, || {});
    }
}

/// [`produce`] by the producer warps that copy.
///
/// # Safety
/// As for [`produce`].
#[inline(always)]
unsafe fn copy<F: ProductFormat, T: Tile>(params: &Params<'_>, base: u32, barrier_ahead: bool) {
    // SAFETY: the same contract.
    unsafe {
        if T::PACKS_ACTIVATIONS {
            produce::<F, T, FEW_COPIERS>(params, base, barrier_ahead);
        } else {
            produce::<F, T, PRODUCERS>(params, base, barrier_ahead);
        }
    }
}

/// Packs the activations of all stages in place.
///
/// # Safety
/// The kernel's contract. Exactly the packing warps call it, with all lanes, after the barrier of
/// the thread block.
#[inline(always)]
unsafe fn pack<F: ProductFormat, D: Activations, T: Tile>(params: &Params<'_>, base: u32) {
    let thread = warp::thread() - const { T::CONFIG.consumer_warps() * WARP + FEW_COPIERS };
    let mut state = PipelineState::new(&stage_for::<F, T>(params.problem), params.launch.gemm.shared, base);
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let mut left = k_range.end - k_range.start;
        while left > 0 {
            let stage = state.consumer_wait();
            // SAFETY: the stage is full, and consumers wait for this warp's arrival.
            unsafe {
                pack_copied::<D, T>(stage + const { T::STAGE.codes_bytes() }, thread);
                state.preparer_commit();
            }
            state.advance();
            left -= 1;
        }
        scheduler.advance(&k_range);
    }
}

/// Copies everything that the thread block multiplies, by `THREADS` threads. If `barrier_ahead`,
/// the thread block's barrier is still to come: until then the stages' barriers are not
/// initialized.
///
/// # Safety
/// The kernel's contract. Exactly the producer warps that copy call it.
#[inline(always)]
unsafe fn produce<F: ProductFormat, T: Tile, const THREADS: u32>(
    params: &Params<'_>,
    base: u32,
    mut barrier_ahead: bool,
) {
    let gemm = params.launch.gemm;
    let thread = warp::thread() - const { T::CONFIG.consumer_warps() * WARP };
    let stage_shape = stage_for::<F, T>(params.problem);
    let mut state = PipelineState::new(&stage_shape, gemm.shared, base);
    let mut queue = WorkQueue::new(base);
    let mut packed_are_there = false;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let mut work_tile = params.work_tile::<T>(k_range);
        let row_tile = work_tile.row_tile;
        let problem = params.problem.of_expert::<F>(work_tile.expert);
        let pack_bytes = const { T::STAGE.activation_bytes() };
        let mut pack = params.packed_of::<T>(&work_tile);
        let mut weights =
            WeightLoader::<F, T, THREADS>::new(&problem, &stage_shape, row_tile, &k_range, thread);
        // SAFETY: the work tile exists.
        let mut activations = T::PACKS_ACTIVATIONS
            .then(|| unsafe { ActivationLoader::<T>::new(params.problem, &work_tile, thread) });
        let k_iterations = k_range.end - k_range.start;
        let mut left = k_iterations;
        if barrier_ahead {
            // SAFETY: all lanes of the warp are here.
            unsafe { barrier::<T>() };
            barrier_ahead = false;
        }
        while left > 0 {
            state.producer_acquire();
            // SAFETY: all consumer warps have released the stage. The first thread has acquired the
            // work tile's first stage when it adds the work tile to the queue.
            unsafe {
                weights.copy(state.stage_address());
                if let Some(activations) = &mut activations {
                    activations.copy(state.stage_address() + const { T::STAGE.codes_bytes() });
                }
                state.producer_commit();
                if !T::PACKS_ACTIVATIONS && thread == 0 && !packed_are_there {
                    ptx::wait_for_previous_kernel();
                    packed_are_there = true;
                    // Kernels that pack FP4 also write the factors of the sums as global scales.
                    work_tile.global_scale = params.global_scale(work_tile.expert);
                }
                if thread == 0 && left == k_iterations {
                    queue.push(&work_tile);
                }
            }
            if T::PACKS_ACTIVATIONS && thread == 0 {
                // Copies do not order the write to the queue before their arrival.
                // SAFETY: the barrier expects a second arrival of this thread.
                unsafe { mbarrier::arrive(state.full_barrier()) };
            }
            if !T::PACKS_ACTIVATIONS && thread == 0 {
                // SAFETY: this thread has acquired the stage. The pack is in the packed
                // activations, which are there now; its bytes are a multiple of 16.
                unsafe {
                    mbarrier::arrive_expecting(state.full_barrier(), pack_bytes);
                    let to = state.stage_address() + const { T::STAGE.codes_bytes() };
                    let barrier = state.full_barrier();
                    if T::SHARES_ROWS {
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

/// The place of a consumer or decoder warp: its next stage, fragment and work tile.
pub(super) struct Consumer<F, T> {
    pub(super) state: PipelineState,
    pub(super) fragments: FragmentLoader<F, T>,
    queue: WorkQueue,
}

impl<F: WeightFormat, T: Tile> Consumer<F, T> {
    /// The work tile that is multiplied.
    ///
    /// # Safety
    /// The work tile's first stage was full. The producer reuses the queue's entry only after this
    /// warp has released the first stage of a later work tile.
    #[inline(always)]
    pub(super) unsafe fn work_tile(&self) -> WorkTile {
        // SAFETY: the caller promises that the entry is there.
        unsafe { self.queue.front() }
    }

    /// Finishes a warp's tile of a work tile, and releases the last stage.
    ///
    /// # Safety
    /// The kernel's contract. The whole warp group calls it, and no other warp has the tile. The
    /// work tile's products have been waited for, and of its stages only the last one is not yet
    /// released. No thread block of the cluster has ended.
    #[inline(always)]
    pub(super) unsafe fn finish<D: Activations>(
        &self,
        params: &Params<'_>,
        work_tile: &WorkTile,
        tile: u32,
        sums: T::Accumulators,
        in_range: bool,
    ) {
        // SAFETY: the same contract.
        unsafe {
            if T::N < LEAST_TOKENS {
                self.state.consumer_release_previous::<T>(true);
                let all = TokenSlice::ALL;
                params.finish::<F, D, T, _, 1>(work_tile, tile, all, [sums], in_range);
            } else {
                let buffer = ResultBuffer::new::<T>(self.state.previous_stage_address());
                params.finish_group::<F, D, T, _>(work_tile, tile, sums, in_range, buffer);
                self.state.consumer_release_previous::<T>(true);
            }
        }
    }
}

/// Calls `work` for each work tile that the producers copy, to multiply or to decode it. `tile` is
/// the warp's first tile of 16 rows in the thread block. `work` gets the number of packs, and the
/// tile's number in the work tile.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
pub(super) unsafe fn consume<F: WeightFormat, T: Tile>(
    params: &Params<'_>,
    base: u32,
    tile: u32,
    mut work: impl FnMut(&mut Consumer<F, T>, u32, u32),
) {
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
        let fragments = FragmentLoader::<F, T>::new(&of_expert, &stage_shape, tile, k_range.start);
        let mut consumer = Consumer { state, fragments, queue };
        let of_work_tile = T::first_row() / TILE_ROWS + tile;
        work(&mut consumer, packs_of::<T>(problem, &k_range), of_work_tile);
        Consumer { state, queue, .. } = consumer;
        // Thread blocks that exchange accumulators have one work tile each.
        if T::CONFIG.k_sharers() > 1 {
            return;
        }
        // SAFETY: the entry is still there. The whole warp group is here.
        unsafe {
            if queue.front_is_last() {
                if T::SHARES_ROWS {
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
