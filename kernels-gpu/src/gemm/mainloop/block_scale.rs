//! The mainloop for FP4 activations: `mma.sync` with block scales multiplies codes and scales as
//! they are stored. Each warp has two tiles of 16 rows. All warps copy the next K-iterations while
//! they multiply one.
//!
//! An accumulator's k-steps follow each other in the order of K. The sums of whole work tiles
//! therefore have the bits of [`fp4_dot`](microscale_formats::fp4_dot).

use microscale_formats::fp4_dot::STEP;
use microscale_kernels_abi::gemm::fp4::TOKEN_SCALE_BYTES;
use microscale_kernels_abi::gemm::stage::Stage;
use microscale_kernels_abi::gemm::{PACK_COLUMNS, QUAD, TILE_COLUMNS, TILE_ROWS};

use crate::gemm::copies::{Copies, Ring, THREADS};
use crate::gemm::params::{Launch, Params};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::TileScheduler;
use crate::gemm::weight_loader::{scales_per_k_iteration, stage_for, swizzled};
use crate::hardware::{ptx, shared, warp};
use crate::product::operand::CHUNK_BYTES;
use crate::product::problem::Problem;
use crate::product::product_format::{Mxfp4, Nvfp4};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Tiles of 16 rows per warp.
const TILES: usize = 2;
/// Bytes of a row's codes in a K-iteration.
const ROW_BYTES: u32 = PACK_COLUMNS / 2;
/// K-steps in a K-iteration: two.
const STEPS: usize = PACK_COLUMNS as usize / STEP;

/// A format that tensor cores multiply as it is stored.
pub(in crate::gemm) trait BlockScaled: WeightFormat {
    /// Scales of a row per k-step.
    const IN_STEP: u32;

    /// Loads the scales of a row and k-step to a word, the first in the lowest byte. Only the first
    /// `exist` of them exist; the others are zeros.
    ///
    /// # Safety
    /// `address` refers to the initialized scales of a k-step in shared memory.
    unsafe fn load_scales(address: u32, exist: u32) -> u32;

    /// Adds the product of two tiles, with the scales of both, as
    /// [`warp::multiply_nvfp4`](crate::hardware::warp::multiply_nvfp4) selects them.
    fn multiply<const A: u16, const B: u16>(
        a: [u32; 4],
        b: [u32; 2],
        sums: [f32; 4],
        scales: [u32; 2],
    ) -> [f32; 4];
}

impl BlockScaled for Nvfp4 {
    const IN_STEP: u32 = 4;

    #[inline(always)]
    unsafe fn load_scales(address: u32, exist: u32) -> u32 {
        // SAFETY: rows of scales start on 4 bytes, and have whole words of them.
        let word = unsafe { shared::load(address) };
        if exist > 0 { word } else { 0 }
    }

    #[inline(always)]
    fn multiply<const A: u16, const B: u16>(
        a: [u32; 4],
        b: [u32; 2],
        sums: [f32; 4],
        scales: [u32; 2],
    ) -> [f32; 4] {
        warp::multiply_nvfp4::<A, B>(a, b, sums, scales)
    }
}

impl BlockScaled for Mxfp4 {
    const IN_STEP: u32 = 2;

    #[inline(always)]
    unsafe fn load_scales(address: u32, exist: u32) -> u32 {
        // SAFETY: the caller promises both bytes.
        let [first, second] = unsafe { [shared::load_u8(address), shared::load_u8(address + 1)] };
        (if exist > 0 { first } else { 0 }) | (if exist > 1 { second } else { 0 }) << 8
    }

    #[inline(always)]
    fn multiply<const A: u16, const B: u16>(
        a: [u32; 4],
        b: [u32; 2],
        sums: [f32; 4],
        scales: [u32; 2],
    ) -> [f32; 4] {
        warp::multiply_mxfp4::<A, B>(a, b, sums, scales)
    }
}

/// The codes of a tile of 16 rows in a K-iteration, by k-step.
type Codes = [[u32; 4]; STEPS];

/// Reads a lane's weights and activations from stages, K-iteration by K-iteration.
struct Fragments {
    /// Offset in a stage of the row of weights whose address the lane gives.
    weights: u32,
    /// Offset in a stage of the lane's scales of weights, without `lead`.
    weight_scales: u32,
    /// Scales in a piece that precede the next K-iteration's.
    lead: u32,
    /// The mask of a piece's bytes.
    piece_mask: u32,
    /// Bytes of the scales of 16 rows in a stage.
    tile_scales: u32,
    /// Scales of a row from the lane's next k-step to the end; not positive past the end.
    scales_left: i32,
    /// Offset in a stage of the token whose address the lane gives.
    tokens: u32,
    /// Offset in a stage of the lane's scales of activations.
    token_scales: u32,
}

