//! The kernel that decodes MXFP4 activations to E4M3, and packs them for `wgmma`.

use core::ptr::null;

use microscale_kernels_abi::gemm::decoding::{DECODING_WARPS, DecodingParams, RUN};
use microscale_kernels_abi::gemm::fp8::CHUNKS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use super::fp4::scale;
use super::fp8_weights::{Fp8Weights, activation_magnitudes, decode};
use super::pack::{EIGHT, Eight};
use super::pack_fp8::store;
use crate::hardware::warp;
use crate::product::problem::Routed;
use crate::product::product_format::Mxfp4;

/// Scales that a lane loads together.
const LOADS: u32 = 4;

/// MXFP4 activations in global memory.
#[derive(Clone, Copy)]
pub(super) struct Mxfp4Operand {
    pub(super) codes: *const u8,
    pub(super) scales: *const u8,
    pub(super) params: DecodingParams,
}

impl Mxfp4Operand {
    /// Decodes and packs a run of packs of eight tokens. First each warp finds the largest scale of
    /// one of them.
    ///
    /// # Safety
    /// The contract of the kernel, whose thread block is one of those that decode.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, out: *mut u8, params: &PackParams) {
        let (largest_of_eight, warp_number) = (warp::shared::<u32>(), warp::number());
        let (run_of_all, eight) = params.tile_eights.divide(warp::thread_block());
        let (tile, run) = self.params.runs.divide(run_of_all);
        let token = (tile * params.tile_eights.divisor + eight) * EIGHT + warp_number;
        // SAFETY: the same contract. The token exists, and each warp has a word of shared memory.
        unsafe {
            let largest = if token < params.tokens { self.largest_scale(u64::from(token)) } else { 0 };
            if warp::lane() == 0 {
                *largest_of_eight.wrapping_add(warp_number as usize) = largest;
            }
        }
        warp::barrier();
        // SAFETY: each warp stored its word before the barrier.
        let largest = unsafe { *largest_of_eight.wrapping_add((warp::lane() % EIGHT) as usize) };
        let packs = params.packs.divisor as u32;
        let end = (run * RUN + RUN).min(packs);
        let mut pack = run * RUN + warp_number;
        while pack < end {
            let number = (tile * packs + pack) * params.tile_eights.divisor + eight;
            // SAFETY: the same contract; the eight exists.
            unsafe { self.pack_eight(out, params, number, largest) };
            pack += DECODING_WARPS;
        }
    }

    /// The largest scale byte of a token, found by all lanes.
    ///
    /// # Safety
    /// The contract of the kernel; the token exists.
    #[inline(always)]
    unsafe fn largest_scale(&self, token: u64) -> u32 {
        let blocks = self.params.scales.row_blocks.divisor as u32;
        let mut largest = 0;
        let mut block = warp::lane() * LOADS;
        while block < blocks {
            for i in 0..LOADS {
                if block + i < blocks {
                    // SAFETY: the token has this block.
                    let scale = unsafe { self.scale(token, block + i) };
                    largest = scale.max(largest);
                }
            }
            block += WARP * LOADS;
        }
        let mut mask = WARP / 2;
        while mask > 0 {
            largest = warp::shuffle_xor(largest, mask).max(largest);
            mask /= 2;
        }
        largest
    }

    /// The scale byte of a block of a token.
    ///
    /// # Safety
    /// The contract of the kernel; the block exists.
    #[inline(always)]
    unsafe fn scale(&self, token: u64, block: u32) -> u32 {
        // SAFETY: the same contract.
        u32::from(unsafe { scale(self.scales, &self.params.scales, token, u64::from(block)) })
    }

    /// Decodes and packs eight tokens of a pack: number `number` of all eights. A lane has one
    /// token, whose largest scale is `largest`, and one word of each chunk, a block.
    ///
    /// # Safety
    /// The contract of the kernel; `number` is less than the eights of `params`.
    #[inline(always)]
    unsafe fn pack_eight(&self, out: *mut u8, params: &PackParams, number: u32, largest: u32) {
        let routed = Routed { plan: null(), from: null(), to: null() };
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(&routed, params, number) }) else { return };
        let Eight { pack_of_tile, row, exists, .. } = of_warp;
        let token = u64::from(row);
        let blocks = self.params.scales.row_blocks.divisor as u32;
        let word = warp::lane() / EIGHT;
        let words = [0, 1, 2, 3].map(|chunk| {
            let block = pack_of_tile * CHUNKS + chunk;
            if !exists || block >= blocks {
                return [0; 2];
            }
            let number = (token * u64::from(blocks) + u64::from(block)) * 4 + u64::from(word);
            // SAFETY: the token has this block, of four words on 4 bytes.
            let (codes, scale) = unsafe {
                (*self.codes.cast::<u32>().wrapping_add(number as usize), self.scale(token, block))
            };
            decode(activation_magnitudes(largest - scale), codes)
        });
        let pieces = [words.map(|[even, _]| even), words.map(|[_, odd]| odd)];
        let scale = if exists { Mxfp4::factor(largest) * self.params.alpha } else { 0.0 };
        // SAFETY: `out` has room for all packs, and no other warp has these tokens of the pack.
        unsafe { store(&of_warp, out, params, pieces, scale) };
    }
}
