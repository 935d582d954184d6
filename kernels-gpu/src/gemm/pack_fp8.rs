//! The kernels that pack FP8 activations for `wgmma`, and the ones that quantize them first.

use core::hint::cold_path;

use microscale_formats::activations::{group_scale, token_scale};
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp8::{QUANTIZE_CLUSTER, QUANTIZE_THREADS};
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use super::pack::{self, EIGHT, Eight};
use crate::activations::{encode_any, finite_amax_of_chunk, over_most};
use crate::dtype::{Chunk, Dtype};
use crate::hardware::{cluster, ptx, shared, warp};
use crate::product::operand::load_8;
use crate::product::problem::Routed;

/// Chunks of a pack, each of four words.
const CHUNKS: u32 = 4;
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
    /// pack at a time. A lane has one token and one word of each chunk.
    ///
    /// # Safety
    /// The contract of the packing kernel.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, out: *mut u8, routed: Routed, params: PackParams, row_bases: RowBases) {
        // The kernels before this one wrote the activations, and read the workspace.
        ptx::wait_for_previous_kernel();
        ptx::start_next_kernel();
        const WARPS: u32 = PACK_THREADS / WARP;
        let mut number = warp::thread_block() * WARPS + warp::thread() / WARP;
        while number < params.eights {
            // SAFETY: the same contract; the eight exists.
            unsafe { self.pack_eight(out, &routed, &params, number) };
            number += params.thread_blocks * WARPS;
        }
        // SAFETY: the same contract.
        unsafe { row_bases.find_all(&params, params.thread_blocks, WARPS) };
    }

    /// Packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the packing kernel; `number` is less than the eights of `params`.
    #[inline(always)]
    unsafe fn pack_eight(&self, out: *mut u8, routed: &Routed, params: &PackParams, number: u32) {
        let word = warp::lane() / EIGHT;
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
        let Eight { pack_of_tile, row: token, exists, .. } = of_warp;
        let row = self.codes.wrapping_add((u64::from(token) * params.cols) as usize);
        let mut words = [[0; 2]; CHUNKS as usize];
        for chunk in 0..CHUNKS {
            let column = pack_of_tile * PACK_COLUMNS + chunk * CHUNK + word * EIGHT;
            let left = if exists { (params.cols as u32).saturating_sub(column) } else { 0 };
            let from = row.wrapping_add(column as usize);
            // SAFETY: `left` codes of the token exist from the column on, and where tokens are
            // aligned, so are words.
            words[chunk as usize] = unsafe {
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
            store(&of_warp, out, params, words, scale);
        }
    }
}

/// Stores eight tokens of a pack: of each chunk a lane has a word's codes, and the scale of its
/// token.
///
/// # Safety
/// `out` has room for all packs, and no other warp has these tokens of the pack.
#[inline(always)]
unsafe fn store(
    of_warp: &Eight,
    out: *mut u8,
    params: &PackParams,
    words: [[u32; 2]; CHUNKS as usize],
    scale: f32,
) {
    let (token_of_eight, word) = (warp::lane() % EIGHT, warp::lane() / EIGHT);
    let &Eight { tile_tokens, number: eight, in_tile, .. } = of_warp;
    let pack = of_warp.pack_in(out, params.token_bytes);
    let store = |parity: u32, selector: u32| {
        let piece = words.map(|[low, high]| ptx::permute(low, high, selector));
        let core_matrix = eight * (PACK_COLUMNS / 16) + word * 2 + parity;
        let place = (core_matrix * EIGHT + token_of_eight) * 16;
        // SAFETY: the caller promises the room; no other lane has this piece.
        unsafe { ptx::store_16(pack.wrapping_add(place as usize), piece) };
    };
    store(0, 0x6420);
    store(1, 0x7531);
    if word == 0 {
        let place = (tile_tokens * PACK_COLUMNS + in_tile * 4) as usize;
        // SAFETY: the place is the token's, on 4 bytes.
        unsafe { *pack.wrapping_add(place).cast::<f32>() = scale };
    }
}