impl Fragments {
    /// The fragments of a warp whose first tile of 16 rows is `tile`, from K-iteration `start` on.
    #[inline(always)]
    fn new<F: BlockScaled, T: Tile>(problem: &Problem, stage: &Stage, tile: u32, start: u32) -> Self {
        let (lane, blocks) = (warp::lane(), problem.shape.blocks as u32);
        let (of_eight, quarter) = (lane / QUAD, lane % QUAD);
        // Matrices 0 to 3: rows 0 and 8 of a tile at the first chunk of a k-step, then at the
        // second.
        let row = tile * TILE_ROWS + lane % TILE_ROWS;
        let weights = row * ROW_BYTES + swizzled::<T>(row, lane / TILE_ROWS) * CHUNK_BYTES;
        // Lanes 2s and 2s + 1 of a quad have the scales of k-step s.
        let (step, row) = (quarter / 2, tile * TILE_ROWS + quarter % 2 * (TILE_ROWS / 2) + of_eight);
        let in_k_iteration = const { scales_per_k_iteration::<F, T>() };
        let first = problem.weights.scales.addr() as u32 + row * blocks + start * in_k_iteration;
        let of_step = step * F::IN_STEP;
        // Matrices 0 to 3: the chunks of eight tokens.
        let (token, chunk) = (lane % TILE_COLUMNS, lane / TILE_COLUMNS);
        let tokens = stage.codes_bytes() + token * ROW_BYTES + swizzled::<T>(token, chunk) * CHUNK_BYTES;
        // Lanes 2e + s of a quad have the scales of k-step s, of eight e of 16 tokens.
        let eight = if T::N > TILE_COLUMNS { quarter / 2 } else { 0 };
        let scale_word = (eight * TILE_COLUMNS + of_eight) * TOKEN_SCALE_BYTES + quarter % 2 * 4;
        Self {
            weights,
            weight_scales: stage.scales_offset() + row * stage.scales.all() + of_step,
            lead: first % stage.scales.bytes,
            piece_mask: stage.scales.bytes - 1,
            tile_scales: TILE_ROWS * stage.scales.all(),
            scales_left: blocks as i32 - (start * in_k_iteration + of_step) as i32,
            tokens,
            token_scales: stage.codes_bytes() + T::N * ROW_BYTES + scale_word,
        }
    }

    /// Loads the weights of the next K-iteration: codes, and the lane's word of scales, of each
    /// tile.
    ///
    /// # Safety
    /// The stage at `stage` holds the next K-iteration.
    #[inline(always)]
    unsafe fn load_weights<F: BlockScaled, T: Tile>(&mut self, stage: u32) -> ([Codes; TILES], [u32; TILES]) {
        let exist = self.scales_left.max(0) as u32;
        // The chunks of the second k-step are two places away from the first k-step's.
        let codes = [self.weights, self.weights ^ 2 * CHUNK_BYTES].map(|offset| stage + offset);
        let scales = stage + self.weight_scales + self.lead;
        let in_k_iteration = const { scales_per_k_iteration::<F, T>() };
        self.scales_left -= in_k_iteration as i32;
        self.lead = (self.lead + in_k_iteration) & self.piece_mask;
        let mut loaded = ([[[0; 4]; STEPS]; TILES], [0; TILES]);
        for tile in 0..TILES {
            let rows = codes.map(|codes| codes + tile as u32 * (TILE_ROWS * ROW_BYTES));
            // SAFETY: rows and scales are in the stage.
            unsafe {
                loaded.0[tile] = [shared::load_matrices(rows[0]), shared::load_matrices(rows[1])];
                loaded.1[tile] = F::load_scales(scales + tile as u32 * self.tile_scales, exist);
            }
        }
        loaded
    }
}

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: BlockScaled, D: Activations, T: Tile>(params: &Params<'_>) {
    const {
        assert!(T::CONFIG.threads() == THREADS && T::PACKS == 1);
        T::MATCHES_THE_LIST
    };
    let (problem, Launch { gemm, .. }) = (params.problem, params.launch);
    let stage_shape = stage_for::<F, T>(problem);
    if warp::number() == 0 {
        // SAFETY: one warp calls it, with all lanes; the barrier follows.
        unsafe { params.launch.write_plan(&problem.routed) };
    }
    // The packing kernel ends before its packs and factors are read.
    ptx::wait_for_previous_kernel();
    warp::barrier();
    let ring = Ring::new(&stage_shape, gemm.shared);
    let first_tile = warp::number() * TILES as u32;
    let mut scheduler = TileScheduler::<T>::new(params.launch);
    while let Some(k_range) = scheduler.next() {
        let work_tile = params.work_tile::<T>(k_range);
        let problem = problem.of_expert::<F>(work_tile.expert);
        let mut copies = Copies::<F, T>::new(params, &problem, &stage_shape, &work_tile, ring);
        // All warps have finished with the stages of the previous work tile.
        warp::barrier();
        let mut i = 1;
        while i < ring.stages {
            // SAFETY: after the barrier no thread uses the ring.
            unsafe { copies.next() };
            i += 1;
        }
        let mut fragments = Fragments::new::<F, T>(&problem, &stage_shape, first_tile, k_range.start);
        let mut accumulators = [T::Accumulators::ZEROS; TILES];
        let (mut left, mut stage) = (k_range.end - k_range.start, 0);
        while left > 0 {
            ring.wait_for_oldest();
            // Now all lanes' copies have arrived, and no lane reads the stage that is filled next.
            warp::barrier();
            let at = ring.stage(stage);
            // SAFETY: the stage that `next` fills held the previous K-iteration, which all lanes
            // have multiplied. The copies of this K-iteration have arrived.
            unsafe {
                copies.next();
                let (codes, scales) = fragments.load_weights::<F, T>(at);
                multiply::<F, T>(&mut accumulators, &codes, &scales, &fragments, at);
            }
            stage = ring.after(stage);
            left -= 1;
        }
        shared::wait_for_copies::<0>();
        let k_range = scheduler.recompute();
        let work_tile = params.work_tile::<T>(k_range);
        // SAFETY: all lanes of all warps are here, each warp with its own two tiles.
        unsafe {
            params.finish::<F, D, T, T::Accumulators, TILES>(
                &work_tile,
                first_tile,
                TokenSlice::ALL,
                accumulators,
                true,
            );
        }
        scheduler.advance(&k_range);
    }
    ptx::start_next_kernel();
}

