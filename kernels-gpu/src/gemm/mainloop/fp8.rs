//! The mainloop for FP8 activations on compute capability 9.0. Weights are decoded to E4M3 with
//! their block scales, and multiplied by all tokens of the work tile. The sums of each pack are
//! added in f32 (promoted), because the tensor cores keep 13 fraction bits of them.
//!
//! [`microscale_formats::fp8_dot`] defines the results, to the bit.

use core::hint::cold_path;

use microscale_formats::E2m1;
use microscale_formats::fp8_dot::{NVFP4_FACTOR, PACK_EXPONENT, WIDEST};
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::gemm::{PACK_COLUMNS, QUAD, TILE_ROWS};

use super::warp_specialized::{Consumer, consume, start};
use crate::gemm::fragment::{Fragment, FragmentLoader};
use crate::gemm::params::Params;
use crate::gemm::pipeline::PipelineState;
use crate::gemm::reduce::TokenSlice;
use crate::gemm::tile::{Array, Tile};
use crate::gemm::tile_scheduler::WorkTile;
use crate::gemm::weight_loader::last_row;
use crate::hardware::warp_group::{MultiplyPack, core_matrices};
use crate::hardware::{ptx, shared, warp};
use crate::product::operand::{CHUNK_BYTES, CodeChunk};
use crate::product::product_format::{Mxfp4, Nvfp4};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Chunks of a pack.
const CHUNKS: u32 = PACK_COLUMNS / 32;
/// Codes of a chunk.
const CHUNK: u32 = 2 * CHUNK_BYTES;

/// The E4M3 codes of the magnitudes of E2M1 under a scale, in the order of their codes.
type Magnitudes = [u32; 2];

/// A format of weights that is decoded to E4M3.
pub(in crate::gemm) trait Fp8Weights: WeightFormat {
    /// The exponent that the scales of a row's chunks in a pack are relative to. All lanes of the
    /// warp call it, with a chunk each; the scale of a chunk past the end of a row is 0.
    fn base(scales: u32) -> u32;

    /// The factor of sums of products of decoded weights.
    fn factor(base: u32) -> f32;

    /// How far a chunk's scale is below the base. Beyond [`WIDEST`], the chunk is left out of the
    /// tensor cores' sums.
    fn below(scales: u32, base: u32) -> u32;

    /// The magnitudes of both halves of a chunk.
    fn magnitudes(scales: u32, below: u32) -> [Magnitudes; 2];
}

impl Fp8Weights for Mxfp4 {
    #[inline(always)]
    fn base(scale: u32) -> u32 {
        let largest = scale.max(warp::shuffle_xor(scale, 1));
        largest.max(warp::shuffle_xor(largest, 2))
    }

    #[inline(always)]
    fn factor(base: u32) -> f32 {
        // Shifted, the exponent of 2^-127 is 0, and NaN is infinity.
        let scale = f32::from_bits((base << 23).max(1 << 22));
        // scale · 2^-6; NaN for infinity.
        ptx::fma_f32(scale, const { power_of_two(-PACK_EXPONENT) - 1.0 }, scale)
    }

    #[inline(always)]
    fn below(scale: u32, base: u32) -> u32 {
        base.wrapping_sub(scale)
    }

    /// Magnitudes are normal numbers of E4M3, so their exponents are added to.
    #[inline(always)]
    fn magnitudes(_: u32, below: u32) -> [Magnitudes; 2] {
        const ONES: Magnitudes = [0x3C38_3000, 0x4C48_4440];
        // 1 in the exponent of each, except of 0.
        const EXPONENTS: Magnitudes = [0x0808_0800, 0x0808_0808];
        let exponent = (PACK_EXPONENT as u32).wrapping_sub(below);
        let magnitudes = [0, 1].map(|i| {
            let word = ONES[i].wrapping_add(EXPONENTS[i].wrapping_mul(exponent));
            if below <= WIDEST { word } else { 0 }
        });
        [magnitudes; 2]
    }
}

impl Fp8Weights for Nvfp4 {
    #[inline(always)]
    fn base(_: u32) -> u32 {
        0
    }

    #[inline(always)]
    fn factor(_: u32) -> f32 {
        NVFP4_FACTOR
    }

    #[inline(always)]
    fn below(_: u32, _: u32) -> u32 {
        0
    }

