//! The kernels before a product of FP4 weights and FP4 activations: packing and decoding
//! activations, and the factors of the sums.

use microscale_formats::dot::CHUNK;
use microscale_kernels_abi::GlobalSlot;
use microscale_kernels_abi::gemm::PACK_COLUMNS;
use microscale_kernels_abi::gemm::fp4::Fp4Params;
#[cfg(microscale_block_scale)]
use microscale_kernels_abi::gemm::fp4::TOKEN_SCALE_BYTES;
#[cfg(microscale_tcgen05)]
use microscale_kernels_abi::gemm::fp4::{ATOM_BYTES, ATOM_ROWS, TOKEN_BYTES};
use microscale_kernels_abi::gemm::packing::PACK_THREADS;
use microscale_kernels_abi::gemm::params::PackParams;
use microscale_kernels_abi::grid::ScaleGrid;
use microscale_kernels_abi::launch::{THREADS, WARP};

use super::pack::{EIGHT, Eight, begin};
use crate::dtype::Dtype;
#[cfg(any(microscale_block_scale, microscale_tcgen05))]
use crate::format::Blocks;
use crate::format::Decode;
use crate::hardware::{ptx, warp};
#[cfg(any(microscale_block_scale, microscale_tcgen05))]
use crate::product::operand::CHUNK_BYTES;
use crate::product::problem::Routed;
use crate::product::tensor_cores::Activations;

/// Elements of a k-step, whose scales are a word.
#[cfg(any(microscale_block_scale, microscale_tcgen05))]
const STEP: u32 = microscale_formats::fp4_dot::STEP as u32;

/// True if the scales of each k-step have a word of their own.
#[cfg(any(microscale_block_scale, microscale_tcgen05))]
const WHOLE_WORDS: bool = cfg!(microscale_block_scale);

/// The offset of a token's chunk of codes from its pack, as the mainloop `BlockScale` reads it.
#[cfg(microscale_block_scale)]
#[inline(always)]
fn chunk_offset(_: u32, _: u32, token: u32, chunk: u32) -> i32 {
    ((token * (PACK_COLUMNS / 32) + (chunk ^ token / 2 % 4)) * CHUNK_BYTES) as i32
}

/// The offset of a token's scales of a k-step from its pack, as the mainloop `BlockScale` reads
/// them.
#[cfg(microscale_block_scale)]
#[inline(always)]
fn scales_offset(tile_tokens: u32, _: u32, token: u32, step: u32, _: u32) -> i32 {
    (tile_tokens * (PACK_COLUMNS / 2) + token * TOKEN_SCALE_BYTES + step * 4) as i32
}

/// The offset from a pack to the first one of its K-iteration, as the mainloop `Tcgen05` reads two
/// packs as one.
#[cfg(microscale_tcgen05)]
#[inline(always)]
fn first_pack_offset(tile_tokens: u32, pack: u32) -> i32 {
    -((pack % 2 * tile_tokens * TOKEN_BYTES) as i32)
}

/// The offset of a token's chunk of codes from its pack, as the mainloop `Tcgen05` reads it.
#[cfg(microscale_tcgen05)]
#[inline(always)]
fn chunk_offset(tile_tokens: u32, pack: u32, token: u32, chunk: u32) -> i32 {
    let chunk = pack % 2 * (PACK_COLUMNS / 32) + chunk;
    let place = token * (PACK_COLUMNS / 16) + (chunk ^ token % 8);
    first_pack_offset(tile_tokens, pack) + (place * CHUNK_BYTES) as i32
}

/// The offset of a token's `in_step` scales of a k-step from its pack, as the mainloop `Tcgen05`
/// reads them.
#[cfg(microscale_tcgen05)]
#[inline(always)]
fn scales_offset(tile_tokens: u32, pack: u32, token: u32, step: u32, in_step: u32) -> i32 {
    let scale = (pack % 2 * (PACK_COLUMNS / STEP) + step) * in_step;
    let column = scale / 4 * (tile_tokens / ATOM_ROWS) + token / ATOM_ROWS;
    let in_atom = token % ATOM_ROWS * 16 + column % 4 * 4 + scale % 4;
    let atoms = tile_tokens * PACK_COLUMNS + column / 4 * ATOM_BYTES;
    first_pack_offset(tile_tokens, pack) + (atoms + in_atom) as i32
}

