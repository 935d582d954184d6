//! The kernel that packs FP8 activations for `wgmma`.

use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use super::pack::{EIGHT, Eight};
use crate::hardware::{ptx, warp};
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
    /// 1 if the kernel before this one wrote the activations, and started when all earlier work had
    /// ended.
    pub(super) quantized_just_before: u32,
}

impl Fp8Operand {
    /// Packs activations. A warp packs eight tokens of a pack at a time. A lane has one token and
    /// one word of each chunk.
    ///
    /// # Safety
    /// The contract of the packing kernel.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, out: *mut u8, routed: Routed, params: PackParams) {
        // The next kernel reads weights before it waits for this one, so all work before the
        // activations' must have ended when it starts.
        if self.quantized_just_before != 0 {
            ptx::start_next_kernel();
        }
        // The kernels before this one wrote the activations, and read the workspace.
        ptx::wait_for_previous_kernel();
        if self.quantized_just_before == 0 {
            ptx::start_next_kernel();
        }
        const WARPS: u32 = PACK_THREADS / WARP;
        let mut number = warp::thread_block() * WARPS + warp::thread() / WARP;
        while number < params.eights {
            // SAFETY: the same contract; the eight exists.
            unsafe { self.pack_eight(out, &routed, &params, number) };
            number += params.thread_blocks * WARPS;
        }
    }

    /// Packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the packing kernel; `number` is less than the eights of `params`.
    #[inline(always)]
    unsafe fn pack_eight(&self, out: *mut u8, routed: &Routed, params: &PackParams, number: u32) {
        let (token_of_eight, word) = (warp::lane() % EIGHT, warp::lane() / EIGHT);
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
        let Eight { tile_tokens, pack_of_tile, number: eight, in_tile, row: token, exists, .. } = of_warp;
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
        let pack = of_warp.pack_in(out, params.token_bytes);
        let store = |parity: u32, selector: u32| {
            let piece = words.map(|[low, high]| ptx::permute(low, high, selector));
            let core_matrix = eight * (PACK_COLUMNS / 16) + word * 2 + parity;
            let place = (core_matrix * EIGHT + token_of_eight) * 16;
            // SAFETY: `out` has room for all packs, and no other lane has this piece.
            unsafe { ptx::store_16(pack.wrapping_add(place as usize), piece) };
        };
        store(0, 0x6420);
        store(1, 0x7531);
        if word > 0 {
            return;
        }
        let scale = if self.token_scales == 1 { 0 } else { pack_of_tile };
        // SAFETY: the token has `token_scales` scales; scales of packs past the end of a row are
        // not read. There are fewer than 2^32, as each is for 128 codes or for a token. The place
        // is the token's, on 4 bytes.
        unsafe {
            let scale = if exists && scale < self.token_scales {
                *self.scales.wrapping_add((token * self.token_scales + scale) as usize)
            } else {
                0.0
            };
            *pack.wrapping_add((tile_tokens * PACK_COLUMNS + in_tile * 4) as usize).cast::<f32>() = scale;
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
