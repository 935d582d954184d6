//! Ragged rows, which are not whole chunks: one row per warp, by the reference.

use microscale_kernels_abi::gemm::PLAIN_THREADS;
use microscale_kernels_abi::gemm::gemv::PlainParams;
use microscale_kernels_abi::launch::WARP;

use crate::hardware::warp;
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, WeightFormat};

/// Warps per thread block.
pub(super) const WARPS: u32 = PLAIN_THREADS / WARP;

/// Multiplies one row per warp.
///
/// # Safety
/// The contract of the entry points of the mainloop `ragged`.
#[inline(always)]
pub(super) unsafe fn ragged<F: WeightFormat, D: Activations>(problem: Problem, params: PlainParams) {
    let row = u64::from(warp::thread_block()) * u64::from(WARPS) + u64::from(warp::thread() / WARP);
    if row < problem.shape.rows {
        let mut number = 0;
        while number < params.token_tiles.divisor as u32 {
            // SAFETY: all lanes are here; row and token tile exist, and no other warp has the row.
            unsafe {
                let tile = problem.routed.tile(number, 1 << params.token_tile_bits, params.tokens as u32);
                problem.of_expert::<F>(tile.expert).store_reference::<F, D>(row, [tile.first, tile.end]);
            }
            number += 1;
        }
    }
}
