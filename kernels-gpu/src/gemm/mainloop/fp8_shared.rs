//! The mainloop for FP8 activations and many tokens on compute capability 9.0. It works as
//! [`super::fp8`], but decoder warps decode weights to shared memory. Two consumer warp groups
//! multiply all rows, each by half of the tokens.
//!
//! Weights of a stage are decoded while earlier stages are multiplied. They are followed by the
//! factors of rows. A negative factor says that some weights are left out.

use core::hint::cold_path;

use microscale_kernels_abi::gemm::{PACK_COLUMNS, QUAD, TILE_ROWS};

use super::warp_specialized::{Consumer, consume, run};
use crate::gemm::fp8_weights::{Fp8Weights, LeftOut, Scales, promote, scale_tokens};
use crate::gemm::params::Params;
use crate::gemm::pipeline::{PipelineState, swizzled_front};
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::hardware::warp::pin_in_register;
use crate::hardware::warp_group::{MultiplyPack, WARPS, core_matrices, swizzled};
use crate::hardware::{shared, warp};
use crate::product::tensor_cores::Activations;

/// Tiles of a warp.
const TILES: u32 = 2;
/// Rows of a core matrix, and of a lane in its warp's tiles.
const EIGHT: u32 = TILE_ROWS / 2;
const ROWS: usize = (TILES * TILE_ROWS / EIGHT) as usize;
/// Bytes of a core matrix: eight rows of 16 bytes.
const CORE_MATRIX: u32 = EIGHT * 16;
/// Bytes of eight rows of decoded weights.
const EIGHT_BYTES: u32 = EIGHT * PACK_COLUMNS;
/// Bytes of the decoded weights of a multiplication.
const OPERAND_BYTES: u32 = WARPS * TILE_ROWS * PACK_COLUMNS;

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: Fp8Weights, D: Activations, T: Tile>(params: &Params<'_>)
where
    T::Half: MultiplyPack,
{
    const {
        assert!(T::PACKS == 1);
        assert!(
            T::CONFIG.consumer_warps() == 2 * WARPS && T::CONFIG.mainloop.traits().decoder_warps == WARPS
        );
    };
    let base = swizzled_front();
    let tile = warp::number() % WARPS * TILES;
    // SAFETY: the same contract. Consumer warps are whole warp groups, and the barriers and the
    // plan are initialized for them.
    unsafe {
        let consumer = #[inline(always)]
        || {
            consume::<F, T>(
                params,
                base,
                tile,
                #[inline(always)]
                |consumer, packs, tile| multiply::<F, D, T>(params, consumer, packs, tile),
            );
        };
        let decoder = #[inline(always)]
        || {
            consume::<F, T>(
                params,
                base,
                tile,
                #[inline(always)]
                |consumer, packs, _| decode::<F, T>(consumer, packs),
            );
        };
        run::<F, D, T>(params, base, 0, consumer, decoder);
    }
}

/// Decodes the warp's tiles of a work tile's stages.
///
/// A multiplication has the even or the odd tiles of the thread block's rows, so that a consumer
/// warp's two tiles are neighbours.
///
/// # Safety
/// The kernel's contract. The decoder warps call it.
#[inline(always)]
unsafe fn decode<F: Fp8Weights, T: Tile>(Consumer { fragments, state, .. }: &mut Consumer<F, T>, packs: u32) {
    let (warp, lane) = (warp::number() % WARPS, warp::lane());
    let words = const { T::STAGE.decoded_offset() } + warp * (2 * EIGHT_BYTES) + lane * 4;
    let words = pin_in_register(words);
    let row = warp * (TILES * TILE_ROWS) + lane % QUAD * EIGHT + lane / QUAD;
    let own_factor = pin_in_register(const { T::STAGE.factors_offset() } + row * 4);
    let mut left = packs;
    while left > 0 {
        let stage = state.consumer_wait();
        // SAFETY: the stage is full, and no warp reads its decoded weights and factors yet. The
        // places are the warp's own.
        unsafe {
            let mut codes = fragments.load_codes(stage, 0, 0);
            let mut scales = [0; ROWS];
            for row in 0..ROWS {
                scales[row] = fragments.load_scales(stage, 0, row as u32, 0);
            }
            let scales = Scales::<ROWS>::new::<F>(scales, fragments.exists(), false);
            for row in 0..ROWS {
                let (tile, eight) = (row as u32 / 2, row as u32 % 2);
                // The next row's codes are loaded while these are decoded.
                let next =
                    if row + 1 < ROWS { fragments.load_codes(stage, 0, row as u32 + 1) } else { codes };
                let to = stage + words + tile * OPERAND_BYTES + eight * EIGHT_BYTES;
                for word in 0..4 {
                    let [even, odd] = scales.decode(row, word, codes[word]);
                    let to = to + word as u32 * (2 * CORE_MATRIX);
                    shared::store(to, even);
                    shared::store(to + CORE_MATRIX, odd);
                }
                codes = next;
            }
            // A lane stores the factor of one of the four rows that its quad has.
            let [a, b, c, d] = scales.factors;
            let [a, b] = if lane & 1 == 0 { [a, c] } else { [b, d] };
            let factor = if lane & 2 == 0 { a } else { b };
            shared::store(stage + own_factor, factor.to_bits() | u32::from(scales.left_out) << 31);
            fragments.advance(0);
            state.preparer_commit();
        }
        state.advance();
        left -= 1;
    }
}

/// Multiplies and finishes the work tile that the consumer reads, of `packs` packs. The warp has
/// tile `tile` of it and the next one.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn multiply<F: Fp8Weights, D: Activations, T: Tile>(
    params: &Params<'_>,
    consumer: &mut Consumer<F, T>,
    packs: u32,
    tile: u32,
) where
    T::Half: MultiplyPack,
{
    let mut sums = [T::Half::ZEROS; TILES as usize];
    let pack_scales = params.launch.gemm.pack_scales != 0;
    // The shuffle tells the assembler that the value is uniform.
    let group = warp::shuffle(warp::number() / WARPS, 0);
    // SAFETY: the whole warp group is here.
    unsafe {
        let left_out = mainloop::<F, T, T::Half>(&mut sums, &mut consumer.state, packs, pack_scales, group);
        if !F::ALWAYS_IN_RANGE && warp::ballot(left_out) != 0 {
            cold_path();
            let work_tile = consumer.work_tile();
            let first_eight = group * const { T::N / 2 / EIGHT };
            let left_out = LeftOut { params, work_tile: &work_tile, tile, packs, first_eight, bases: None };
            left_out.add::<F, T, _>(&mut sums[0]);
            LeftOut { tile: tile + 1, ..left_out }.add::<F, T, _>(&mut sums[1]);
        }
        // Read again, so that it does not take registers before.
        let work_tile = consumer.work_tile();
        let slice = TokenSlice::of_warp_group(group);
        params.finish::<F, D, T, T::Half, { TILES as usize }>(&work_tile, tile, slice, sums, true);
    }
}