/// Activations in 16 bits that are quantized to E4M3.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) values: *const u8,
    /// Every token starts on 16 bytes.
    pub(super) aligned: bool,
    /// A scale per pack, in place of one per token.
    pub(super) per_pack: bool,
}

impl Values {
    /// Quantizes activations and packs them. A cluster has eight tokens: its warps take turns with
    /// their packs, twice if scales are per token. A lane has one token and one word of each chunk.
    ///
    /// # Safety
    /// The contract of the kernels that quantize.
    #[inline(always)]
    pub(super) unsafe fn quantize<D: Dtype>(self, out: *mut u8, params: &PackParams, row_bases: RowBases) {
        const WARPS: u32 = QUANTIZE_THREADS / WARP;
        ptx::wait_for_previous_kernel();
        // The next kernel reads weights before it waits for this one, so all work before this
        // kernel must have ended.
        ptx::start_next_kernel();
        let (tile, eight) = params.tile_eights.divide(warp::thread_block() / QUANTIZE_CLUSTER);
        let packs = params.packs.divisor as u32;
        let first = cluster::rank() * WARPS + warp::number();
        let of_pack = |pack: u32| {
            let number = (tile * packs + pack) * params.tile_eights.divisor + eight;
            // SAFETY: the same contract; all token tiles have tokens.
            unsafe { Eight::find(&Routed::NONE, params, number) }
        };
        let mut amax = 0;
        if !self.per_pack {
            let mut pack = first;
            while pack < packs {
                if let Some(of_warp) = of_pack(pack) {
                    // SAFETY: the same contract.
                    amax = amax_of::<D>(&unsafe { self.load(params, &of_warp) }).max(amax);
                }
                pack += QUANTIZE_CLUSTER * WARPS;
            }
            // SAFETY: all threads of the cluster are here.
            amax = unsafe { of_cluster(of_token(amax)) };
        }
        let mut pack = first;
        while pack < packs {
            if let Some(of_warp) = of_pack(pack) {
                // SAFETY: the same contract.
                let chunks = unsafe { self.load(params, &of_warp) };
                let scale = if self.per_pack {
                    group_scale(f32::from_bits(of_token(amax_of::<D>(&chunks))), false, over_most)
                } else {
                    token_scale(f32::from_bits(amax))
                };
                let mut words = [[0; 2]; CHUNKS as usize];
                for i in 0..CHUNKS as usize {
                    let codes = encode_any::<D>(&chunks[i], scale);
                    words[i] = [codes as u32, (codes >> 32) as u32];
                }
                let past_end = u64::from(pack * PACK_COLUMNS) >= params.cols;
                let has_scale = of_warp.exists && !(self.per_pack && past_end);
                // SAFETY: `out` has room for all packs, and no other warp has these tokens of the
                // pack.
                unsafe { store(&of_warp, out, params, words, if has_scale { scale } else { 0.0 }) };
            }
            pack += QUANTIZE_CLUSTER * WARPS;
        }
        // SAFETY: the same contract.
        unsafe {
            row_bases.find_all(params, params.quantizing_thread_blocks(), WARPS);
            if !self.per_pack {
                // Other thread blocks read this one's amax.
                cluster::wait();
            }
        }
    }

    /// Loads the lane's words of eight tokens of a pack. Columns and tokens that do not exist are
    /// zeros.
    ///
    /// # Safety
    /// The contract of the kernels that quantize.
    #[inline(always)]
    unsafe fn load(&self, params: &PackParams, of_warp: &Eight) -> [Chunk; CHUNKS as usize] {
        let word = warp::lane() / EIGHT;
        let row = self.values.wrapping_add((u64::from(of_warp.row) * params.cols * 2) as usize);
        let mut chunks = [[0; 4]; CHUNKS as usize];
        for chunk in 0..CHUNKS {
            let column = of_warp.pack_of_tile * PACK_COLUMNS + chunk * CHUNK + word * EIGHT;
            let left = if of_warp.exists { (params.cols as u32).saturating_sub(column) } else { 0 };
            let from = row.wrapping_add(2 * column as usize);
            // SAFETY: `left` values of the token exist from the column on, and where tokens are
            // aligned, so are words.
            chunks[chunk as usize] = unsafe {
                if self.aligned && left >= EIGHT {
                    ptx::load_16_here(from)
                } else {
                    pack::load_any(from, left.min(EIGHT))
                }
            };
        }
        chunks
    }
}

