//! Weights that are decoded to E4M3, and the f32 sums of their products with FP8 activations.

use core::hint::cold_path;

use microscale_formats::E2m1;
use microscale_formats::fp8_dot::{ELEMENT_EXPONENT, LARGEST_FACTOR, NVFP4_FACTOR, PACK_EXPONENT, WIDEST};
use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::gemm::fp8::{CHUNKS, codes_offset, piece_offset, scales_offset};
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};

use super::params::Params;
use super::tile::{Array, Tile};
use super::tile_scheduler::WorkTile;
use super::weight_loader::last_row;
use crate::hardware::{ptx, shared, warp};
use crate::product::operand::{CHUNK_BYTES, CodeChunk, Codes};
use crate::product::product_format::{Mxfp4, Nvfp4};
use crate::product::tensor_cores::WeightFormat;

/// Codes of a chunk.
const CHUNK: u32 = 2 * CHUNK_BYTES;

/// The E4M3 codes of the magnitudes of E2M1 under a scale, in the order of their codes.
pub(super) type Magnitudes = [u32; 2];

/// A format of weights that is decoded to E4M3.
pub(super) trait Fp8Weights: WeightFormat {
    /// The exponent that the scales of a row's chunks in a pack are relative to. All lanes of the
    /// warp call it, with a chunk each; the scale of a chunk past the end of a row is 0.
    fn base(scales: u32) -> u32;

    /// The bases of a lane's two rows, for all of K. MXFP4 loads them from `bases`.
    ///
    /// # Safety
    /// With MXFP4, `bases` point to words in global memory.
    unsafe fn row_bases(bases: [*const u32; 2]) -> [u32; 2];

    /// The factor of sums of products of decoded weights.
    fn factor(base: u32) -> f32;

    /// How far a chunk's scale is below the base. Beyond [`WIDEST`], the chunk is left out of the
    /// tensor cores' sums.
    fn below(scales: u32, base: u32) -> u32;

    /// The magnitudes of both halves of a chunk. Beyond [`WIDEST`], only zeros are right.
    fn magnitudes(scales: u32, below: u32) -> [Magnitudes; 2];
}

impl Fp8Weights for Mxfp4 {
    #[inline(always)]
    fn base(scale: u32) -> u32 {
        let largest = scale.max(warp::shuffle_xor(scale, 1));
        largest.max(warp::shuffle_xor(largest, 2))
    }