/// Adds the products of a K-iteration of both tiles with all tokens.
///
/// # Safety
/// The stage at `stage` has the activations of all tokens. All lanes call it.
#[inline(always)]
unsafe fn multiply<F: BlockScaled, T: Tile>(
    accumulators: &mut [T::Accumulators; TILES],
    codes: &[Codes; TILES],
    scales: &[u32; TILES],
    fragments: &Fragments,
    stage: u32,
) {
    let (tokens, token_scales) = (stage + fragments.tokens, stage + fragments.token_scales);
    for pair in 0..(T::N / TILE_COLUMNS).div_ceil(2) {
        // SAFETY: the activations and scales of 16 tokens, or of all eight, are in the stage.
        unsafe {
            let scale = shared::load(token_scales + pair * (2 * TILE_COLUMNS * TOKEN_SCALE_BYTES));
            let first = tokens + pair * (2 * TILE_COLUMNS * ROW_BYTES);
            multiply_eight::<F, T, 0, 1>(accumulators, codes, scales, first, scale, 2 * pair);
            if T::N > TILE_COLUMNS {
                let second = first + TILE_COLUMNS * ROW_BYTES;
                multiply_eight::<F, T, 2, 3>(accumulators, codes, scales, second, scale, 2 * pair + 1);
            }
        }
    }
}

/// Adds the products of a K-iteration of both tiles with eight tokens, number `eight` of all
/// eights. Lanes `FIRST` and `SECOND` of a quad have the tokens' scales of the two k-steps.
///
/// # Safety
/// `activations` is the address of the row of activations that the lane gives. All lanes call it.
#[inline(always)]
unsafe fn multiply_eight<F: BlockScaled, T: Tile, const FIRST: u16, const SECOND: u16>(
    accumulators: &mut [T::Accumulators; TILES],
    codes: &[Codes; TILES],
    scales: &[u32; TILES],
    activations: u32,
    token_scales: u32,
    eight: u32,
) {
    // SAFETY: the caller promises the activations.
    let x = unsafe { shared::load_matrices(activations) };
    for tile in 0..TILES {
        let first = 4 * eight as usize;
        let mut four = [0, 1, 2, 3].map(|i| accumulators[tile].get(first + i));
        let scales = [scales[tile], token_scales];
        four = F::multiply::<0, FIRST>(codes[tile][0], [x[0], x[1]], four, scales);
        four = F::multiply::<1, SECOND>(codes[tile][1], [x[2], x[3]], four, scales);
        for i in 0..4 {
            *accumulators[tile].get_mut(first + i) = four[i];
        }
    }
}