/// The bits of the largest finite magnitude of a lane's words. All lanes call it.
#[inline(always)]
fn amax_of<D: Dtype>(chunks: &[Chunk; CHUNKS as usize]) -> u32 {
    let mut most = 0;
    for i in 0..CHUNKS as usize {
        let [a, b, c, d] = chunks[i];
        most = D::max_magnitudes(most, D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d)));
    }
    let most = D::largest(most);
    if warp::ballot(most >= D::INFINITY) == 0 {
        return D::magnitude_to_f32_bits(most);
    }
    cold_path();
    let mut finite = 0;
    for i in 0..CHUNKS as usize {
        finite = finite_amax_of_chunk::<D>(&chunks[i]).max(finite);
    }
    finite
}

/// The largest number of the lanes with the same token. All lanes call it.
#[inline(always)]
fn of_token(of_lane: u32) -> u32 {
    let largest = warp::shuffle_xor(of_lane, EIGHT).max(of_lane);
    warp::shuffle_xor(largest, 2 * EIGHT).max(largest)
}

/// The largest number of all warps of the cluster for the lane's token. [`cluster::wait`] must come
/// before the thread block ends.
///
/// # Safety
/// All threads of the cluster call it, with the same number in all lanes of a token.
#[inline(always)]
unsafe fn of_cluster(of_warp: u32) -> u32 {
    const HALF: u32 = WARP / EIGHT;
    const {
        assert!(QUANTIZE_THREADS / WARP == 2 * HALF && QUANTIZE_CLUSTER == 2 * HALF);
    }
    let base = shared::address(warp::shared::<u128>().cast::<u8>());
    let (token, quarter) = (warp::lane() % EIGHT, warp::lane() / EIGHT);
    let place = |number: u32| base + (number * EIGHT + token) * 4;
    let (own, of_block) = (place(warp::number()), place(2 * HALF));
    // SAFETY: a row of eight words per warp and one of the thread block are in its shared memory. A
    // barrier is between writes and reads. The thread blocks of the cluster wait for each other
    // before they end.
    unsafe {
        if quarter == 0 {
            shared::store(own, of_warp);
        }
        warp::barrier();
        let [a, b] = [0, HALF].map(|half| shared::load(place(quarter + half)));
        let largest = of_token(a.max(b));
        if warp::thread() < EIGHT {
            shared::store(of_block, largest);
        }
        cluster::arrive();
        cluster::wait();
        let [a, b] = [0, HALF].map(|half| cluster::load(cluster::address_of(of_block, quarter + half)));
        cluster::arrive();
        of_token(a.max(b))
    }
}

/// MXFP4 weights whose scales are relative to the largest one of their row, for fast accumulation.
#[derive(Clone, Copy)]
pub(super) struct RowBases {
    pub(super) scales: *const u8,
    pub(super) out: *mut u32,
}

impl RowBases {
    /// Writes the largest scale of each row. The warps of the launch take turns.
    ///
    /// # Safety
    /// The contract of the packing kernel. All warps call it.
    #[inline(always)]
    unsafe fn find_all(&self, params: &PackParams, thread_blocks: u32, warps: u32) {
        let mut row = warp::thread_block() * warps + warp::number();
        while row < params.rows {
            // SAFETY: the same contract; the row exists.
            unsafe { self.find(params, row) };
            row += thread_blocks * warps;
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
