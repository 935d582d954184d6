//! The mainloop for FP4 activations on compute capability 10.0: `tcgen05` multiplies codes and
//! scales as they are stored, and adds the products in tensor memory.
//!
//! Rows of weights are tensor memory's 128 lanes, and tokens are its columns. Producer warps copy
//! to a ring of stages: codes of weights by tensor copies (TMA), packs of activations by bulk
//! copies, scales of weights word by word. One thread of the issuing warp copies a stage's scales
//! to tensor memory and issues its products. Consumer warps load the sums of a work tile and finish
//! it. Up to 128 tokens there are two accumulators, so that the next work tile is multiplied
//! meanwhile. Each warp finds the work tiles itself.
//!
//! In clusters of two thread blocks, each has half of a work tile's rows, and the codes of half of
//! its tokens. The issuing warp of the first thread block multiplies the stages of both. The
//! issuing warp of the second one arrives on the first one's barrier when its own stage is full.
//!
//! An accumulator's k-steps follow each other in the order of K. The sums of whole work tiles
//! therefore have the bits of [`fp4_dot`](microscale_formats::fp4_dot).

use microscale_formats::fp4_dot::STEP;
use microscale_kernels_abi::gemm::fp4::{ATOM_BYTES, ATOM_ROWS};
use microscale_kernels_abi::gemm::stage::{ACCUMULATOR_BARRIERS_OFFSET, MOST_STAGES, WORD_OFFSET};
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use crate::gemm::params::Params;
use crate::gemm::pipeline::{self, PipelineState, barrier, swizzled_front};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::{KRange, TileScheduler};
use crate::gemm::weight_loader::{last_row, scales_per_k_iteration, stage_for};
use crate::hardware::tcgen05::{self, Group, ScalesOf};
use crate::hardware::{cluster, mbarrier, ptx, shared, warp};
use crate::product::problem::Problem;
use crate::product::product_format::{Mxfp4, Nvfp4, ProductFormat};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Producer threads per thread block.
const PRODUCERS: u32 = 2 * WARP;
/// Columns of a K-iteration.
const COLUMNS: u32 = 2 * PACK_COLUMNS;
/// Bytes of the codes of a row in a K-iteration: the width of the swizzle.
const ROW_BYTES: u32 = COLUMNS / 2;
/// K-steps of a K-iteration.
const STEPS: u32 = COLUMNS / STEP as u32;
/// Columns of an atom in tensor memory.
const ATOM_COLUMNS: u32 = 4;
/// Tiles of 16 rows per consumer warp.
const TILES: u32 = 2;

/// A format that the tensor cores multiply as it is stored.
pub(in crate::gemm) trait BlockScaled: WeightFormat {
    /// K-steps whose scales are in one word of a row.
    const STEPS_IN_WORD: u32;
    /// Scale words of a row in a K-iteration.
    const WORDS: u32 = STEPS / Self::STEPS_IN_WORD;

    /// Issues the product of a k-step.
    ///
    /// # Safety
    /// The contract of [`tcgen05::multiply_nvfp4`].
    unsafe fn multiply<G: Group, const TOKENS: u32>(
        sums: u32,
        rows: u64,
        tokens: u64,
        scales: ScalesOf,
        add: bool,
    );
}

impl BlockScaled for Nvfp4 {
    const STEPS_IN_WORD: u32 = 1;

    #[inline(always)]
    unsafe fn multiply<G: Group, const TOKENS: u32>(
        sums: u32,
        rows: u64,
        tokens: u64,
        scales: ScalesOf,
        add: bool,
    ) {
        // SAFETY: the same contract.
        unsafe { tcgen05::multiply_nvfp4::<G, TOKENS>(sums, rows, tokens, scales, add) }
    }
}

impl BlockScaled for Mxfp4 {
    const STEPS_IN_WORD: u32 = 2;

    #[inline(always)]
    unsafe fn multiply<G: Group, const TOKENS: u32>(
        sums: u32,
        rows: u64,
        tokens: u64,
        scales: ScalesOf,
        add: bool,
    ) {
        // SAFETY: the same contract.
        unsafe { tcgen05::multiply_mxfp4::<G, TOKENS>(sums, rows, tokens, scales, add) }
    }
}

impl<T: Tile> Group for T {
    const BLOCKS: u32 = T::CONFIG.row_sharers();
}

