//! Rows by the definition, as CPUs compute them: for values that tensor cores have no room for, and for
//! ragged rows, which are not whole chunks.

use microscale_formats::dot::{CHUNK, STREAMS};
use microscale_formats::plan::power_of_two;
use microscale_formats::weights::GROUP;
use microscale_kernels_abi::Epilogue;
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::gemm::gemv::{PLAIN_THREADS, PlainParams};

use crate::dtype::Dtype;
use crate::product::epilogue::total;
use crate::product::operand::{Problem, Row, load_8};
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// Warps in a thread block.
pub(super) const WARPS: u32 = PLAIN_THREADS / WARP;

/// The sum of a row with a token's activations, by the definition.
///
/// # Safety
/// The contract of the kernels; all lanes of the warp take part.
#[inline(always)]
unsafe fn defined<F: Weights, D: Activations>(row: Row, activations: *const u8, cols: u64) -> f64 {
    let mut sum = 0.0;
    let mut start = u64::from(warp::lane()) * CHUNK as u64;
    while start < cols {
        let mut first = start;
        while first < cols && first < start + CHUNK as u64 {
            // SAFETY: the group exists, and has codes and a scale even where its row ends before.
            let ([low, high], scale) = unsafe {
                (
                    load_8(row.codes.wrapping_add((first / 2) as usize)),
                    *row.scales.wrapping_add((first / (2 * F::BLOCK_BYTES)) as usize),
                )
            };
            let codes = u64::from(low) | u64::from(high) << 32;
            let mut fraction = 0.0;
            let mut i = 0;
            while i < GROUP as u64 && first + i < cols {
                let code = (codes >> (4 * i)) as u32;
                // The bits moved to those of an f32 are the weight times 2^-126.
                let weight = f32::from_bits((code & 7) << 22 | code << 28 & 1 << 31) * power_of_two(126 - 7);
                // SAFETY: the activation exists.
                let bits = unsafe { *activations.wrapping_add(((first + i) * 2) as usize).cast::<u16>() };
                fraction = ptx::fma_f32(weight, D::Dtype::widen(&[u32::from(bits), 0, 0, 0], 0), fraction);
                i += 1;
            }
            sum = F::add_group(sum, fraction, scale);
            first += GROUP as u64;
        }
        start += (STREAMS * CHUNK) as u64;
    }
    64.0 * total([f64::from(sum)])
}

impl Problem {
    /// Computes and stores a row with some tokens, by the definition. A gate's two rows are computed with the even one.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes of the warp take part, and no other warp has this row and
    /// token.
    #[inline(always)]
    pub(crate) unsafe fn define<F: Weights, D: Activations>(&self, row: u64, tokens: [u32; 2]) {
        let gated = self.results.epilogue.has(Epilogue::GATED);
        let [mut token, end] = if gated && row % 2 == 1 { [0; 2] } else { tokens };
        while token < end {
            // SAFETY: the row and the token exist, and of a gate the row behind; one lane stores.
            unsafe {
                let (mut before, mut sum) = (0.0, 0.0);
                let mut i = 0;
                while i < if gated { 2 } else { 1 } {
                    let weights = self.weights.row::<F>(row + i, self.shape.blocks);
                    before = sum;
                    sum = defined::<F, D>(weights, self.token(token), self.shape.cols);
                    i += 1;
                }
                if warp::lane() == 0 {
                    self.store::<D>(row, token, if gated { before } else { sum }, || sum);
                }
            }
            token += 1;
        }
    }
}

/// Multiplies a row a warp, by the definition.
///
/// # Safety
/// The contract of the kernels whose names end in `ragged`.
#[inline(always)]
pub(super) unsafe fn ragged<F: Weights, D: Activations>(problem: Problem, grid: PlainParams) {
    let row = u64::from(warp::thread_block()) * u64::from(WARPS) + u64::from(warp::thread() / WARP);
    if row < problem.shape.rows {
        let mut number = 0;
        while number < grid.token_tiles.divisor as u32 {
            // SAFETY: the whole warp is here, and its row is its own.
            unsafe {
                let tile = problem.routed.tile(number, grid.token_tile_bits, grid.tokens as u32);
                problem.of_expert::<F>(tile.expert).define::<F, D>(row, [tile.first, tile.end]);
            }
            number += 1;
        }
    }
}
