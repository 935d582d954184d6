//! The packing kernel: arranges activations as the tensor cores read them
//! ([`PackParams`] has the layouts).

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use crate::hardware::{ptx, warp};
use crate::product::problem::Routed;
use crate::product::tensor_cores::Activations;

/// Tokens that a warp packs together, as a core matrix has them.
pub(super) const EIGHT: u32 = 8;
/// Words of eight activations in a chunk.
const WORDS: u32 = CHUNK as u32 / EIGHT;

/// Packs activations. A warp packs eight tokens of a pack. A lane has one token, and the same eight
/// activations of each of its four chunks.
///
/// # Safety
/// The contract of the packing kernels.
#[inline(always)]
pub(super) unsafe fn pack<D: Activations>(
    activations: *const u8,
    out: *mut u8,
    routed: Routed,
    params: PackParams,
) {
    begin();
    const WARPS: u32 = PACK_THREADS / WARP;
    let number = warp::thread_block() * WARPS + warp::number();
    if number < params.eights {
        // SAFETY: as for this function; the eight exists.
        unsafe { pack_eight::<D>(activations, out, &routed, &params, number) };
    }
}

/// Waits for the kernels before a packing kernel, and lets the product start. They may have written
/// activations or read the workspace. They may also have written weights, which the product reads
/// before it waits for this kernel.
#[inline(always)]
pub(super) fn begin() {
    #[cfg(microscale_sm90)]
    {
        ptx::wait_for_previous_kernel();
        ptx::start_next_kernel();
    }
}

/// Eight tokens of a pack, which a warp packs together. A lane has one of them.
pub(super) struct Eight {
    /// Tokens of a token tile.
    pub(super) tile_tokens: u32,
    /// The number of the pack.
    pub(super) pack: u32,
    /// Its number in its token tile.
    pub(super) pack_of_tile: u32,
    /// The number of the eight in its token tile.
    pub(super) number: u32,
    /// The number of the lane's token in its token tile.
    pub(super) in_tile: u32,
    /// The row of activations of the lane's token, if it exists; else 0.
    pub(super) row: u32,
    /// The lane's token exists.
    pub(super) exists: bool,
}

impl Eight {
    /// Number `number` of all eights; `None` if its token tile has no tokens, as no kernel reads
    /// them then.
    ///
    /// # Safety
    /// The contract of the packing kernels; `number` is less than the eights of `params`.
    #[inline(always)]
    pub(super) unsafe fn find(routed: &Routed, params: &PackParams, number: u32) -> Option<Self> {
        let tile_tokens = params.tile_eights.divisor * EIGHT;
        let (pack, eight) = params.tile_eights.divide(number);
        let (tile, pack_of_tile) = params.packs.divide_32(pack);
        let in_tile = eight * EIGHT + warp::lane() % EIGHT;
        // SAFETY: `number` exists, and so does its token tile.
        let tokens = unsafe { routed.tile(tile, tile_tokens, params.tokens) };
        let count = tokens.end - tokens.first;
        if count == 0 {
            return None;
        }
        let exists = in_tile < count;
        // SAFETY: where it `exists`, `from` lists the token.
        let row = if exists { unsafe { Routed::listed(routed.from, tokens.first + in_tile) } } else { 0 };
        Some(Self { tile_tokens, pack, pack_of_tile, number: eight, in_tile, row, exists })
    }

    /// The index in the pack of the piece with all pairs of word `word` of chunk `chunk`, for
    /// `mma`.
    #[inline(always)]
    pub(super) fn piece_of_pairs(&self, word: u32, chunk: u32) -> u32 {
        (word * self.tile_tokens + self.in_tile) * WORDS + chunk
    }

    /// The index in the pack of the piece with pair `pair` of word `word` of each chunk, for
    /// `wgmma`.
    #[inline(always)]
    pub(super) fn piece_of_pair(&self, word: u32, pair: u32) -> u32 {
        let of_eights = self.number * const { PACK_COLUMNS / EIGHT } + word * 4 + pair;
        of_eights * EIGHT + warp::lane() % EIGHT
    }