/// The columns of tensor memory for a tile: accumulators first, then the scales of each stage.
trait TensorMemory: Tile + Group {
    /// Bytes of the tokens' codes in a stage. Their scales follow.
    const TOKEN_CODES: u32 = Self::N / <Self as Group>::BLOCKS * ROW_BYTES;
    /// Accumulators.
    const ACCUMULATORS: u32 = if Self::N <= 128 { 2 } else { 1 };
    /// Columns of the rows' scales in a stage. The tokens' scales follow.
    const ROW_SCALES: u32 = STEPS * (tcgen05::ROWS / ATOM_ROWS);
    /// Columns of a stage's scales.
    const SCALES: u32 = Self::ROW_SCALES + STEPS * (Self::N / ATOM_ROWS);
    /// Fails to compile unless all columns exist.
    const FITS: () = {
        let stages = Self::STAGE.count(227 << 10);
        assert!(stages <= MOST_STAGES && Self::N % ATOM_ROWS == 0 && Self::BLOCK_ROWS == tcgen05::ROWS);
        assert!(<Self as Group>::BLOCKS <= 2);
        assert!(Self::ACCUMULATORS * Self::N + stages * Self::SCALES <= tcgen05::COLUMNS);
    };
}

impl<T: Tile> TensorMemory for T {}

/// A turn of an accumulator, with the phase of its barriers.
struct Accumulator {
    /// Work tiles before this one.
    number: u32,
    /// The address of the barriers.
    barriers: u32,
}

impl Accumulator {
    /// The thread block's first accumulator. `front` is the address of the stages' front.
    #[inline(always)]
    fn first(front: u32) -> Self {
        Self { number: 0, barriers: front + ACCUMULATOR_BARRIERS_OFFSET }
    }

    /// Initializes the barriers of all accumulators.
    ///
    /// # Safety
    /// As for [`pipeline::init`].
    #[inline(always)]
    unsafe fn init<T: Tile>(front: u32) {
        for i in 0..<T as TensorMemory>::ACCUMULATORS {
            let barriers = front + ACCUMULATOR_BARRIERS_OFFSET + i * 16;
            // SAFETY: the barriers lie before the stages, on 8 bytes, and no thread uses them yet.
            unsafe {
                mbarrier::init(barriers, 1);
                // In a pair, only the first thread block's barrier is used.
                let consumers = const { T::CONFIG.consumer_warps() * <T as Group>::BLOCKS };
                mbarrier::init(barriers + 8, consumers);
            }
        }
    }

    /// The accumulator's index.
    #[inline(always)]
    fn index<T: Tile>(&self) -> u32 {
        self.number % const { <T as TensorMemory>::ACCUMULATORS }
    }

    /// Its first column.
    #[inline(always)]
    fn column<T: Tile>(&self) -> u32 {
        self.index::<T>() * T::N
    }

    /// The parity of its barriers' phase.
    #[inline(always)]
    fn phase<T: Tile>(&self) -> u32 {
        self.number / const { <T as TensorMemory>::ACCUMULATORS } & 1
    }

    /// The barrier on which its products arrive.
    #[inline(always)]
    fn full_barrier<T: Tile>(&self) -> u32 {
        self.barriers + self.index::<T>() * 16
    }

