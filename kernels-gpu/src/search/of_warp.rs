//! A block whose elements the lanes of a warp have one each: searched by the reference, with every
//! option.

use core::marker::PhantomData;

use microscale_formats::BlockEvents;
use microscale_formats::arithmetic::Fused;
use microscale_formats::search::{self, CHAINS, Candidate, Measure, add_term};
use microscale_kernels_abi::search::SEARCH_EACH;
use microscale_kernels_abi::{BlockGrid, ReportSlot};

use super::options::{SearchOptions, importance};
use super::report::Counts;
use crate::access::Target;
use crate::arithmetic::Ptx;
use crate::by_block::{self, OfWarp};
use crate::dtype::Dtype;
use crate::format::{Blocks, Searched};
use crate::hardware::warp;

/// A block with one element per lane.
struct MeasuredOfWarp<F> {
    /// The element's magnitude times the unit.
    a: f32,
    weight: Option<f32>,
    unit: f32,
    amax: f32,
    format: PhantomData<F>,
}

impl<F: Blocks> Measure for MeasuredOfWarp<F> {
    #[inline(always)]
    fn unit(&self) -> f32 {
        self.unit
    }

    #[inline(always)]
    fn amax(&self) -> f32 {
        self.amax
    }

    #[inline(always)]
    fn error<M: Fused>(&self, factor: f32) -> f32 {
        let rest = Candidate::new::<M>(factor, self.unit).rest::<M, false>(self.a, self.a * self.a);
        let weighted = self.weight.map_or(rest, |weight| weight * rest);
        // Each lane adds up a chain of its half of the block.
        let first = warp::lane() & (F::BLOCK - 1) & !(SEARCH_EACH - 1) | warp::lane() % CHAINS as u32;
        let mut sum = 0.0;
        let mut i = 0;
        while i < SEARCH_EACH {
            let of = |rest: f32| f32::from_bits(warp::shuffle(rest.to_bits(), first + i));
            sum = M::fma(of(weighted), of(rest), sum);
            i += CHAINS as u32;
        }
        let across = |sum: f32, distance| sum + f32::from_bits(warp::shuffle_xor(sum.to_bits(), distance));
        sum = across(across(sum, 1), 2);
        if F::BLOCK > SEARCH_EACH { across(sum, SEARCH_EACH) } else { sum }
    }

    #[inline(always)]
    fn most_clipped<M: Fused>(&self, candidate: &Candidate) -> f32 {
        let of_lane = if self.weight.is_some() { self.a } else { self.amax };
        let term = add_term::<M>(candidate.clipped::<M>(of_lane), self.weight, 0.0);
        // Not negative, so their bits order as they do.
        f32::from_bits(by_block::largest(term.to_bits()))
    }
}

/// Quantizes one block, whatever it holds. Entered by the whole warp.
///
/// # Safety
/// The contract of the kernels of [`crate::search`]; `block` exists, and `report` points to a
/// report slot in global memory.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a kernel's whole state")]
pub(super) unsafe fn of_warp<D: Dtype, F: Searched>(
    format: &F,
    values: *const u8,
    target: Target,
    report: *mut ReportSlot,
    grid: &BlockGrid,
    block: u64,
    options: &SearchOptions,
    counts: &mut Counts,
) {
    // SAFETY: the same contract.
    let of_warp = unsafe { OfWarp::load::<D, F>(format, values, Some(report), grid, block) };
    let mut weight = None;
    if !options.importance.is_null() {
        let (start, count) = importance::<F>(options.importance, grid, block, warp::lane());
        let exists = warp::lane() < F::BLOCK && count > 0;
        // SAFETY: the column's.
        weight = Some(if exists { unsafe { *start } } else { 0.0 });
    }
    let unit = search::unit(of_warp.amax_bits);
    let measured = MeasuredOfWarp::<F> {
        a: f32::from_bits(of_warp.value.to_bits() & 0x7FFF_FFFF) * unit,
        weight,
        unit,
        amax: f32::from_bits(of_warp.amax_bits) * unit,
        format: PhantomData,
    };
    let (plain, _, plain_events) = format.define::<D>(of_warp.amax_bits);
    let (larger, _, _) = format.define::<D>((f32::from_bits(of_warp.amax_bits) * 1.5).to_bits());
    let found = measured.search::<Ptx, F>(options.search(), format, plain, larger);
    let (scaling, events) = format.define_under::<D>(of_warp.amax_bits, found.byte);
    // SAFETY: the same contract.
    unsafe { of_warp.store::<F>(target, block, found.byte, format.code(of_warp.value, scaling)) };
    if warp::lane() == 0 && !of_warp.nan_block {
        let changed = found.byte != plain;
        let events = BlockEvents { scale_saturated: plain_events.scale_saturated, ..events };
        counts.add(if changed { events } else { plain_events }, changed, found.tried);
    }
}
