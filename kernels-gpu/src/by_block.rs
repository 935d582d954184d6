//! The slow path: a block by a whole warp, one element per lane, with every option. It applies the
//! reference in `microscale_formats` directly.
//!
//! Kernels fall back to it for blocks with non-finite values and other rare cases.

use microscale_kernels_abi::{BlockGrid, ReportSlot};

use crate::access::{self, Scales, Target};
use crate::dtype::Dtype;
use crate::format::Format;
use crate::hardware::{ptx, warp};

/// A block with one element per lane. Lanes past the end of a shorter block have zeros.
pub(crate) struct OfWarp {
    /// The lane's element, finite.
    pub(crate) value: f32,
    /// The bits of the block's amax.
    pub(crate) amax_bits: u32,
    /// The block gets the NaN scale.
    pub(crate) nan_block: bool,
}

impl OfWarp {
    /// Loads a block, and counts and replaces non-finite values. The whole warp calls it.
    ///
    /// # Safety
    /// `values` as for the kernels of [`crate::quantize`]; `block` exists in the grid; `report`
    /// points to a report slot in global memory.
    #[inline(always)]
    pub(crate) unsafe fn load<D: Dtype, F: Format>(
        format: &F,
        values: *const u8,
        report: Option<*mut ReportSlot>,
        grid: &BlockGrid,
        block: u64,
    ) -> Self {
        let lane = warp::lane();
        let mut value = 0.0;
        if lane < F::BLOCK {
            // SAFETY: the block exists.
            value = f32::from_bits(unsafe { access::element::<D, F>(values, grid, block, lane) });
        }
        let non_finite = warp::ballot(!value.is_finite());
        if non_finite != 0 {
            if let Some(report) = report {
                let nan = warp::ballot(value.is_nan()).count_ones();
                let first = block * u64::from(F::BLOCK) + u64::from(non_finite.trailing_zeros());
                // SAFETY: `report` points to a report slot, by the contract.
                unsafe {
                    if lane == 0 {
                        count_non_finite(report, nan, non_finite, first);
                    }
                }
            }
            if format.saturates_non_finite() {
                value = if value.is_nan() { 0.0 } else { value.clamp(-D::MAX, D::MAX) };
            }
        }
        let nan_block = non_finite != 0 && !format.saturates_non_finite();
        let amax_bits = largest(value.to_bits() & 0x7FFF_FFFF);
        Self { value, amax_bits, nan_block }
    }

    /// Stores the block's scale byte, and its codes: one per lane.
    ///
    /// # Safety
    /// `target` as for the kernels of [`crate::quantize`]; `block` exists in the grid, and no other
    /// warp stores it.
    #[inline(always)]
    pub(crate) unsafe fn store<F: Format>(&self, target: Target, block: u64, scale: u8, code: u8) {
        let lane = warp::lane();
        let scale = if self.nan_block { F::NAN_SCALE } else { scale };
        let code = if self.nan_block { 0 } else { code };
        let across = warp::shuffle_xor(u32::from(code), 1) as u8;
        let start = block * u64::from(F::BYTES);
        // SAFETY: F::BYTES code bytes and one scale byte a block, each written by one lane.
        unsafe {
            if lane < F::BLOCK && F::BITS == 8 {
                *target.codes.add((start + u64::from(lane)) as usize) = code;
            } else if lane < F::BLOCK && lane % 2 == 0 {
                *target.codes.add((start + u64::from(lane / 2)) as usize) = code | across << 4;
            }
            if lane == 0 {
                *target.scales.add(Scales::new(target.scale_grid, block).offset(block)) = scale;
            }
        }
    }
}

/// The largest of the lanes' numbers, in all of them.
#[inline(always)]
pub(crate) fn largest(mut number: u32) -> u32 {
    // Not over an array of distances: it would lie in local memory.
    let mut distance = 16;
    while distance > 0 {
        number = number.max(warp::shuffle_xor(number, distance));
        distance /= 2;
    }
    number
}

/// Quantizes one block. Entered by the whole warp.
///
/// # Safety
/// `values` and `target` as for the kernels of [`crate::quantize`]; `block` exists in the grid;
/// `report` points to a report slot in global memory.
#[inline(always)]
pub(crate) unsafe fn quantize<D: Dtype, F: Format>(
    format: &F,
    values: *const u8,
    target: Target,
    report: Option<*mut ReportSlot>,
    grid: &BlockGrid,
    block: u64,
) {
    // SAFETY: the same contract.
    let of_warp = unsafe { OfWarp::load::<D, F>(format, values, report, grid, block) };
    let (scale, scaling, events) = format.define::<D>(of_warp.amax_bits);
    // SAFETY: the same contract.
    unsafe { of_warp.store::<F>(target, block, scale, format.code(of_warp.value, scaling)) };
    if let Some(report) = report.filter(|_| !of_warp.nan_block && warp::lane() == 0) {
        // SAFETY: `report` points to a report slot, by the contract.
        unsafe {
            ptx::add_to_counter(&raw mut (*report).clipped, u64::from(events.clipped));
            ptx::add_to_counter(&raw mut (*report).scale_saturated, u64::from(events.scale_saturated));
            ptx::add_to_counter(&raw mut (*report).flushed, u64::from(events.flushed));
        }
    }
}

/// Counts a block's non-finite elements, once: how many are NaN, which lanes have any, and the
/// number of the first.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
pub(crate) unsafe fn count_non_finite(report: *mut ReportSlot, nan: u32, non_finite: u32, first: u64) {
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        ptx::add_to_counter(&raw mut (*report).nan, u64::from(nan));
        ptx::add_to_counter(&raw mut (*report).infinite, u64::from(non_finite.count_ones() - nan));
        ptx::raise_counter(&raw mut (*report).first_non_finite, !first);
    }
}