    /// The barrier on which consumer warps arrive.
    #[inline(always)]
    fn empty_barrier<T: Tile>(&self) -> u32 {
        self.full_barrier::<T>() + 8
    }
}

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: BlockScaled, D: Activations, T: Tile>(params: &Params<'_>) {
    const {
        let consumers = T::CONFIG.consumer_warps() * WARP;
        assert!(T::CONFIG.threads() == consumers + PRODUCERS + WARP && T::PACKS == 2);
        let () = T::MATCHES_THE_LIST;
        <T as TensorMemory>::FITS
    };
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    let front = swizzled_front();
    let (number, consumers) = (warp::number(), const { T::CONFIG.consumer_warps() });
    let issues = number == consumers + PRODUCERS / WARP;
    if T::SHARES_ROWS {
        // Allocating writes to the other thread block's shared memory, so it must have started.
        // SAFETY: all lanes of the warp are here.
        unsafe { barrier::<T>() };
    }
    if issues {
        // SAFETY: all lanes of the warp are here. The word is read after the barrier.
        unsafe { tcgen05::allocate::<T>(base + WORD_OFFSET) };
        tcgen05::fence_before_arrival();
    } else if number == 0 {
        if warp::lane() < MOST_STAGES {
            // SAFETY: each lane has its own stage, and no thread uses the barriers yet. A producer
            // thread arrives for its copies; the first one also arrives for bulk and tensor copies,
            // and the second thread block of a pair for its stage.
            unsafe {
                let others = u32::from(T::SHARES_ROWS && cluster::rank() == 0);
                pipeline::init(front, warp::lane(), PRODUCERS + 1 + others, 1, 0);
            }
        }
        if warp::lane() == 0 {
            // SAFETY: no thread uses the barriers yet.
            unsafe { Accumulator::init::<T>(front) };
        }
        mbarrier::fence_init();
    } else if number == 1 {
        // SAFETY: one warp calls it, with all lanes; the barrier follows.
        unsafe { params.launch.write_plan(&params.problem.routed) };
    }
    // SAFETY: all lanes of the warp are here.
    unsafe { barrier::<T>() };
    tcgen05::fence_after_wait();
    // SAFETY: the issuing warp has stored the word.
    let memory = unsafe { shared::load(base + WORD_OFFSET) };
    // SAFETY: each warp is in one of the roles.
    unsafe {
        if issues {
            issue::<F, T>(params, front, memory);
        } else if number >= consumers {
            produce::<F, T>(params, front);
        } else {
            finish::<F, D, T>(params, front, memory);
        }
    }
    tcgen05::fence_before_arrival();
    // SAFETY: all lanes of the warp are here.
    unsafe { barrier::<T>() };
    if issues {
        tcgen05::fence_after_wait();
        // SAFETY: all warps have loaded the sums of all products. All lanes of the warp are here.
        unsafe { tcgen05::deallocate::<T>(memory) };
    }
}

/// Copies everything that the thread block multiplies.
///
/// The packing kernel has waited for all earlier work before it let this kernel start, so weights
/// and the experts' plan can be read before the packing kernel has ended.
///
/// # Safety
/// The kernel's contract. Exactly the producer warps call it.
#[inline(always)]
unsafe fn produce<F: BlockScaled, T: Tile>(params: &Params<'_>, front: u32) {
    let thread = warp::thread() - const { T::CONFIG.consumer_warps() * WARP };
    let stage_shape = stage_for::<F, T>(params.problem);
    let shared = params.launch.gemm.shared;
    let mut state = PipelineState::new(&stage_shape, shared, front);
    // Copies to `oldest` and to all stages up to `state` are pending: half of the stages at most,
    // so that the products have the others.
    let (mut oldest, mut pending, most_pending) = (state, 0, stage_shape.count(shared) / 2);
    let mut packed_are_there = false;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let work_tile = params.work_tile::<T>(k_range);
        let problem = params.problem.of_expert::<F>(work_tile.expert);
        let mut pack = params.packed_of::<T>(&work_tile);
        let first_row = work_tile.row_tile * T::M + T::first_row();
        let mut first_byte = k_range.start * ROW_BYTES;
        let mut scales = ScaleLoader::new::<F, T>(&problem, work_tile.row_tile, &k_range, thread);
        let mut left = k_range.end - k_range.start;
        while left > 0 {
            state.producer_acquire();
            let stage = state.stage_address();
            // SAFETY: the products that read the stage have completed.
            unsafe { scales.copy::<F>(stage + stage_shape.scales_offset()) };
            shared::commit_copies();
            if thread == 0 {
                let barrier = state.full_barrier();
                let codes = const { T::STAGE.codes_bytes() };
                // SAFETY: this thread has acquired the stage, whose codes start on 1024 bytes, and
                // its barrier expects the box. By the kernel's contract the map, a parameter, has
                // the codes of all experts, which nothing writes. So they need no wait.
                unsafe {
                    mbarrier::arrive_expecting(barrier, codes + const { token_bytes::<F, T>() });
                    let place = [first_byte, first_row, work_tile.expert];
                    mbarrier::copy_box(stage, params.weights_map, place, barrier);
                }
                if !packed_are_there {
                    ptx::wait_for_previous_kernel();
                    packed_are_there = true;
                }
                // SAFETY: this thread has acquired the stage. The pack is in the packed
                // activations, which are there now; its bytes are a multiple of 16.
                unsafe { copy_tokens::<F, T>(pack, &state) };
            }
            first_byte += ROW_BYTES;
            pack = pack.wrapping_add(const { T::CONFIG.pack_bytes() as usize });
            pending += 1;
            if pending > most_pending {
                match most_pending {
                    1 => shared::wait_for_copies::<1>(),
                    2 => shared::wait_for_copies::<2>(),
                    3 => shared::wait_for_copies::<3>(),
                    _ => shared::wait_for_copies::<4>(),
                }
                shared::fence_writes();
                // SAFETY: the copies to this stage have completed.
                unsafe { mbarrier::arrive(oldest.full_barrier()) };
                oldest.advance();
                pending -= 1;
            }
            state.advance();
            left -= 1;
        }
        scheduler.advance(&k_range);
    }
    shared::wait_for_copies::<0>();
    shared::fence_writes();
    while pending > 0 {
        // SAFETY: the copies to this stage have completed.
        unsafe { mbarrier::arrive(oldest.full_barrier()) };
        oldest.advance();
        pending -= 1;
    }
    // Memory is idle from now on.
    ptx::start_next_kernel();
    // Commits may arrive in any order. The thread block ends after the last one.
    for _ in 0..stage_shape.count(shared) {
        state.producer_acquire();
        state.advance();
    }
}

