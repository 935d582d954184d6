//! The kernels before a product of FP4 weights and FP4 activations: packing and decoding
//! activations, and the factors of the sums.

use microscale_kernels_abi::GlobalSlot;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::gemm::fp4::TOKEN_SCALE_BYTES;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::launch::THREADS;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::launch::WARP;

#[cfg(microscale_block_scale)]
use super::pack::{EIGHT, Eight};
use crate::dtype::Dtype;
#[cfg(microscale_block_scale)]
use crate::format::Blocks;
use crate::format::Decode;
use crate::hardware::{ptx, warp};
#[cfg(microscale_block_scale)]
use crate::product::operand::CHUNK_BYTES;
#[cfg(microscale_block_scale)]
use crate::product::problem::Routed;

/// Elements of a k-step, whose scales are a word.
#[cfg(microscale_block_scale)]
const STEP: u32 = microscale_formats::fp4_dot::STEP as u32;

/// Quantized activations and the global scales of the product: addresses in global memory.
#[derive(Clone, Copy)]
pub(super) struct Fp4Operand {
    pub(super) codes: *const u8,
    pub(super) scales: *const u8,
    /// Global scales of the activations, and of each matrix of weights.
    pub(super) globals: [*const GlobalSlot; 2],
    /// A slot per matrix of weights for the factor of its sums.
    pub(super) factors: *mut GlobalSlot,
    pub(super) params: Fp4Params,
}

impl Fp4Operand {
    /// The scale byte of a block of a row.
    ///
    /// # Safety
    /// The kernel's contract. The block exists.
    #[inline(always)]
    unsafe fn scale(&self, row: u64, block: u64) -> u8 {
        let grid = &self.params.scales;
        let offset = match grid.tiles_per_row {
            0 => row * grid.row_blocks.divisor + block,
            _ => grid.swizzled_offset(row, block),
        };
        // SAFETY: `scales` has a byte for each block.
        unsafe { *self.scales.wrapping_add(offset as usize) }
    }

    /// Writes the factors, by the first thread block.
    ///
    /// # Safety
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn write_factors(&self, threads: u32) {
        if warp::thread_block() != 0 {
            return;
        }
        let Fp4Params { matrices, activation_slots, .. } = self.params;
        let [activations, weights] = self.globals;
        let mut matrix = warp::thread();
        while matrix < matrices {
            let slot = if activation_slots == 1 { 0 } else { matrix };
            // SAFETY: all slots exist, and no other thread writes the factor of this matrix.
            unsafe {
                let activations = (*activations.wrapping_add(slot as usize)).scale;
                let weights = (*weights.wrapping_add(matrix as usize)).scale;
                (*self.factors.wrapping_add(matrix as usize)).scale =
                    self.params.factor(activations, weights);
            }
            matrix += threads;
        }
    }

    /// Packs activations. A warp packs eight tokens of a pack at a time. A lane has one token and
    /// one of its four chunks.
    ///
    /// # Safety
    /// The contract of the packing kernels.
    #[cfg(microscale_block_scale)]
    #[inline(always)]
    pub(super) unsafe fn pack<F: Blocks>(&self, out: *mut u8, routed: Routed, params: PackParams) {
        // The kernels before this one wrote the activations, and read the workspace.
        ptx::wait_for_previous_kernel();
        ptx::start_next_kernel();
        const WARPS: u32 = PACK_THREADS / WARP;
        // SAFETY: the same contract.
        unsafe {
            self.write_factors(PACK_THREADS);
            let mut number = warp::thread_block() * WARPS + warp::thread() / WARP;
            while number < params.eights {
                self.pack_eight::<F>(out, &routed, &params, number);
                number += params.thread_blocks * WARPS;
            }
        }
    }

    /// Packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the packing kernels; `number` is less than the eights of `params`.
    #[cfg(microscale_block_scale)]
    #[inline(always)]
    unsafe fn pack_eight<F: Blocks>(&self, out: *mut u8, routed: &Routed, params: &PackParams, number: u32) {
        let chunk = warp::lane() / EIGHT;
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
        let Eight { tile_tokens, pack_of_tile, in_tile, row, exists, .. } = of_warp;
        let row = u64::from(row);
        let blocks = self.params.scales.row_blocks.divisor;
        let row_bytes = blocks * u64::from(const { F::BLOCK / 2 });
        let first_byte = u64::from((pack_of_tile * (PACK_COLUMNS / 32) + chunk) * CHUNK_BYTES);
        let mut codes = [0; 4];
        if exists && first_byte < row_bytes {
            // SAFETY: rows are whole chunks on 16 bytes, and the chunk is before the row's end.
            codes = unsafe {
                ptx::load_16_here(self.codes.wrapping_add((row * row_bytes + first_byte) as usize))
            };
        }
        let pack = of_warp.pack_in(out, params.token_bytes);
        let place = in_tile * (PACK_COLUMNS / 32) + (chunk ^ in_tile / 2 % 4);
        // SAFETY: `out` has room for all packs, and no other lane has this chunk.
        unsafe { ptx::store_16(pack.wrapping_add((place * CHUNK_BYTES) as usize), codes) };
        const STEPS: u32 = PACK_COLUMNS / STEP;
        if chunk >= STEPS {
            return;
        }
        let in_step = const { STEP / F::BLOCK };
        let first_block = (pack_of_tile * STEPS + chunk) * in_step;
        let mut word = 0;
        for i in 0..in_step {
            let block = u64::from(first_block + i);
            if exists && block < blocks {
                // SAFETY: row and block exist.
                word |= u32::from(unsafe { self.scale(row, block) }) << (8 * i);
            }
        }
        let place = tile_tokens * (PACK_COLUMNS / 2) + in_tile * TOKEN_SCALE_BYTES + chunk * 4;
        // SAFETY: as for the codes, with the token's words of scales, on 4 bytes.
        unsafe { *pack.wrapping_add(place as usize).cast::<u32>() = word };
    }

    /// Decodes activations, without global scale. A thread has eight of a row. Rows end with whole
    /// blocks.
    ///
    /// Their values are exact: a code times an E4M3 scale is a multiple of 2^−10 below 2^12, with
    /// at most six significant bits. A code times a power of two has two. From 2^126 on, MXFP4's
    /// scales make infinities of large codes.
    ///
    /// # Safety
    /// The contract of the decoding kernels.
    #[inline(always)]
    pub(super) unsafe fn decode<F: Decode, D: Dtype>(&self, format: &F, out: *mut u8) {
        // SAFETY: the same contract.
        unsafe { self.write_factors(THREADS) };
        let eight = u64::from(warp::thread_block()) * u64::from(THREADS) + u64::from(warp::thread());
        if eight >= self.params.eights {
            return;
        }
        let (row, block) = self.params.scales.row_blocks.divide(eight / const { F::BLOCK as u64 / 8 });
        // SAFETY: the eight and its block exist, and no other thread has them.
        unsafe {
            let codes = *self.codes.cast::<u32>().wrapping_add(eight as usize);
            let factor = format.factor(self.scale(row, block));
            let values = F::decode(u64::from(codes)).map(|value| value * factor);
            let chunk = if factor.is_nan() { [D::NAN_WORD; 4] } else { D::narrow(&values) };
            ptx::store_16(out.wrapping_add(eight as usize * 16), chunk);
        }
    }
}