    /// The address of the pack.
    #[inline(always)]
    pub(super) fn pack_in(&self, out: *mut u8, token_bytes: u32) -> *mut u8 {
        out.wrapping_add((u64::from(self.pack) * u64::from(self.tile_tokens * token_bytes)) as usize)
    }
}

/// Packs eight tokens of a pack: number `number` of all eights.
///
/// # Safety
/// The contract of the packing kernels; `number` is less than the eights of `params`.
#[inline(always)]
unsafe fn pack_eight<D: Activations>(
    activations: *const u8,
    out: *mut u8,
    routed: &Routed,
    params: &PackParams,
    number: u32,
) {
    let word = warp::lane() / EIGHT;
    // SAFETY: the same contract.
    let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
    let Eight { pack_of_tile, row: token, exists, .. } = of_warp;
    let cols = params.cols as u32;
    // The number of activations in the lane's word of a chunk, and the column of the first.
    let of_word = |chunk: u32| {
        let column = pack_of_tile * PACK_COLUMNS + chunk * CHUNK as u32 + word * EIGHT;
        (if exists { cols.saturating_sub(column).min(EIGHT) } else { 0 }, column)
    };
    let row = activations.wrapping_add((u64::from(token) * params.cols * 2) as usize);
    let at = |column: u32| row.wrapping_add(column as usize * 2);
    let pack = of_warp.pack_in(out, PACK_COLUMNS * 2);
    let store = |number: u32, piece: [u32; 4]| {
        // SAFETY: `out` has room for all packs; no other lane has this piece of the pack.
        unsafe { ptx::store_16(pack.wrapping_add((number * 16) as usize), piece) }
    };
    let of_pairs = |chunk: u32| of_warp.piece_of_pairs(word, chunk);
    let of_pair = |pair: u32| of_warp.piece_of_pair(word, pair);
    // Tokens that do not exist become zeros by the same stores: slower ones would hold up the lanes
    // that have tokens.
    let whole = params.aligned != 0 && of_word(3).1 < cols;
    let load = |chunk: usize| {
        if !exists {
            return [0; 4];
        }
        // SAFETY: the last chunk has activations, and tokens start on 16 bytes, so all eights are
        // whole. The token exists.
        D::pairs(unsafe { ptx::load_16_here(at(of_word(0).1).wrapping_add(chunk * CHUNK * 2)) })
    };
    // The loads are repeated for each layout: shared by both, they would take more registers than
    // there are.
    if whole && params.core_matrices != 0 {
        let words = [0, 1, 2, 3].map(load);
        for i in 0..4 {
            // The first two pairs of a word belong to one multiplication, the others to the next.
            store(of_pair(i as u32), [words[0][i], words[1][i], words[2][i], words[3][i]]);
        }
        return;
    }
    if whole {
        let words = [0, 1, 2, 3].map(load);
        for i in 0..4 {
            store(of_pairs(i as u32), words[i]);
        }
        return;
    }
    // Packs with missing columns: one word at a time takes fewer registers.
    let mut chunk = 0;
    while chunk < ptx::opaque(4) {
        let (count, column) = of_word(chunk);
        // SAFETY: `count` activations exist from `column` on.
        let pairs = D::pairs(unsafe { load_any(at(column), count) });
        if params.core_matrices != 0 {
            for pair in 0..4 {
                let word = of_pair(pair) * 4 + chunk;
                // SAFETY: as in `store`; the word is the lane's.
                unsafe { *pack.cast::<u32>().wrapping_add(word as usize) = pairs[pair as usize] };
            }
        } else {
            store(of_pairs(chunk), pairs);
        }
        chunk += 1;
    }
}

/// Loads `count` activations, up to eight, of any alignment. The others are zeros.
///
/// # Safety
/// `from` points to `count` activations in global memory.
#[inline(always)]
pub(super) unsafe fn load_any(from: *const u8, count: u32) -> [u32; 4] {
    [0, 2, 4, 6].map(|i| {
        let half = |i: u32| {
            // SAFETY: `i < count`.
            if i < count { unsafe { u32::from(*from.cast::<u16>().wrapping_add(i as usize)) } } else { 0 }
        };
        half(i) | half(i + 1) << 16
    })
}