/// Bytes of activations that arrive at a stage.
const fn token_bytes<F: BlockScaled, T: Tile>() -> u32 {
    <T as TensorMemory>::TOKEN_CODES + T::N * F::WORDS * 4
}

/// Copies the pack at `pack` to a stage: codes, then scales. In a pair, each thread block copies
/// its half of the codes, and half of the scales to both.
///
/// # Safety
/// One thread per thread block calls it, which has acquired the stage of `state` and arrived on its
/// barrier for [`token_bytes`]. The pack is in the packed activations, on 16 bytes.
#[inline(always)]
unsafe fn copy_tokens<F: BlockScaled, T: Tile>(pack: *const u8, state: &PipelineState) {
    let codes = const { <T as TensorMemory>::TOKEN_CODES };
    let scales = const { token_bytes::<F, T>() } - codes;
    let to = state.stage_address() + const { T::STAGE.codes_bytes() };
    let barrier = state.full_barrier();
    // SAFETY: the caller promises the stage and the pack. A pair's stages are acquired by the
    // products of both thread blocks, so the other one's stage is free, too.
    unsafe {
        if T::SHARES_ROWS {
            const BOTH: u16 = 0b11;
            let (rank, half) = (cluster::rank(), scales / 2);
            mbarrier::copy(to, pack.wrapping_add((rank * codes) as usize), codes, barrier);
            let from = pack.wrapping_add((T::N * ROW_BYTES + rank * half) as usize);
            mbarrier::copy_multicast(to + codes + rank * half, from, half, barrier, BOTH);
        } else {
            mbarrier::copy(to, pack, codes + scales, barrier);
        }
    }
}

/// Copies one thread's scales of weights to a stage's atoms: the same word of several rows.
struct ScaleLoader {
    /// The word of the next K-iteration in the row tile's first row, in global memory.
    first: *const u8,
    /// Blocks per row.
    blocks: u32,
    /// The last row of the work tile that exists.
    last_row: u32,
    /// The thread block's first row in the work tile.
    first_row: u32,
    /// The thread's row and word in its first step.
    row: u32,
    word: u32,
    /// Scales of a row from the word to the end; not positive past the end.
    left: i32,
}

impl ScaleLoader {
    /// The loader of a work tile's K-iterations, for a producer thread.
    #[inline(always)]
    fn new<F: BlockScaled, T: Tile>(problem: &Problem, row_tile: u32, k_range: &KRange, thread: u32) -> Self {
        let blocks = problem.shape.blocks as u32;
        let of_tile = problem.weights.row::<F>(u64::from(row_tile) * u64::from(T::M), u64::from(blocks));
        let (row, word) = (thread / F::WORDS, thread % F::WORDS);
        let scale = k_range.start * const { scales_per_k_iteration::<F, T>() } + word * 4;
        Self {
            first: of_tile.scales.wrapping_add(scale as usize),
            blocks,
            last_row: last_row::<T>(problem, row_tile),
            first_row: T::first_row(),
            row,
            word,
            left: blocks as i32 - scale as i32,
        }
    }