/// Adds all products of a work tile's K-iterations to the sums, except of weights that are left
/// out. Returns whether there are any in the lane's rows.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it; `group` is the number of the own one.
#[inline(always)]
unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array>(
    sums: &mut [A; TILES as usize],
    state: &mut PipelineState,
    packs: u32,
    pack_scales: bool,
    group: u32,
) -> bool
where
    A: MultiplyPack,
{
    let mut products = A::ZEROS;
    let mut signs = 0;
    let mut left = packs;
    let row = warp::number() % WARPS * (TILES * TILE_ROWS) + warp::lane() / QUAD;
    let factors = pin_in_register(const { T::STAGE.factors_offset() } + row * 4);
    loop {
        let stage = state.wait_until_prepared();
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0);
        let tokens = at + const { T::STAGE.codes_bytes() };
        let scales = tokens + const { T::N * PACK_COLUMNS } + group * const { T::N / 2 * 4 };
        let tokens = swizzled(tokens + group * const { T::N / 2 * PACK_COLUMNS });
        let weights = core_matrices(at + const { T::STAGE.decoded_offset() });
        for tile in 0..TILES {
            // SAFETY: the stage is decoded and not yet released. The whole warp group is here.
            unsafe {
                products.multiply_shared(weights + tile * (OPERAND_BYTES / 16), tokens);
                let of_tile = stage + factors + tile * (TILE_ROWS * 4);
                let of_rows = [0, EIGHT].map(|row| shared::load(of_tile + row * 4));
                signs |= of_rows[0] | of_rows[1];
                products.wait();
                let of_rows = of_rows.map(|factor| f32::from_bits(factor & 0x7FFF_FFFF));
                promote(&mut sums[tile as usize], &products, of_rows, scales, pack_scales);
            }
        }
        left -= 1;
        if left == 0 && !pack_scales {
            // SAFETY: the stage of the last pack is not yet released.
            unsafe {
                scale_tokens(&mut sums[0], scales);
                scale_tokens(&mut sums[1], scales);
            }
        }
        state.advance();
        // SAFETY: the whole warp group is here, and all products of the stage have been waited for.
        unsafe { state.consumer_release_previous::<T>(true) };
        if left == 0 {
            return signs >> 31 == 1;
        }
    }
}
