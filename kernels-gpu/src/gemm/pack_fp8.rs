//! The kernel that packs FP8 activations for `wgmma`, and the bases of rows of weights.

use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp8::{CHUNKS, codes_offset, exchanged, piece_offset, scales_offset};
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use super::pack::{EIGHT, Eight, begin};
use crate::hardware::{ptx, warp};
use crate::product::operand::load_8;
use crate::product::problem::Routed;

/// Codes of a chunk.
const CHUNK: u32 = PACK_COLUMNS / CHUNKS;

/// Activations in E4M3, in global memory.
#[derive(Clone, Copy)]
pub(super) struct Fp8Operand {
    pub(super) codes: *const u8,
    pub(super) scales: *const f32,
    /// Scales per token: one, or one per pack.
    pub(super) token_scales: u32,
}

impl Fp8Operand {
    /// Packs activations, and finds the bases of rows of weights. A warp packs eight tokens of a
    /// pack. A lane has one token and one multiplication of the pack.
    ///
    /// # Safety
    /// The contract of the packing kernel.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, out: *mut u8, routed: Routed, params: PackParams, row_bases: RowBases) {
        begin();
        const WARPS: u32 = PACK_THREADS / WARP;
        let number = warp::thread_block() * WARPS + warp::number();
        if number < params.eights {
            // SAFETY: the same contract; the eight exists.
            unsafe { self.pack_eight(out, &routed, &params, number) };
        }
        if number < params.rows {
            // SAFETY: the same contract; the row exists.
            unsafe { row_bases.find(&params, number) };
        }
    }

    /// Packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the packing kernel; `number` is less than the eights of `params`.
    #[inline(always)]
    unsafe fn pack_eight(&self, out: *mut u8, routed: &Routed, params: &PackParams, number: u32) {
        let multiplication = warp::lane() / EIGHT;
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
        let Eight { pack_of_tile, row: token, exists, .. } = of_warp;
        let row = self.codes.wrapping_add((u64::from(token) * params.cols) as usize);
        let mut words = [[0; 2]; CHUNKS as usize];
        for i in 0..CHUNKS {
            let [chunk, word] = exchanged(params.by_block != 0, multiplication, i);
            let column = pack_of_tile * PACK_COLUMNS + chunk * CHUNK + word * EIGHT;
            let left = if exists { (params.cols as u32).saturating_sub(column) } else { 0 };
            let from = row.wrapping_add(column as usize);
            // SAFETY: `left` codes of the token exist from the column on, and where tokens are
            // aligned, so are words.
            words[i as usize] = unsafe {
                if params.aligned != 0 && left >= EIGHT { load_8(from) } else { load_any(from, left) }
            };
        }
        let scale = if self.token_scales == 1 { 0 } else { pack_of_tile };
        // SAFETY: the token has `token_scales` scales; scales of packs past the end of a row are
        // not read. There are fewer than 2^32, as each is for 128 codes or for a token. No other
        // warp has these tokens of the pack.
        unsafe {
            let scale = if exists && scale < self.token_scales {
                *self.scales.wrapping_add((token * self.token_scales + scale) as usize)
            } else {
                0.0
            };
            let pieces =
                [0x6420, 0x7531].map(|parity| words.map(|[low, high]| ptx::permute(low, high, parity)));
            store(&of_warp, out, params, pieces, scale);
        }
    }
}

/// Stores eight tokens of a pack. A lane has the even and the odd codes of the four words of a
/// multiplication, and the scale of its token.
///
/// # Safety
/// `out` has room for all packs, and no other warp has these tokens of the pack.
#[inline(always)]
pub(super) unsafe fn store(
    of_warp: &Eight,
    out: *mut u8,
    params: &PackParams,
    [even, odd]: [[u32; CHUNKS as usize]; 2],
    scale: f32,
) {
    let multiplication = warp::lane() / EIGHT;
    let &Eight { tile_tokens, in_tile, pack, .. } = of_warp;
    let codes = out.wrapping_add(codes_offset(tile_tokens, params.iteration_packs, pack) as usize);
    let store = |parity: u32, piece: [u32; CHUNKS as usize]| {
        let place = piece_offset(in_tile, multiplication, parity);
        // SAFETY: the caller promises the room; no other lane has this piece.
        unsafe { ptx::store_16(codes.wrapping_add(place as usize), piece) };
    };
    store(0, even);
    store(1, odd);
    if multiplication == 0 {
        let place = scales_offset(tile_tokens, params.iteration_packs, pack) + u64::from(in_tile * 4);
        // SAFETY: the place is the token's, on 4 bytes.
        unsafe { *out.wrapping_add(place as usize).cast::<f32>() = scale };
    }
}

/// MXFP4 weights whose scales are relative to the largest one of their row, for fast accumulation.
#[derive(Clone, Copy)]
pub(super) struct RowBases {
    pub(super) scales: *const u8,
    pub(super) out: *mut u32,
}

impl RowBases {
    /// Writes the largest scale of a row: a row for each warp of the thread blocks that do not
    /// quantize, which have `warps` each.
    ///
    /// # Safety
    /// The contract of the kernels that quantize. All lanes call it.
    #[inline(always)]
    pub(super) unsafe fn find_own(&self, params: &PackParams, warps: u32) {
        let row = (warp::thread_block() - params.thread_blocks) * warps + warp::number();
        if row < params.rows {
            // SAFETY: the same contract; the row exists.
            unsafe { self.find(params, row) };
        }
    }

    /// Writes the largest scale of a row. All lanes call it.
    ///
    /// # Safety
    /// The contract of the packing kernel; the row exists.
    #[inline(always)]
    unsafe fn find(&self, params: &PackParams, row: u32) {
        let scales = self.scales.wrapping_add((u64::from(row) * u64::from(params.blocks)) as usize);
        let mut largest = 0;
        // Rows of whole words start on words.
        let words = if params.blocks.is_multiple_of(4) { params.blocks / 4 } else { 0 };
        let mut word = warp::lane();
        while word < words {
            // SAFETY: the scales exist.
            let four = unsafe { *scales.cast::<u32>().wrapping_add(word as usize) };
            let [a, b, c, d] = four.to_le_bytes();
            largest = u32::from(a.max(b).max(c.max(d))).max(largest);
            word += WARP;
        }
        let mut block = words * 4 + warp::lane();
        while block < params.blocks {
            // SAFETY: the scale exists.
            largest = unsafe { u32::from(*scales.wrapping_add(block as usize)) }.max(largest);
            block += WARP;
        }
        let mut mask = WARP / 2;
        while mask > 0 {
            largest = warp::shuffle_xor(largest, mask).max(largest);
            mask /= 2;
        }
        if warp::lane() == 0 {
            // SAFETY: the row's base is this warp's.
            unsafe { *self.out.wrapping_add(row as usize) = largest };
        }
    }
}

/// Loads `count` codes, up to eight, of any alignment. The others are zeros.
///
/// # Safety
/// `from` points to `count` codes in global memory.
#[inline(always)]
unsafe fn load_any(from: *const u8, count: u32) -> [u32; 2] {
    let mut words = [0; 2];
    for i in 0..EIGHT {
        if i < count {
            // SAFETY: the code exists.
            let code = unsafe { u32::from(*from.wrapping_add(i as usize)) };
            words[i as usize / 4] |= code << (i % 4 * 8);
        }
    }
    words
}