    /// Starts to copy the next K-iteration to the atoms at `atoms`. Scales past the end of a row
    /// become zeros.
    ///
    /// # Safety
    /// The kernel's contract. There is a next K-iteration, and no thread reads or writes the atoms.
    #[inline(always)]
    unsafe fn copy<F: BlockScaled>(&mut self, atoms: u32) {
        // NVFP4's rows of scales are whole words.
        let words = const { <F as ProductFormat>::BLOCKS == 2 }
            || (self.first.addr() as u32 | self.blocks).is_multiple_of(4);
        let left = self.left.clamp(0, 4) as u32;
        for i in 0..const { tcgen05::ROWS * F::WORDS / PRODUCERS } {
            let row = i * const { PRODUCERS / F::WORDS } + self.row;
            let from = ptx::offset_by(self.first, (self.first_row + row).min(self.last_row), self.blocks);
            let in_atom = row % ATOM_ROWS * 16 + row / ATOM_ROWS * 4;
            let to = atoms + self.word * ATOM_BYTES + in_atom;
            // SAFETY: the row exists, and `left` of its scales do. No other thread has this word.
            unsafe {
                if words {
                    shared::copy_4(to, from, left);
                } else {
                    let mut word = 0;
                    for byte in 0..4 {
                        if byte < left {
                            word |= ptx::load_u8_here(from.wrapping_add(byte as usize)) << (8 * byte);
                        }
                    }
                    shared::store(to, word);
                }
            }
        }
        self.first = self.first.wrapping_add(const { 4 * F::WORDS as usize });
        self.left -= const { 4 * F::WORDS as i32 };
    }
}

/// Issues the products of all work tiles. `memory` is the address of tensor memory. The second
/// thread block of a pair arrives on the first one's barriers instead, once per full stage.
///
/// # Safety
/// The kernel's contract. All lanes of the issuing warp call it.
#[inline(always)]
unsafe fn issue<F: BlockScaled, T: Tile>(params: &Params<'_>, front: u32, memory: u32) {
    let stage_shape = stage_for::<F, T>(params.problem);
    let mut state = PipelineState::new(&stage_shape, params.launch.gemm.shared, front);
    let mut accumulator = Accumulator::first(front);
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    let multiplies = !T::SHARES_ROWS || cluster::rank() == 0;
    while let Some(k_range) = scheduler.next() {
        if multiplies {
            // The accumulator's first turn waits for nothing.
            mbarrier::wait(accumulator.empty_barrier::<T>(), accumulator.phase::<T>() ^ 1);
            tcgen05::fence_after_wait();
        }
        let sums = memory + accumulator.column::<T>();
        let k_iterations = k_range.end - k_range.start;
        let mut left = k_iterations;
        while left > 0 {
            let stage = state.consumer_wait();
            if warp::elect() {
                let scales = memory
                    + const { <T as TensorMemory>::ACCUMULATORS * T::N }
                    + state.number() * const { <T as TensorMemory>::SCALES };
                // SAFETY: the stage is full, in both thread blocks of a pair. The products of its
                // previous turn have completed, and they were the last that read these scales. The
                // accumulator is empty. The first thread block's barrier expects the second one.
                unsafe {
                    if multiplies {
                        multiply::<F, T>(stage, sums, scales, left < k_iterations);
                        tcgen05::commit::<T>(state.empty_barrier());
                    } else {
                        mbarrier::arrive_in_cluster(cluster::address_of(state.full_barrier(), 0));
                    }
                }
            }
            warp::sync();
            state.advance();
            left -= 1;
        }
        if multiplies && warp::elect() {
            // SAFETY: the barrier expects one arrival.
            unsafe { tcgen05::commit::<T>(accumulator.full_barrier::<T>()) };
        }
        warp::sync();
        accumulator.number += 1;
        scheduler.advance(&k_range);
    }
}

