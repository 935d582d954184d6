//! Encodes all blocks, once the last position is quantized: a lane has one element, in the order of
//! the matrix.

use microscale_kernels_abi::ReportSlot;
use microscale_kernels_abi::gptq::LoadParams;
use microscale_kernels_abi::launch::{THREADS, WARP};

use crate::format::Format;
use crate::hardware::{ptx, warp};

/// The quantized rows of a pass, and the position of each column.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) position_of: *const u32,
    /// `[rows, row_blocks, block bytes]`.
    pub(super) codes: *mut u8,
    /// `[rows, row_blocks]`.
    pub(super) scales: *const u8,
    pub(super) report: *mut ReportSlot,
}

/// Encodes 32 columns of a row.
///
/// # Safety
/// The contract of the kernels that encode.
#[inline(always)]
pub(super) unsafe fn encode<F: Format>(
    format: &F,
    rounded_from: *const f32,
    target: Target,
    params: &LoadParams,
) {
    let number =
        u64::from(warp::thread_block()) * u64::from(THREADS / WARP) + u64::from(warp::thread() / WARP);
    let (row, of_row) = params.row_warps.divide(number);
    if row >= u64::from(params.rows) {
        return; // The whole warp.
    }
    let (lane, col) = (warp::lane(), of_row as u32 * WARP + warp::lane());
    let exists = col < params.positions;
    let block = row * u64::from(params.positions / F::BLOCK) + u64::from(col / F::BLOCK);
    let (mut value, mut byte) = (0.0, F::NAN_SCALE);
    if exists {
        // SAFETY: the column has a position in the row, and its block a scale.
        unsafe {
            let position = *target.position_of.add(col as usize);
            let at = row * u64::from(params.pitch) + u64::from(position);
            value = *rounded_from.add(at as usize);
            byte = *target.scales.add(block as usize);
        }
    }
    let mut amax_bits = value.to_bits() & 0x7FFF_FFFF;
    let mut distance = 1;
    while distance < F::BLOCK {
        amax_bits = amax_bits.max(warp::shuffle_xor(amax_bits, distance));
        distance *= 2;
    }
    let nan_block = byte == F::NAN_SCALE;
    let (scaling, events) = format.define_under::<crate::dtype::F32>(amax_bits, byte);
    let code = if nan_block { 0 } else { u32::from(format.code(value, scaling)) };
    let across = warp::shuffle_xor(code, 1);
    if exists && lane % 2 == 0 {
        let at = row * u64::from(params.positions / 2) + u64::from(col / 2);
        // SAFETY: there is a byte for two columns, which this lane stores.
        unsafe { *target.codes.add(at as usize) = (code | across << 4) as u8 };
    }
    let counted = exists && !nan_block && lane % F::BLOCK == 0;
    let clipped = warp::ballot(counted && events.clipped).count_ones();
    let flushed = warp::ballot(counted && events.flushed).count_ones();
    if lane == 0 && clipped | flushed != 0 {
        // SAFETY: `report` points to the report's slots, whose fields only atomic operations use.
        unsafe {
            let slot = target.report.add((number % microscale_kernels_abi::REPORT_SLOTS as u64) as usize);
            ptx::add_to_counter(&raw mut (*slot).clipped, u64::from(clipped));
            ptx::add_to_counter(&raw mut (*slot).flushed, u64::from(flushed));
        }
    }
}