    /// The products of the scale and the magnitudes, divided by the factor and rounded to E4M3.
    #[inline(always)]
    fn magnitudes(scales: u32, _: u32) -> [Magnitudes; 2] {
        // Pairs of magnitudes in f16, divided by the factor.
        const PAIRS: [u32; 4] = [0x2C00_0000, 0x3200_3000, 0x3600_3400, 0x3A00_3800];
        let pair = ptx::e4m3x2_to_f16x2(scales);
        [0x1010, 0x3232].map(|half| {
            let scale = ptx::permute(pair, 0, half);
            let [a, b, c, d] = PAIRS.map(|two| ptx::f16x2_to_e4m3x2(ptx::multiply_f16x2(two, scale)));
            [ptx::permute(a, b, 0x5410), ptx::permute(c, d, 0x5410)]
        })
    }
}

/// A lane's chunks of two rows in a pack, ready to be decoded.
struct Chunks {
    rows: [[u32; 4]; 2],
    magnitudes: [[Magnitudes; 2]; 2],
    factors: [f32; 2],
    /// How far a chunk's scale is below its base, at most.
    below: u32,
}

impl Chunks {
    #[inline(always)]
    fn new<F: Fp8Weights>(fragment: &Fragment) -> Self {
        let Fragment { rows, scales, exists } = *fragment;
        let bases = scales.map(F::base);
        let below = [0, 1].map(|i| F::below(scales[i], bases[i]));
        Self {
            rows,
            magnitudes: [0, 1].map(|i| F::magnitudes(scales[i], below[i])),
            factors: bases.map(F::factor),
            below: if exists { below[0].max(below[1]) } else { 0 },
        }
    }

    /// Decodes word `word` of both rows: the first operand of a multiplication.
    #[inline(always)]
    fn decode(&self, word: usize) -> [u32; 4] {
        let weights = |row: usize| {
            const SIGNS: u32 = 0x8080_8080;
            let codes = self.rows[row][word];
            let [low, high] = self.magnitudes[row][word / 2];
            let selectors = codes & 0x7777_7777;
            let [first, second] = [selectors, selectors >> 16].map(|four| ptx::permute(low, high, four));
            let even = ptx::permute(first, second, 0x6420) | codes << 4 & SIGNS;
            let odd = ptx::permute(first, second, 0x7531) | codes & SIGNS;
            [even, odd]
        };
        let ([a, b], [c, d]) = (weights(0), weights(1));
        [a, c, b, d]
    }

    /// Decodes all words.
    #[inline(always)]
    fn decode_all(&self) -> [[u32; 4]; 4] {
        [0, 1, 2, 3].map(|word| self.decode(word))
    }
}