/// Issues the products of a K-iteration, and the copies of its scales to tensor memory. The sums of
/// the first one are stored unless `add`.
///
/// # Safety
/// The stage at `stage` is full. Nothing else uses the columns of the sums and of the scales.
#[inline(always)]
unsafe fn multiply<F: BlockScaled, T: Tile>(stage: u32, sums: u32, scales: u32, add: bool) {
    let tokens = stage + const { T::STAGE.codes_bytes() };
    let token_atoms = tokens + const { <T as TensorMemory>::TOKEN_CODES };
    let row_atoms = stage + const { T::STAGE.scales_offset() };
    let token_scales = scales + const { <T as TensorMemory>::ROW_SCALES };
    let token_words = const { T::N / ATOM_ROWS };
    // SAFETY: codes and atoms are in the stage, and the caller promises the columns.
    unsafe {
        for i in 0..F::WORDS {
            tcgen05::copy_scales::<T>(scales + i * ATOM_COLUMNS, row_atoms + i * ATOM_BYTES);
        }
        for i in 0..F::WORDS * token_words / ATOM_COLUMNS {
            tcgen05::copy_scales::<T>(token_scales + i * ATOM_COLUMNS, token_atoms + i * ATOM_BYTES);
        }
        let [rows, tokens] = [stage, tokens].map(tcgen05::swizzled_rows);
        for step in 0..STEPS {
            let bytes = step * const { STEP as u32 / 2 };
            let [rows, tokens] = [rows, tokens].map(|rows| tcgen05::columns_of(rows, bytes));
            let word = step / F::STEPS_IN_WORD;
            let scales = ScalesOf {
                rows: scales + word * ATOM_COLUMNS,
                tokens: token_scales + word * token_words,
                byte: step % F::STEPS_IN_WORD * 2,
            };
            match T::N {
                64 => F::multiply::<T, 64>(sums, rows, tokens, scales, add || step > 0),
                128 => F::multiply::<T, 128>(sums, rows, tokens, scales, add || step > 0),
                _ => F::multiply::<T, 256>(sums, rows, tokens, scales, add || step > 0),
            }
        }
    }
}

/// Loads the sums of all work tiles and finishes them. `memory` is the address of tensor memory.
///
/// # Safety
/// The kernel's contract. Exactly the consumer warps call it, with all lanes.
#[inline(always)]
unsafe fn finish<F: BlockScaled, D: Activations, T: Tile>(params: &Params<'_>, front: u32, memory: u32) {
    // The packing kernel writes the factors of the sums.
    ptx::wait_for_previous_kernel();
    let first_tile = warp::number() * TILES;
    let mut accumulator = Accumulator::first(front);
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let work_tile = params.work_tile::<T>(k_range);
        mbarrier::wait(accumulator.full_barrier::<T>(), accumulator.phase::<T>());
        // Lanes may have seen the barrier one after the other.
        warp::sync();
        tcgen05::fence_after_wait();
        let mut tile = first_tile;
        // One tile at a time: both would take more registers than there are.
        while tile < first_tile + ptx::opaque(TILES) {
            let address = memory + accumulator.column::<T>() + (tile * TILE_ROWS << 16);
            let mut sums = T::Accumulators::ZEROS;
            for i in 0..const { T::N / tcgen05::LOADED } {
                // SAFETY: the tile is one of the two halves of the warp's lanes. Its products have
                // completed.
                let loaded = unsafe { tcgen05::load(address + i * tcgen05::LOADED) };
                for j in 0..loaded.len() {
                    *sums.get_mut(i as usize * loaded.len() + j) = loaded[j];
                }
            }
            if tile > first_tile {
                tcgen05::fence_before_arrival();
                // The other lanes' loads come before the first lane's arrival.
                warp::sync();
                if warp::lane() == 0 {
                    let barrier = accumulator.empty_barrier::<T>();
                    // SAFETY: the barrier expects an arrival of each consumer warp, in a pair of
                    // both thread blocks.
                    unsafe {
                        if T::SHARES_ROWS {
                            mbarrier::arrive_in_cluster(cluster::address_of(barrier, 0));
                        } else {
                            mbarrier::arrive(barrier);
                        }
                    }
                }
            }
            // SAFETY: all lanes are here, and no other warp has this tile.
            unsafe {
                let tile = T::first_row() / TILE_ROWS + tile;
                params.finish::<F, D, T, T::Accumulators, 1>(&work_tile, tile, TokenSlice::ALL, [sums], true);
            }
            tile += 1;
        }
        accumulator.number += 1;
        scheduler.advance(&k_range);
    }
}