    #[inline(always)]
    unsafe fn row_bases(bases: [*const u32; 2]) -> [u32; 2] {
        // SAFETY: the same contract.
        bases.map(|base| unsafe { *base })
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
        const UNSCALED: Magnitudes = [0x3C38_3000, 0x4C48_4440];
        // 1 in the exponent of each, except of 0.
        const EXPONENTS: Magnitudes = [0x0808_0800, 0x0808_0808];
        let magnitudes = [0, 1].map(|i| {
            let largest = UNSCALED[i].wrapping_add(EXPONENTS[i].wrapping_mul(PACK_EXPONENT as u32));
            largest.wrapping_sub(EXPONENTS[i].wrapping_mul(below))
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
    unsafe fn row_bases(_: [*const u32; 2]) -> [u32; 2] {
        [0; 2]
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
        [0x1010, 0x3232].map(|half| rounded(PAIRS, ptx::permute(pair, 0, half)))
    }
}

/// Pairs of magnitudes in f16 times a scale, which is in both halves of a word, rounded to E4M3.
/// Products are exact in f16: magnitudes have two significant bits, scales at most four.
#[inline(always)]
fn rounded(pairs: [u32; 4], scale: u32) -> Magnitudes {
    let [a, b, c, d] = pairs.map(|two| ptx::f16x2_to_e4m3x2(ptx::multiply_f16x2(two, scale)));
    [ptx::permute(a, b, 0x5410), ptx::permute(c, d, 0x5410)]
}

/// The magnitudes of MXFP4 activations, given how far their scale is below the largest one of their
/// row.
#[inline(always)]
pub(super) fn activation_magnitudes(below: u32) -> Magnitudes {
    const PAIRS: [u32; 4] = [0x3800_0000, 0x3E00_3C00, 0x4200_4000, 0x4600_4400];
    // 2^(6 - below) in f16. Where it would not be normal, all magnitudes are rounded to zeros.
    let scale = const { 15 + PACK_EXPONENT as u32 }.saturating_sub(below) << 10;
    rounded(PAIRS, scale * 0x1_0001)
}

/// The scales of a lane's chunks in a pack, one per row, ready to decode codes.
pub(super) struct Scales<const ROWS: usize> {
    magnitudes: [[Magnitudes; 2]; ROWS],
    /// The factors of the rows' sums.
    pub(super) factors: [f32; ROWS],
    /// Whether a lane of the warp has a chunk that is left out of the tensor cores' sums. Such
    /// chunks are decoded to zeros.
    pub(super) left_out: bool,
}

impl<const ROWS: usize> Scales<ROWS> {
    /// The scales of chunks, which are zeros unless they `exist`, relative to the largest of their
    /// packs. All lanes of the warp call it.
    ///
    /// `branch`, a constant, says that chunks that are left out are a branch. Otherwise the
    /// assembler predicates its instructions. Which one is faster depends on the tile: see
    /// docs/lab/2026-11-30-w4a8.md.
    #[inline(always)]
    pub(super) fn new<F: Fp8Weights>(scales: [u32; ROWS], exist: bool, branch: bool) -> Self {
        Self::relative_to::<F>(scales.map(F::base), scales, exist, branch)
    }

    /// The scales of chunks, relative to the bases of their rows. Otherwise as [`Self::new`].
    #[inline(always)]
    pub(super) fn relative_to<F: Fp8Weights>(
        bases: [u32; ROWS],
        scales: [u32; ROWS],
        exist: bool,
        branch: bool,
    ) -> Self {
        let mut below = [0; ROWS];
        let mut most = 0;
        let mut magnitudes = [[[0; 2]; 2]; ROWS];
        for i in 0..ROWS {
            below[i] = F::below(scales[i], bases[i]);
            most = below[i].max(most);
            magnitudes[i] = F::magnitudes(scales[i], below[i]);
        }
        let left_out = !F::ALWAYS_IN_RANGE && warp::ballot(exist && most > WIDEST) != 0;
        if left_out {
            cold_path();
            if branch {
                // Barriers are not predicated.
                warp::sync();
            }
            for i in 0..ROWS {
                // An opaque value keeps this a branch: without it, LLVM would select magnitudes in
                // every pack.
                if ptx::opaque(below[i]) > WIDEST {
                    magnitudes[i] = [[0; 2]; 2];
                }
            }
        }
        Self { magnitudes, factors: bases.map(F::factor), left_out }
    }

    /// Decodes word `word` of a chunk of row `row`: its even weights, and its odd ones.
    #[inline(always)]
    pub(super) fn decode(&self, row: usize, word: usize, codes: u32) -> [u32; 2] {
        decode(self.magnitudes[row][word / 2], codes)
    }

    /// Decodes the magnitudes of a word.
    #[inline(always)]
    fn decode_magnitudes(&self, row: usize, word: usize, codes: u32) -> [u32; 2] {
        select(self.magnitudes[row][word / 2], codes)
    }
}

/// Decodes a word of codes, given their magnitudes: the even ones, and the odd ones.
#[inline(always)]
pub(super) fn decode(magnitudes: Magnitudes, codes: u32) -> [u32; 2] {
    with_signs(select(magnitudes, codes), codes)
}

/// The magnitudes of a word of codes: of the even ones, and of the odd ones.
#[inline(always)]
fn select([low, high]: Magnitudes, codes: u32) -> [u32; 2] {
    let selectors = codes & 0x7777_7777;
    let [first, second] = [selectors, selectors >> 16].map(|four| ptx::permute(low, high, four));
    [0x6420, 0x7531].map(|bytes| ptx::permute(first, second, bytes))
}

/// Decoded magnitudes of a word of codes with their signs.
#[inline(always)]
fn with_signs([even, odd]: [u32; 2], codes: u32) -> [u32; 2] {
    const SIGNS: u32 = 0x8080_8080;
    [ptx::or_masked(even, codes << 4, SIGNS), ptx::or_masked(odd, codes, SIGNS)]
}

/// Chunks of two rows, decoded but for the signs.
///
/// The assembler serializes products if their operands are written while earlier products are being
/// computed. So most of the work is done before these are waited for, and signs are added
/// afterwards.
pub(super) struct Unsigned {
    rows: [Codes; 2],
    magnitudes: [[[u32; 2]; 4]; 2],
}

impl Unsigned {
    /// Decodes all magnitudes.
    #[inline(always)]
    pub(super) fn new(scales: &Scales<2>, rows: [Codes; 2]) -> Self {
        let word = |row: usize, word: usize| scales.decode_magnitudes(row, word, rows[row][word]);
        Self { rows, magnitudes: [0, 1].map(|row| [0, 1, 2, 3].map(|i| word(row, i))) }
    }

    /// Decodes all magnitudes without scales, times 2^[`ELEMENT_EXPONENT`]. E2M1 and E4M3 represent
    /// small numbers alike, so the bits of a magnitude are only shifted.
    #[inline(always)]
    pub(super) fn without_scales(rows: [Codes; 2]) -> Self {
        const MAGNITUDES: u32 = 0x1C1C_1C1C;
        let magnitudes =
            rows.map(|words| words.map(|word| [word << 2, word >> 2].map(|word| word & MAGNITUDES)));
        Self { rows, magnitudes }
    }

    /// The first operands of four multiplications.
    #[inline(always)]
    pub(super) fn operands(&self) -> [[u32; 4]; 4] {
        [0, 1, 2, 3].map(|word| {
            let [[a, b], [c, d]] =
                [0, 1].map(|row| with_signs(self.magnitudes[row][word], self.rows[row][word]));
            [a, c, b, d]
        })
    }
}

/// Adds the sums of a pack times the factors of both rows, and with `pack_scales` times the scales
/// of the tokens at `scales`.
///
/// # Safety
/// The scales of the work tile's tokens are at `scales` in shared memory.
#[inline(always)]
pub(super) unsafe fn promote<A: Array>(
    sums: &mut A,
    products: &A,
    factors: [f32; 2],
    scales: u32,
    pack_scales: bool,
) {
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

/// Adds the sums of the four blocks of a pack, in their order, times the scales of the blocks of
/// both rows, and with `pack_scales` times the scales of the tokens at `token_scales`. A block has
/// `A::LEN` sums, which follow each other.
///
/// # Safety
/// As for [`promote`]. All lanes of the warp call it.
#[inline(always)]
pub(super) unsafe fn promote_blocks<A: Array, B: Array>(
    sums: &mut A,
    products: &B,
    (first, second): (u32, u32),
    token_scales: u32,
    pack_scales: bool,
) {
    const { assert!(B::LEN == 4 * A::LEN) };
    // SAFETY: the caller promises the scales.
    let of_tokens =
        |four| if pack_scales { unsafe { self::token_scales(token_scales, four) } } else { [1.0; 2] };
    // Bit 7 of bytes from 0xC0 on. For scales below, the exponents of factors do not overflow.
    let large = (first & first << 1 | second & second << 1) & 0x8080_8080;
    if warp::ballot(large != 0) != 0 {
        cold_path();
        // A barrier keeps the assembler from predicating the instructions of this branch.
        warp::sync();
        for four in 0..A::LEN / 4 {
            let of_tokens = of_tokens(four);
            for block in 0..4 {
                for i in 0..4 {
                    let scale = (if i < 2 { first } else { second }) >> (8 * block) & 0xFF;
                    let product = products.get(block * A::LEN + 4 * four + i);
                    let sum = sums.get_mut(4 * four + i);
                    *sum = add_block(*sum, product, scale, of_tokens[i % 2]);
                }
            }
        }
        return;
    }
    const BIAS: u32 = -ELEMENT_EXPONENT as u32 * 0x0101_0101;
    let (first, second) = (first.wrapping_add(BIAS), second.wrapping_add(BIAS));
    for block in 0..4 {
        let factors = [first, second].map(|exponents| {
            let exponent = if block < 3 { exponents << (23 - 8 * block) } else { exponents >> 1 };
            f32::from_bits(exponent & 0x7F80_0000)
        });
        for four in 0..A::LEN / 4 {
            let of_tokens = of_tokens(four);
            for i in 0..4 {
                let factor = if pack_scales { factors[i / 2] * of_tokens[i % 2] } else { factors[i / 2] };
                let sum = sums.get_mut(4 * four + i);
                *sum = ptx::fma_f32(products.get(block * A::LEN + 4 * four + i), factor, *sum);
            }
        }
    }
}

/// Adds the sum of a block times its scale, given as a byte, and a scale of a token.
#[inline(always)]
fn add_block(sum: f32, product: f32, scale: u32, of_token: f32) -> f32 {
    const UNIT: f32 = power_of_two(-ELEMENT_EXPONENT);
    if scale > LARGEST_FACTOR {
        let scale = if scale == 0xFF { f32::NAN } else { f32::from_bits(scale << 23) };
        ptx::fma_f32(product * UNIT, scale * of_token, sum)
    } else {
        let factor = f32::from_bits(scale.wrapping_add(-ELEMENT_EXPONENT as u32) << 23);
        ptx::fma_f32(product, factor * of_token, sum)
    }
}

/// Multiplies the sums by the scales of the tokens.
///
/// # Safety
/// As for [`promote`].
#[inline(always)]
pub(super) unsafe fn scale_tokens<A: Array>(sums: &mut A, scales: u32) {
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

/// The weights of a tile of 16 rows that are left out of the tensor cores' sums: chunks whose scale
/// is too small for their pack.
pub(super) struct LeftOut<'a> {
    pub(super) params: &'a Params<'a>,
    pub(super) work_tile: &'a WorkTile,
    /// The tile's number in the work tile.
    pub(super) tile: u32,
    /// Packs of the work tile.
    pub(super) packs: u32,
    /// The first eight tokens of the work tile that have sums.
    pub(super) first_eight: u32,
    /// The bases of the lane's two rows, if they are not of packs.
    pub(super) bases: Option<[u32; 2]>,
}

impl LeftOut<'_> {
    /// Adds their products to the tile's sums, in the order of K.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it. The sums are the warp's.
    #[inline(always)]
    pub(super) unsafe fn add<F: Fp8Weights, T: Tile, A: Array>(&self, sums: &mut A) {
        // SAFETY: the same contract.
        unsafe {
            self.add_half::<F, T, A, 0>(sums);
            self.add_half::<F, T, A, 1>(sums);
        }
    }

    /// [`Self::add`] for one of the lane's two rows.
    ///
    /// # Safety
    /// As for [`Self::add`].
    #[inline(always)]
    unsafe fn add_half<F: Fp8Weights, T: Tile, A: Array, const HALF: u32>(&self, sums: &mut A) {
        let &Self { params, work_tile, tile, packs, first_eight, bases } = self;
        let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let mut pack = 0;
        while pack < packs {
            // Opaque numbers of this pack keep LLVM from computing addresses before the loop: then
            // they would take registers that wide tiles do not have.
            let [tile, expert] = [tile, work_tile.expert].map(|number| ptx::opaque(number + pack) - pack);
            let problem = params.problem.of_expert::<F>(expert);
            let blocks = problem.shape.blocks;
            let end = (blocks * F::BLOCK_BYTES / u64::from(CHUNK_BYTES)) as u32;
            let in_tile = (tile * TILE_ROWS + HALF * (TILE_ROWS / 2) + of_eight)
                .min(last_row::<T>(&problem, work_tile.row_tile));
            let row = problem.weights.row::<F>(u64::from(work_tile.row_tile * T::M + in_tile), blocks);
            let chunk = work_tile.k_range.start * T::CHUNKS + pack * CHUNKS + quarter;
            // SAFETY: where it is before the end, the chunk is in the row.
            let loaded = if chunk < end { unsafe { row.load_once::<F>(chunk) } } else { CodeChunk::NONE };
            let CodeChunk { codes: [a, b, c, d], scales } = loaded;
            let zeros = (a | b | c | d) & 0x7777_7777 == 0;
            let base = bases.map_or_else(|| F::base(scales), |bases| bases[HALF as usize]);
            let left_out = warp::ballot(F::below(scales, base) > WIDEST && !zeros);
            let packed = params.packed_of::<T>(work_tile);
            let [codes, scales_of_pack] = [codes_offset, scales_offset]
                .map(|offset| packed.wrapping_add(offset(T::N, T::PACKS, pack) as usize));
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
                    let in_piece = source * 4 + i % 8 / 2;
                    let first_eight =
                        if A::LEN > 16 { ptx::opaque(first_eight + i) - i } else { first_eight };
                    for four in 0..A::LEN / 4 {
                        for token in 0..2 {
                            let in_tile = (first_eight + four as u32) * 8 + quarter * 2 + token as u32;
                            let code = piece_offset(in_tile, i / 8, i % 2) + in_piece;
                            // SAFETY: the pack is packed, with the codes and scales of all tokens.
                            let (x, scale) = unsafe {
                                (
                                    *codes.wrapping_add(code as usize),
                                    *scales_of_pack.cast::<f32>().wrapping_add(in_tile as usize),
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
            pack += 1;
        }
    }
}
