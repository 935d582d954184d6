//! The output FP8 in packs, as the tensor cores of products read them.

use microscale_formats::activations::token_scale;
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::RowScale;
use microscale_kernels_abi::gemm::fp8::{
    CHUNKS, TOKEN_BYTES, codes_offset, exchanged, piece_offset, scales_offset,
};
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::gemm::{PACK_COLUMNS, TILE_COLUMNS};
use microscale_kernels_abi::grid::Divider32;

use super::fp8::{EVEN_ODD, LANES_OF_GROUP, encode_piece};
use super::output::{Memory, Output, Piece};
use super::row::Row;
use super::source::{column, step};
use crate::dtype::{Bf16, Dtype};
use crate::hardware::warp;

/// E4M3 under f32 scales, one per token or per pack, in packs of token tiles
/// ([`TOKEN_BYTES`](microscale_kernels_abi::gemm::fp8::TOKEN_BYTES) says how). Tokens and columns
/// that do not exist are zeros.
pub(super) struct PackedOutput {
    /// Divides the number of an eight of tokens by the eights of a token tile.
    tile_eights: Divider32,
    /// Packs of a token tile.
    packs: u32,
    /// Packs of a K-iteration.
    iteration_packs: u32,
    /// A multiplication has all words of a chunk, not a word of each chunk.
    by_block: bool,
}

impl PackedOutput {
    /// The output of these packs.
    #[inline(always)]
    pub(super) fn new(pack: &PackParams) -> Self {
        let PackParams { tile_eights, packs, iteration_packs, by_block, .. } = *pack;
        Self { tile_eights, packs: packs.divisor as u32, iteration_packs, by_block: by_block != 0 }
    }
}

/// A token's place in packs.
pub(super) struct PackedToken {
    /// The scale, if it is for all of the token.
    scale: f32,
    /// The number of the token tile.
    tile: u32,
    /// The number of the token in its token tile.
    in_tile: u32,
}

/// The places of a lane's first chunk. A step's chunk is `step` bytes after the one before.
struct Places {
    /// Where the lane stores eight codes.
    codes: *mut u8,
    /// The scale of the token or of the pack.
    scale: *mut u8,
    step: usize,
}

/// Words of eight codes in a chunk.
const WORDS: u32 = PACK_COLUMNS / CHUNKS / 8;

impl Output for PackedOutput {
    type Scale = PackedToken;
    const PER_TOKEN: bool = true;
    const BY_EXPERT: bool = false;
    const BEFORE_PRODUCTS: bool = true;

    #[inline(always)]
    unsafe fn scale<D: Dtype>(
        &self,
        _: &ActivationParams,
        _: &Memory,
        row: &Row,
        amax: f32,
        _: bool,
    ) -> PackedToken {
        let (tile, eight) = self.tile_eights.divide(row.number / TILE_COLUMNS);
        let in_tile = eight * TILE_COLUMNS + row.number % TILE_COLUMNS;
        PackedToken { scale: token_scale(amax), tile, in_tile }
    }

    #[inline(always)]
    unsafe fn store<D: Dtype>(&self, piece: &Piece<'_>, token: &PackedToken) {
        let places = self.places::<D>(piece, token);
        encode_piece::<D>(
            piece,
            token.scale,
            EVEN_ODD,
            #[inline(always)]
            |j, words, scale| {
                // SAFETY: the same contract.
                unsafe { self.store_chunk::<D>(piece, &places, j, words, scale) };
            },
        );
    }
}

impl PackedOutput {
    /// The multiplication that has the lane's word, and the number of the word in it.
    #[inline(always)]
    fn multiplication(&self) -> [u32; 2] {
        exchanged(self.by_block, warp::lane() / WORDS % CHUNKS, warp::lane() % WORDS)
    }

    /// The lane stores odd codes of two words; otherwise even ones.
    #[inline(always)]
    fn is_odd(&self) -> bool {
        self.multiplication()[1] % 2 == 1
    }

    /// The places of a token in a piece.
    #[inline(always)]
    fn places<D: Dtype>(&self, piece: &Piece<'_>, token: &PackedToken) -> Places {
        let tile_tokens = self.tile_eights.divisor * TILE_COLUMNS;
        let pack = token.tile * self.packs + column::<D>(piece.number, 0) / PACK_COLUMNS;
        let codes = codes_offset(tile_tokens, self.iteration_packs, pack);
        let scales = scales_offset(tile_tokens, self.iteration_packs, pack);
        let [multiplication, word] = self.multiplication();
        let in_pack = piece_offset(token.in_tile, multiplication, u32::from(self.is_odd())) + word / 2 * 8;
        let at = |offset: u64, in_pack: u32| {
            piece.memory.codes.wrapping_add(offset as usize).wrapping_add(in_pack as usize)
        };
        // The packs of a step are one or two K-iterations.
        let step = const { step::<Bf16>() / PACK_COLUMNS * TOKEN_BYTES } * tile_tokens;
        Places { codes: at(codes, in_pack), scale: at(scales, token.in_tile * 4), step: step as usize }
    }

    /// Stores the even and the odd codes of the lane's word of step `j`. All lanes of the warp call
    /// it.
    ///
    /// # Safety
    /// The contract of the kernels in [`super`].
    #[inline(always)]
    unsafe fn store_chunk<D: Dtype>(
        &self,
        piece: &Piece<'_>,
        places: &Places,
        j: u32,
        [even, odd]: [u32; 2],
        scale: f32,
    ) {
        let (row, column) = (piece.row, column::<D>(piece.number, j));
        // A lane gets the even or the odd codes of two words of its multiplication.
        let is_odd = self.is_odd();
        let next = if self.by_block { 1 } else { WORDS };
        let other = warp::shuffle_xor(if is_odd { even } else { odd }, next);
        let [low, high] = if is_odd { [other, odd] } else { [even, other] }.map(u64::from);
        if !row.has_scales || column >= self.packs * PACK_COLUMNS {
            return;
        }
        let offset = j as usize * places.step;
        // SAFETY: the pack exists, and has the token. No other lane has these codes, which are on 8
        // bytes, and no other one stores the scale.
        unsafe {
            *places.codes.wrapping_add(offset).cast::<u64>() = low | high << 32;
            if warp::lane() % LANES_OF_GROUP == 0 {
                let per_token = piece.params.row_scale == RowScale::PerToken as u32;
                let has_scale = row.exists && (column < piece.params.cols || per_token);
                *places.scale.wrapping_add(offset).cast::<f32>() = if has_scale { scale } else { 0.0 };
            }
        }
    }
}