/// The offset of the scale byte of a block of a row.
#[inline(always)]
pub(super) fn scale_offset(grid: &ScaleGrid, row: u64, block: u64) -> usize {
    let offset = match grid.tiles_per_row {
        0 => row * grid.row_blocks.divisor + block,
        _ => grid.swizzled_offset(row, block),
    };
    offset as usize
}

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
        // SAFETY: `scales` has a byte for each block.
        unsafe { *self.scales.wrapping_add(scale_offset(&self.params.scales, row, block)) }
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

    /// Packs activations. A warp packs eight tokens of a pack. A lane has one token and one of
    /// its four chunks.
    ///
    /// # Safety
    /// The contract of the packing kernels.
    #[cfg(any(microscale_block_scale, microscale_tcgen05))]
    #[inline(always)]
    pub(super) unsafe fn pack<F: Blocks>(&self, out: *mut u8, routed: Routed, params: PackParams) {
        begin();
        const WARPS: u32 = PACK_THREADS / WARP;
        // SAFETY: the same contract; the eight exists.
        unsafe {
            self.write_factors(PACK_THREADS);
            let number = warp::thread_block() * WARPS + warp::number();
            if number < params.eights {
                self.pack_eight::<F>(out, &routed, &params, number);
            }
        }
    }

    /// Packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the packing kernels; `number` is less than the eights of `params`.
    #[cfg(any(microscale_block_scale, microscale_tcgen05))]
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
        let offset = chunk_offset(tile_tokens, pack_of_tile, in_tile, chunk);
        // SAFETY: `out` has room for all packs, and no other lane has this chunk.
        unsafe { ptx::store_16(pack.wrapping_offset(offset as isize), codes) };
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
        let offset = scales_offset(tile_tokens, pack_of_tile, in_tile, chunk, in_step);
        let to = pack.wrapping_offset(offset as isize);
        // SAFETY: as for the codes, with the scales of the token and k-step, on their bytes.
        unsafe {
            if WHOLE_WORDS || in_step == 4 {
                *to.cast::<u32>() = word;
            } else {
                *to.cast::<u16>() = word as u16;
            }
        }
    }

    /// Decodes activations, without global scale, and packs them. A warp packs eight tokens of a
    /// pack. A lane has one token, and one word of each of its four chunks.
    ///
    /// # Safety
    /// The contract of the kernels that decode and pack.
    #[inline(always)]
    pub(super) unsafe fn decode_packed<F: Decode, A: Activations>(
        &self,
        format: &F,
        out: *mut u8,
        routed: Routed,
        params: PackParams,
    ) {
        begin();
        const WARPS: u32 = PACK_THREADS / WARP;
        // SAFETY: the same contract; the eight exists.
        unsafe {
            self.write_factors(PACK_THREADS);
            let number = warp::thread_block() * WARPS + warp::number();
            if number < params.eights {
                self.decode_eight::<F, A>(format, out, &routed, &params, number);
            }
        }
    }

    /// Decodes and packs eight tokens of a pack: number `number` of all eights.
    ///
    /// # Safety
    /// The contract of the kernels that decode and pack; `number` is less than the eights of
    /// `params`.
    #[inline(always)]
    unsafe fn decode_eight<F: Decode, A: Activations>(
        &self,
        format: &F,
        out: *mut u8,
        routed: &Routed,
        params: &PackParams,
        number: u32,
    ) {
        let word = warp::lane() / EIGHT;
        // SAFETY: the same contract.
        let Some(of_warp) = (unsafe { Eight::find(routed, params, number) }) else { return };
        let blocks = self.params.scales.row_blocks.divisor;
        let row = u64::from(of_warp.row);
        let words = [0, 1, 2, 3].map(|chunk| {
            let column = of_warp.pack_of_tile * PACK_COLUMNS + chunk * CHUNK as u32 + word * EIGHT;
            let block = u64::from(column / F::BLOCK);
            if !of_warp.exists || block >= blocks {
                return [0; 4];
            }
            let eight = row * (blocks * u64::from(F::BLOCK / EIGHT)) + u64::from(column / EIGHT);
            // SAFETY: the row has this block, and so this eight.
            A::pairs(unsafe { self.decoded::<F, A::Dtype>(format, eight, row, block) })
        });
        let pack = of_warp.pack_in(out, PACK_COLUMNS * 2);
        let store = |number: u32, piece: [u32; 4]| {
            // SAFETY: `out` has room for all packs; no other lane has this piece of the pack.
            unsafe { ptx::store_16(pack.wrapping_add((number * 16) as usize), piece) }
        };
        for i in 0..4 {
            if params.core_matrices != 0 {
                let of_pair = words.map(|pairs| pairs[i as usize]);
                store(of_warp.piece_of_pair(word, i), of_pair);
            } else {
                store(of_warp.piece_of_pairs(word, i), words[i as usize]);
            }
        }
    }

    /// Decodes eight activations of a row, number `eight` of all, in a block of the row.
    ///
    /// Their values are exact: a code times an E4M3 scale is a multiple of 2^−10 below 2^12, with
    /// at most six significant bits. A code times a power of two has two. From 2^126 on, MXFP4's
    /// scales make infinities of large codes.
    ///
    /// # Safety
    /// The kernel's contract; the eight and its block exist.
    #[inline(always)]
    unsafe fn decoded<F: Decode, D: Dtype>(&self, format: &F, eight: u64, row: u64, block: u64) -> [u32; 4] {
        // SAFETY: the same contract.
        let (codes, scale) =
            unsafe { (*self.codes.cast::<u32>().wrapping_add(eight as usize), self.scale(row, block)) };
        let factor = format.factor(scale);
        let values = F::decode(u64::from(codes)).map(|value| value * factor);
        if factor.is_nan() { [D::NAN_WORD; 4] } else { D::narrow(&values) }
    }

    /// Decodes activations, without global scale. A thread has eight of a row. Rows end with whole
    /// blocks.
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
            let chunk = self.decoded::<F, D>(format, eight, row, block);
            ptx::store_16(out.wrapping_add(eight as usize * 16), chunk);
        }
    }
}
