//! Loads rows in the order of positions.

use microscale_kernels_abi::ReportSlot;
use microscale_kernels_abi::gptq::{GptqLoad, LoadParams};
use microscale_kernels_abi::launch::{THREADS, WARP};

use crate::by_block::count_non_finite;
use crate::dtype::Dtype;
use crate::errors::value;
use crate::hardware::warp;

/// The matrices of a pass, `[rows, pitch]`.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    pub(super) weights: *mut f32,
    pub(super) updated: *mut f32,
}

/// Loads 32 columns of a row. A lane has one, in the order of the matrix.
///
/// # Safety
/// The contract of the kernels that load.
#[inline(always)]
pub(super) unsafe fn load<D: Dtype>(
    values: *const u8,
    position_of: *const u32,
    to: Matrices,
    report: *mut ReportSlot,
    params: &LoadParams,
) {
    const WEIGHTS: u32 = GptqLoad::Weights as u32;
    const DIFFERENCES: u32 = GptqLoad::Differences as u32;
    let number =
        u64::from(warp::thread_block()) * u64::from(THREADS / WARP) + u64::from(warp::thread() / WARP);
    let (row, of_row) = params.row_warps.divide(number);
    if row >= u64::from(params.rows) {
        return; // The whole warp.
    }
    let (lane, col) = (warp::lane(), of_row as u32 * WARP + warp::lane());
    let mut x = 0.0;
    if col < params.cols {
        // SAFETY: the element exists.
        x = unsafe { value::<D>(values, row * params.row_stride + u64::from(col)) };
    }
    let non_finite = warp::ballot(!x.is_finite());
    if non_finite != 0 {
        let nan = warp::ballot(x.is_nan()).count_ones();
        if lane == 0 && params.to == WEIGHTS {
            let first_col = col + non_finite.trailing_zeros();
            let first = (params.first_row + row) * u64::from(params.positions) + u64::from(first_col);
            // SAFETY: `report` points to a report slot, by the contract.
            unsafe { count_non_finite(report, nan, non_finite, first) };
        }
        if params.saturate_non_finite != 0 {
            x = if x.is_nan() { 0.0 } else { x.clamp(-D::MAX, D::MAX) };
        }
    }
    // Blocks of 16 are halves of a warp.
    let of_block = if params.block == WARP { u32::MAX } else { 0xFFFF << (lane & 16) };
    let nan_block = warp::ballot(!x.is_finite()) & of_block != 0;
    if col >= params.positions {
        return;
    }
    // SAFETY: there is a position for each column, with padding, and each is below the pitch. No
    // other lane has it.
    unsafe {
        let at = row * u64::from(params.pitch) + u64::from(*position_of.add(col as usize));
        let (weight, updated) = (to.weights.add(at as usize), to.updated.add(at as usize));
        let (mut own, mut changed) = (x, x);
        if params.to != WEIGHTS {
            if params.to == DIFFERENCES {
                own = x - *weight;
            }
            own = if nan_block { 0.0 } else { own };
            changed = -own;
        } else if nan_block {
            (own, changed) = (f32::NAN, 0.0);
        }
        *weight = own;
        *updated = changed;
    }
}
