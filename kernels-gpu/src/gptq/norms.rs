//! The squared norm of each row times the factor: the error, or the energy, in a layer's outputs.

use microscale_kernels_abi::gptq::{BatchParams, FACTOR_TILE, GPTQ_BATCH};
use microscale_kernels_abi::launch::{THREADS, WARP};

use super::factor::entry;
use super::load::Matrices;
use crate::hardware::{ptx, warp};

/// Columns of a batch per lane.
const EACH: usize = (GPTQ_BATCH / WARP) as usize;

/// Adds a batch's part of the norm of the warp's row.
///
/// # Safety
/// The contract of the kernel.
#[inline(always)]
pub(super) unsafe fn norms(
    matrices: Matrices,
    feedback: *const f32,
    pivots: *const f32,
    norms: *mut f64,
    params: &BatchParams,
) {
    let row = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    if row >= params.rows {
        return; // The whole warp.
    }
    let start = u64::from(row) * u64::from(params.pitch) + u64::from(params.start);
    let values = matrices.weights.wrapping_add(start as usize);
    let sums = matrices.updated.wrapping_add(start as usize);
    let mut products = [0.0f64; EACH];
    let mut part = 0;
    while part < EACH {
        let col = part as u32 * WARP + warp::lane();
        if col < params.count {
            let position = params.start + col;
            let entries = entry(feedback, params.start, position);
            // SAFETY: the column is in the batch, and rows of the factor before it exist.
            unsafe {
                let mut sum = *sums.wrapping_add(col as usize);
                let mut k = 0;
                while k < col {
                    let (value, entry) =
                        (*values.wrapping_add(k as usize), *entries.wrapping_add((k * FACTOR_TILE) as usize));
                    sum = ptx::fma_f32(-value, entry, sum);
                    k += 1;
                }
                let product = f64::from(sum) * f64::from(*pivots.wrapping_add(position as usize));
                products[part] = product * product;
            }
        }
        part += 1;
    }
    // SAFETY: there is a norm for each row, which this lane has.
    let mut norm = if warp::lane() == 0 { unsafe { *norms.add(row as usize) } } else { 0.0 };
    let mut part = 0;
    while part < EACH {
        let mut lane = 0;
        // A number that the compiler does not know, lest it unroll the loop.
        while lane < ptx::opaque(WARP) {
            norm += warp::shuffle_f64(products[part], lane);
            lane += 1;
        }
        part += 1;
    }
    if warp::lane() == 0 {
        // SAFETY: as above.
        unsafe { *norms.add(row as usize) = norm };
    }
}