/// Multiplies weights by packed activations.
///
/// # Safety
/// The contract of the entry points of this mainloop.
#[inline(always)]
pub(in crate::gemm) unsafe fn gemm<F: Fp8Weights, D: Activations, T: Tile>(params: &Params<'_>)
where
    T::Accumulators: MultiplyPack,
{
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    // SAFETY: the same contract. Consumer warps are whole warp groups, and the barriers and the
    // plan are initialized for them.
    unsafe {
        if start::<F, T>(params, base, 0) {
            consume::<F, T>(
                params,
                base,
                warp::number(),
                #[inline(always)]
                |consumer, packs, tile| {
                    multiply::<F, D, T>(params, consumer, packs, tile);
                },
            );
        }
    }
}

/// Multiplies and finishes the work tile that the consumer reads, of `packs` packs. The warp has
/// tile `tile` of it.
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
    T::Accumulators: MultiplyPack,
{
    let mut sums = T::Accumulators::ZEROS;
    let pack_scales = params.launch.gemm.pack_scales != 0;
    let Consumer { fragments, state, .. } = consumer;
    // SAFETY: the whole warp group is here.
    unsafe {
        let left_out = mainloop::<F, T, T::Accumulators>(&mut sums, fragments, state, packs, pack_scales);
        let work_tile = consumer.work_tile();
        if !F::ALWAYS_IN_RANGE && warp::ballot(left_out) != 0 {
            cold_path();
            add_left_out::<F, T, T::Accumulators, 0>(params, &work_tile, tile, packs, &mut sums);
            add_left_out::<F, T, T::Accumulators, 1>(params, &work_tile, tile, packs, &mut sums);
        }
        params.finish::<F, D, T, T::Accumulators, 1>(&work_tile, tile, TokenSlice::ALL, [sums], true);
    }
}

/// Adds all products of a work tile's K-iterations to the sums, except of weights that are left
/// out. Returns whether there may be any.
///
/// # Safety
/// The kernel's contract. Whole warp groups call it.
#[inline(always)]
unsafe fn mainloop<F: Fp8Weights, T: Tile, A: Array>(
    sums: &mut A,
    fragments: &mut FragmentLoader<F, T>,
    state: &mut PipelineState,
    packs: u32,
    pack_scales: bool,
) -> bool
where
    A: MultiplyPack,
{
    let mut products = A::ZEROS;
    let mut left = packs;
    let mut stage = state.consumer_wait();
    // SAFETY: the stage is full.
    let [fragment] = unsafe { fragments.load::<1>(stage, 0, 0) };
    let mut now = Chunks::new::<F>(&fragment);
    let mut below = now.below;
    let mut weights = now.decode_all();
    loop {
        // The shuffle tells the assembler that the value is uniform, so descriptors take uniform
        // registers.
        let at = warp::shuffle(stage, 0) + const { T::STAGE.codes_bytes() };
        let mut tokens = core_matrices(at);
        let mut scales = stage + const { T::STAGE.codes_bytes() + T::N * PACK_COLUMNS };
        for pack in 0..T::PACKS {
            // SAFETY: the stage is full and not yet released; the whole warp group is here.
            unsafe {
                products.multiply_pack(weights, tokens);
                // The next pack's weights are loaded and decoded while these are multiplied. After
                // the last pack, its own stage is loaded again.
                let [fragment] = if pack + 1 < T::PACKS {
                    fragments.load::<1>(stage, pack + 1, 0)
                } else {
                    stage = state.next_if(left > 1).consumer_wait();
                    fragments.load::<1>(stage, 0, 0)
                };
                let next = Chunks::new::<F>(&fragment);
                let decoded = next.decode_all();
                products.wait();
                promote(sums, &products, now.factors, scales, pack_scales);
                (now, weights) = (next, decoded);
            }
            left -= 1;
            if left == 0 {
                break;
            }
            below = below.max(now.below);
            tokens += const { T::N * T::CONFIG.mainloop.traits().token_bytes / 16 };
            scales += const { T::N * T::CONFIG.mainloop.traits().token_bytes };
        }
        if left == 0 && !pack_scales {
            // SAFETY: the stage of the last pack is not yet released.
            unsafe { scale_tokens(sums, scales) };
        }
        state.advance();
        // SAFETY: the whole warp group is here, and all products of the stage have been waited for.
        unsafe { state.consumer_release_previous::<T>(true) };
        if left == 0 {
            return below > WIDEST;
        }
    }
}

/// Adds the sums of a pack times the factors of both rows, and with `pack_scales` times the scales
/// of the tokens at `scales`.
///
/// # Safety
/// The scales of the work tile's tokens are at `scales` in shared memory.
#[inline(always)]
unsafe fn promote<A: Array>(sums: &mut A, products: &A, factors: [f32; 2], scales: u32, pack_scales: bool) {
    if pack_scales {
        for four in 0..A::LEN / 4 {
            // SAFETY: the caller promises the scales.
            let scales = unsafe { token_scales(scales, four) };
            for i in 0..4 {
                let sum = sums.get_mut(4 * four + i);
                *sum = ptx::fma_f32(products.get(4 * four + i), factors[i / 2] * scales[i % 2], *sum);
            }
        }
        return;
    }
    for i in 0..A::LEN {
        let sum = sums.get_mut(i);
        *sum = ptx::fma_f32(products.get(i), factors[i / 2 % 2], *sum);
    }
}

/// Multiplies the sums by the scales of the tokens.
///
/// # Safety
/// As for [`promote`].
#[inline(always)]
unsafe fn scale_tokens<A: Array>(sums: &mut A, scales: u32) {
    for four in 0..A::LEN / 4 {
        // SAFETY: the caller promises the scales.
        let scales = unsafe { token_scales(scales, four) };
        for i in 0..4 {
            *sums.get_mut(4 * four + i) *= scales[i % 2];
        }
    }
}

/// The scales of the lane's two tokens of an eight.
///
/// # Safety
/// As for [`promote`].
#[inline(always)]
unsafe fn token_scales(scales: u32, eight: usize) -> [f32; 2] {
    let address = scales + (eight as u32 * 8 + warp::lane() % QUAD * 2) * 4;
    // SAFETY: the caller promises the scales, which are on 8 bytes.
    unsafe { shared::load_8(address) }.map(f32::from_bits)
}

/// Adds the products of the weights that are left out of the tensor cores' sums, in the order of K:
/// of chunks whose scale is too small for their pack. `HALF` selects the lane's rows.
///
/// # Safety
/// The kernel's contract. All lanes call it. The sums are the warp's tile's.
#[inline(always)]
unsafe fn add_left_out<F: Fp8Weights, T: Tile, A: Array, const HALF: u32>(
    params: &Params<'_>,
    work_tile: &WorkTile,
    tile: u32,
    packs: u32,
    sums: &mut A,
) {
    let problem = params.problem.of_expert::<F>(work_tile.expert);
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let blocks = problem.shape.blocks;
    let end = (blocks * F::BLOCK_BYTES / u64::from(CHUNK_BYTES)) as u32;
    let in_tile = (tile * TILE_ROWS + HALF * (TILE_ROWS / 2) + of_eight)
        .min(last_row::<T>(&problem, work_tile.row_tile));
    let row = problem.weights.row::<F>(u64::from(work_tile.row_tile * T::M + in_tile), blocks);
    let mut of_pack = params.packed_of::<T>(work_tile);
    let mut chunk = work_tile.k_range.start * T::CHUNKS + quarter;
    let mut left = packs;
    while left > 0 {
        // SAFETY: where it is before the end, the chunk is in the row.
        let loaded = if chunk < end { unsafe { row.load_once::<F>(chunk) } } else { CodeChunk::NONE };
        let CodeChunk { codes: [a, b, c, d], scales } = loaded;
        let zeros = (a | b | c | d) & 0x7777_7777 == 0;
        let left_out = warp::ballot(F::below(scales, F::base(scales)) > WIDEST && !zeros);
        // Opaque bounds keep LLVM from unrolling the loops.
        let mut source = 0;
        while left_out != 0 && source < ptx::opaque(CHUNKS) {
            let lane = of_eight * QUAD + source;
            let adds = left_out >> lane & 1 == 1;
            let scale = f32::from_bits((warp::shuffle(scales, lane) << 23).max(1 << 22));
            let mut i = 0;
            while i < ptx::opaque(CHUNK) {
                let [low, high] = if i < CHUNK / 2 { [a, b] } else { [c, d] };
                let word = warp::shuffle(if i / 8 % 2 == 0 { low } else { high }, lane);
                let code = E2m1::from_bits((word >> (i % 8 * 4) & 15) as u8);
                let weight = code.to_f32() * scale;
                let core_matrix = i / 8 * 2 + i % 2;
                let piece = core_matrix * (8 * 16) + source * 4 + i % 8 / 2;
                for four in 0..A::LEN / 4 {
                    for token in 0..2 {
                        let of_eight = quarter * 2 + token as u32;
                        let code = four as u32 * (PACK_COLUMNS * 8) + piece + of_eight * 16;
                        let scale = T::N * PACK_COLUMNS + (four as u32 * 8 + of_eight) * 4;
                        // SAFETY: the pack is packed, with the codes and scales of all tokens.
                        let (x, scale) = unsafe {
                            (
                                *of_pack.wrapping_add(code as usize),
                                *of_pack.wrapping_add(scale as usize).cast::<f32>(),
                            )
                        };
                        let [x, _] = Nvfp4::pair(u32::from(x));
                        let sum = sums.get_mut(4 * four + 2 * HALF as usize + token);
                        *sum = if adds { ptx::fma_f32(weight * x, scale, *sum) } else { *sum };
                    }
                }
                i += 1;
            }
            source += 1;
        }
        chunk += CHUNKS;
        of_pack = of_pack.wrapping_add(const { (T::STAGE.activation_bytes() / T::PACKS) as usize });
        left -= 1;
    }
}
