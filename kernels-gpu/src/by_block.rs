//! A block by a whole warp, a lane an element: the definition of `microscale_formats` as it stands, with every option.
//!
//! It serves twice: as what the product falls back to for blocks with non-finite values, and as a step of the ladder.

use microscale_formats::mxfp4::{self, BLOCK_BYTES, BlockEvents};
use microscale_formats::{E8m0, NegativeZero, Ties};
use microscale_kernels_abi::{BlockGrid, QuantizeOptions, ReportSlot};

use crate::dtype::Dtype;
use crate::{access, ptx, warp};

/// Quantizes one block. Entered by the whole warp.
///
/// # Safety
/// `values`, `codes` and `scales` as for the kernels of [`crate::quantize`]; `block` exists in the grid; `report` points to a
/// report slot in global memory.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the arguments of a kernel, and which block")]
pub(crate) unsafe fn quantize<D: Dtype>(
    values: *const u8,
    codes: *mut u8,
    scales: *mut u8,
    report: Option<*mut ReportSlot>,
    grid: &BlockGrid,
    options: &QuantizeOptions,
    ties: Ties,
    block: u64,
) {
    let lane = warp::lane();
    // SAFETY: the block exists.
    let mut value = f32::from_bits(unsafe { access::element::<D>(values, grid, block, lane) });
    let non_finite = warp::ballot(!value.is_finite());
    if non_finite != 0 {
        if let Some(report) = report {
            let nan = warp::ballot(value.is_nan()).count_ones();
            // SAFETY: the report slot is the caller's promise.
            unsafe { count_non_finite(report, nan, non_finite, block) };
        }
        if options.saturate_non_finite != 0 {
            value = if value.is_nan() { 0.0 } else { value.clamp(-D::MAX, D::MAX) };
        }
    }
    let nan_block = non_finite != 0 && options.saturate_non_finite == 0;

    let mut amax_bits = value.to_bits() & 0x7FFF_FFFF;
    // Not over an array of distances: it would lie in local memory.
    let mut distance = 16;
    while distance > 0 {
        amax_bits = amax_bits.max(warp::shuffle_xor(amax_bits, distance));
        distance /= 2;
    }
    let exponent = mxfp4::rounded_exponent(amax_bits, options.mantissa_addend);
    let scale = if nan_block { E8m0::NAN } else { mxfp4::scale_from_exponent(exponent) };
    let zeros = match options.negative_zero {
        0 => NegativeZero::Keep,
        1 => NegativeZero::DropInput,
        2 => NegativeZero::Drop,
        _ => NegativeZero::Force,
    };
    let code = mxfp4::encode(value, scale.reciprocal(), ties, zeros).to_bits();
    let code = if nan_block { 0 } else { code };
    let across = warp::shuffle_xor(u32::from(code), 1) as u8;
    // SAFETY: 16 code bytes and one scale byte a block, each written by one lane; the report slot is the caller's promise.
    unsafe {
        if lane % 2 == 0 {
            *codes.add((block * BLOCK_BYTES as u64 + u64::from(lane / 2)) as usize) = code | across << 4;
        }
        if lane == 0 {
            *scales.add(block as usize) = scale.to_bits();
            if let Some(report) = report.filter(|_| !nan_block) {
                let events = BlockEvents::of(amax_bits, exponent, ties);
                ptx::add_to_counter(&raw mut (*report).clipped, u64::from(events.clipped));
                ptx::add_to_counter(&raw mut (*report).scale_saturated, u64::from(events.scale_saturated));
                ptx::add_to_counter(&raw mut (*report).flushed, u64::from(events.flushed));
            }
        }
    }
}

/// Counts a block's non-finite elements: how many are NaN, and which lanes have any.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
unsafe fn count_non_finite(report: *mut ReportSlot, nan: u32, non_finite: u32, block: u64) {
    if warp::lane() != 0 {
        return;
    }
    let first = block * 32 + u64::from(non_finite.trailing_zeros());
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        ptx::add_to_counter(&raw mut (*report).nan, u64::from(nan));
        ptx::add_to_counter(&raw mut (*report).infinite, u64::from(non_finite.count_ones() - nan));
        ptx::raise_counter(&raw mut (*report).first_non_finite, !first);
    }
}
