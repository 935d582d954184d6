//! The kernel that decodes MXFP4 activations to E4M3, and packs them for `wgmma`.

use core::ptr::null;

use microscale_kernels_abi::gemm::decoding::{DecodingParams, RUN};
use microscale_kernels_abi::gemm::fp8::{CHUNKS, DECODING_WARPS, exchanged};
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::WARP;

use super::fp4::scale_offset;
use super::fp8_weights::{Fp8Weights, activation_magnitudes, decode};
use super::pack::{EIGHT, Eight};
use super::pack_fp8::store;
use crate::hardware::warp;
use crate::product::problem::Routed;
use crate::product::product_format::Mxfp4;

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
    /// The contract of the kernel. Thread blocks that find bases of rows do not call it.
    #[inline(always)]
    pub(super) unsafe fn pack(&self, out: *mut u8, params: &PackParams) {
        let (largest_of_eight, warp_number) = (warp::shared::<u32>(), warp::number());
        let (run_of_all, eight) = params.tile_eights.divide(warp::thread_block());
        let (tile, run) = self.params.runs.divide(run_of_all);
        let first_token = (tile * params.tile_eights.divisor + eight) * EIGHT;
        let (token, token_of_lane) = (first_token + warp_number, first_token + warp::lane() % EIGHT);
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
        let first = run * RUN + warp_number;
        const { assert!(RUN == 2 * DECODING_WARPS) };
        // All loads come before the first store.
        // SAFETY: the same contract; where packs exist, so do the eights.
        unsafe {
            let words = [first, first + DECODING_WARPS].map(|pack| self.load(params, token_of_lane, pack));
            let number = |pack: u32| (tile * packs + pack) * params.tile_eights.divisor + eight;
            if first < end {
                self.decode_and_store(out, params, number(first), words[0], largest);
            }
            if first + DECODING_WARPS < end {
                self.decode_and_store(out, params, number(first + DECODING_WARPS), words[1], largest);
            }
        }
    }

    /// The largest scale byte of a token, found by all lanes.
    ///
    /// # Safety
    /// The contract of the kernel; the token exists.
    #[inline(always)]
    unsafe fn largest_scale(&self, token: u64) -> u32 {
        let blocks = self.params.scales.row_blocks.divisor as u32;
        // In both layouts, four scales from a multiple of four on are contiguous.
        let words = (self.scales.addr() as u32 | blocks).is_multiple_of(4);
        let mut largest = 0;
        let mut first = warp::lane() * 4;
        while first < blocks {
            let fours = [0, 1, 2, 3].map(|i| {
                let block = first + i * const { WARP * 4 };
                let at = |block: u32| {
                    self.scales.wrapping_add(scale_offset(&self.params.scales, token, u64::from(block)))
                };
                if block >= blocks {
                    return 0;
                }
                // SAFETY: the token has these blocks. With `words`, the scales and rows of linear
                // ones start on words, and so do four blocks of a row in the swizzled layout.
                unsafe {
                    if words {
                        return *at(block).cast::<u32>();
                    }
                    let mut four = 0;
                    for byte in 0..4 {
                        if block + byte < blocks {
                            four |= u32::from(*at(block + byte)) << (8 * byte);
                        }
                    }
                    four
                }
            });
            let [a, b, c, d] = fours.map(|four: u32| {
                let [a, b, c, d] = four.to_le_bytes();
                u32::from(a.max(b).max(c.max(d)))
            });
            largest = largest.max(a.max(b).max(c.max(d)));
            first += const { WARP * 16 };
        }
        let mut mask = WARP / 2;
        while mask > 0 {
            largest = warp::shuffle_xor(largest, mask).max(largest);
            mask /= 2;
        }
        largest
    }

    /// Loads eight tokens of a pack of their token tile. A lane loads the four words of codes of a
    /// multiplication, each with the scale of its chunk, of its token, `token`. A chunk is a block.
    /// Missing ones are zeros.
    ///
    /// # Safety
    /// The contract of the kernel.
    #[inline(always)]
    unsafe fn load(&self, params: &PackParams, token: u32, pack: u32) -> [[u32; 2]; CHUNKS as usize] {
        let blocks = self.params.scales.row_blocks.divisor as u32;
        let multiplication = warp::lane() / EIGHT;
        [0, 1, 2, 3].map(|i| {
            let [chunk, word] = exchanged(params.by_block != 0, multiplication, i);
            let block = pack * CHUNKS + chunk;
            if token >= params.tokens || block >= blocks {
                return [0; 2];
            }
            let [token, block] = [token, block].map(u64::from);
            let number = (token * u64::from(blocks) + block) * 4 + u64::from(word);
            let scale = scale_offset(&self.params.scales, token, block);
            // SAFETY: the token has this block, of four words on 4 bytes.
            unsafe {
                let codes = *self.codes.cast::<u32>().wrapping_add(number as usize);
                [codes, u32::from(*self.scales.wrapping_add(scale))]
            }
        })
    }

    /// Decodes and packs the words of [`Self::load`], for eight number `number` of all.
    /// `largest` is the largest scale of the lane's token.
    ///
    /// # Safety
    /// The contract of the kernel; `number` is less than the eights of `params`.
    #[inline(always)]
    unsafe fn decode_and_store(
        &self,
        out: *mut u8,
        params: &PackParams,
        number: u32,
        words: [[u32; 2]; CHUNKS as usize],
        largest: u32,
    ) {
        let routed = Routed { plan: null(), from: null(), to: null() };
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(&routed, params, number) }) else { return };
        let words = words.map(|[codes, scale]| decode(activation_magnitudes(largest - scale), codes));
        let pieces = [words.map(|[even, _]| even), words.map(|[_, odd]| odd)];
        let scale = if of_warp.exists { Mxfp4::factor(largest) * self.params.alpha } else { 0.0 };
        // SAFETY: `out` has room for all packs, and no other warp has these tokens of the pack.
        unsafe { store(&of_warp, out, params, pieces, scale) };
    }
}
