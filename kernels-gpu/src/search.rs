//! Quantization with searched block scales (`microscale_formats::search`): a lane eight elements, one by one, so that every layout and
//! option is the same to it.
//!
//! The lanes of a block all hold its amax, its bounds and the error of the scale that is being tried. They add it up in pairs, each
//! its own elements and then by shuffles: the order of the definition. Blocks of a warp try different scales at the same time, until the
//! last is done.

use core::hint::cold_path;

use microscale_formats::search::{self, Scales, Search, WINDOW};
use microscale_formats::{E2m1, block};
use microscale_kernels_abi::{
    BlockGrid, GlobalSlot, NvQuantizeOptions, QuantizeOptions, REPORT_SLOTS, ReportSlot, SEARCH_EACH,
    SEARCH_PIECES, ScaleGrid, THREADS, WARP,
};

use crate::access::{self, Scales as ScalePlaces};
use crate::dtype::{Bf16, Dtype, F16, F32};
use crate::format::{Blocks, Format, Mx, Nv};
use crate::quantize::Target;
use crate::{by_block, format, ptx, warp};

/// A format whose scales can be searched.
pub(crate) trait Searched: Format + Scales {}
impl Searched for Mx<E2m1, 0> {}
impl Searched for Mx<E2m1, 1> {}
impl Searched for Mx<E2m1, 2> {}
impl Searched for Nv {}

/// How to search.
#[derive(Clone, Copy)]
struct SearchOptions {
    /// Weights by column, or null.
    importance: *const f32,
    /// `Search` as a number.
    search: u32,
}

/// What a lane has counted so far.
#[derive(Clone, Copy, Default)]
struct Counts {
    clipped: u32,
    flushed: u32,
    scale_saturated: u32,
    rescaled: u32,
    tried: u32,
}

/// Elements that a lane has.
const EACH: usize = SEARCH_EACH as usize;

/// Their numbers. Arrays are gone through by `map`, which leaves no loop and so no array in memory.
const NUMBERS: [u32; EACH] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Small numbers, so many bits each, in a word.
#[inline(always)]
fn packed([a, b, c, d, e, f, g, h]: [u32; EACH], bits: u32) -> u32 {
    let pair = |low: u32, high: u32, bits: u32| low | high << bits;
    let low = pair(pair(a, b, bits), pair(c, d, bits), 2 * bits);
    pair(low, pair(pair(e, f, bits), pair(g, h, bits), 2 * bits), 4 * bits)
}

/// The largest of some numbers.
#[inline(always)]
fn largest([a, b, c, d, e, f, g, h]: [u32; EACH]) -> u32 {
    a.max(b).max(c.max(d)).max(e.max(f).max(g.max(h)))
}

/// Lanes that share a block.
const fn lanes<F: Blocks>() -> u32 {
    F::BLOCK / SEARCH_EACH
}

/// The largest of a block's lanes' numbers, in all of them.
#[inline(always)]
fn most<F: Blocks>(mut bits: u32) -> u32 {
    let mut distance = const { lanes::<F>() / 2 };
    while distance > 0 {
        bits = bits.max(warp::shuffle_xor(bits, distance));
        distance /= 2;
    }
    bits
}

/// The sum of the numbers of a block's lanes, in all of them: neighbours first.
#[inline(always)]
fn sum<F: Blocks>([a, b, c, d, e, f, g, h]: [f32; EACH]) -> f32 {
    let mut sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
    let mut distance = 1;
    while distance < const { lanes::<F>() } {
        sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), distance));
        distance *= 2;
    }
    sum
}

/// A lane's elements, and what the search knows of their block.
struct Lane<'a, F> {
    format: &'a F,
    /// Their magnitudes times the unit.
    a: [f32; EACH],
    weights: [f32; EACH],
    weighted: bool,
    unit: f32,
    /// The block's, times the unit.
    amax: f32,
}

impl<F: Searched> Lane<'_, F> {
    /// A scale's factor in units. Scales past the end are taken for the last one.
    #[inline(always)]
    fn factor(&self, byte: u32) -> f32 {
        search::unit_factor(self.format.factor(byte as u8), self.unit)
    }

    /// The error of a scale. All lanes of the warp take part.
    #[inline(always)]
    fn error(&self, byte: u32) -> f32 {
        let factor = self.factor(byte);
        let inverse = format::divide(1.0, factor);
        let mut terms = self.a.map(|a| search::term(a, factor, inverse));
        if self.weighted {
            terms = NUMBERS.map(|i| terms[i as usize] * self.weights[i as usize]);
        }
        sum::<F>(terms)
    }

    /// `search::Block::bounds`. All lanes of the warp take part.
    #[inline(always)]
    fn bounds(&self, plain_error: f32, plain: u32) -> (u32, u32) {
        let (lowest, highest) = (u32::from(F::FIRST), u32::from(F::LAST));
        let reaches = |byte: u32| 7.0 * self.factor(byte) >= self.amax;
        let mut least = plain.clamp(lowest, highest);
        while least > lowest && reaches(least - 1) {
            least -= 1;
        }
        while least < highest && !reaches(least) {
            least += 1;
        }
        let mut first = least;
        let mut lower = true;
        while warp::ballot(lower) != 0 {
            lower &= first > lowest;
            let factor = self.factor(if lower { first - 1 } else { first });
            let clipped = if self.weighted {
                let clipped = |i: u32| search::clipped(self.a[i as usize], factor) * self.weights[i as usize];
                // Not negative, so their bits order as they do.
                f32::from_bits(most::<F>(largest(NUMBERS.map(|i| clipped(i).to_bits()))))
            } else {
                search::clipped(self.amax, factor)
            };
            lower &= clipped <= plain_error;
            first -= u32::from(lower);
        }
        let octave = u32::from(F::OCTAVE);
        (first, (least + octave - 1).max(u32::from(F::UNHALVED) - 1).min(highest))
    }

    /// The byte of the scale that is chosen, and how many were tried. All lanes of the warp take part.
    #[inline(always)]
    fn search(&self, search: u32, plain: u32, larger: u32) -> (u32, u32) {
        let plain_error = self.error(plain);
        let (mut byte, last) = if search == Search::FourSix as u32 {
            (larger, larger)
        } else if search == Search::Window as u32 {
            let (below, above) = if F::OCTAVE == 1 { (1, 1) } else { WINDOW };
            let first = plain.saturating_sub(u32::from(below)).max(u32::from(F::FIRST));
            (first, (plain + u32::from(above)).min(u32::from(F::LAST)))
        } else {
            self.bounds(plain_error, plain)
        };
        // A block of zeros keeps its scale.
        let last = if self.amax == 0.0 { 0 } else { last };
        if self.amax == 0.0 {
            byte = 1;
        }
        let (mut best, mut least, mut tried) = (plain, plain_error, 1);
        while warp::ballot(byte <= last) != 0 {
            let error = self.error(byte.min(u32::from(F::LAST)));
            if byte <= last && byte != plain {
                tried += 1;
                if error < least {
                    (best, least) = (byte, error);
                }
            }
            byte += 1;
        }
        (best, tried)
    }
}

/// Quantizes a warp's blocks.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn quantize<D: Dtype, F: Searched>(
    format: &F,
    values: *const u8,
    target: Target,
    report: *mut ReportSlot,
    grid: BlockGrid,
    options: SearchOptions,
) {
    let warp_number = warp::thread_block() * (THREADS / WARP) + warp::thread() / WARP;
    // SAFETY: slots are REPORT_SLOTS in number.
    let report = unsafe { report.add(warp_number as usize % REPORT_SLOTS) };
    let blocks_at_once = u64::from(WARP / const { lanes::<F>() });
    let part = warp::lane() % const { lanes::<F>() };
    let mut counts = Counts::default();
    // A number that the compiler does not know, lest it unroll the loop.
    let pieces = ptx::opaque(SEARCH_PIECES);
    let mut piece = 0;
    while piece < pieces {
        let first = (u64::from(warp_number) * u64::from(SEARCH_PIECES) + u64::from(piece)) * blocks_at_once;
        if first >= grid.blocks {
            break; // The whole warp.
        }
        let block = first + u64::from(warp::lane() / const { lanes::<F>() });
        let exists = block < grid.blocks;
        let element = |i: u32| part * SEARCH_EACH + i;
        let of_lane = NUMBERS.map(|i| {
            // SAFETY: the block exists.
            let bits =
                if exists { unsafe { access::element::<D, F>(values, &grid, block, element(i)) } } else { 0 };
            f32::from_bits(bits)
        });
        let mut weights = [1.0; EACH];
        if !options.importance.is_null() {
            weights = NUMBERS.map(|i| {
                // SAFETY: the block exists, and there is a weight for each of its columns.
                if exists {
                    unsafe { importance::<F>(options.importance, &grid, block, element(i)) }
                } else {
                    0.0
                }
            });
        }
        // SAFETY: the same contract; all lanes are here.
        unsafe {
            one::<D, F>(format, of_lane, weights, block, exists, target, report, &options, &mut counts);
        }
        piece += 1;
    }
    // SAFETY: the report slot is the caller's promise.
    unsafe { count(counts, report) };
}

/// The weight of an element; 0 for padding.
///
/// # Safety
/// The block exists, and `weights` are as many as columns.
#[inline(always)]
unsafe fn importance<F: Blocks>(weights: *const f32, grid: &BlockGrid, block: u64, part: u32) -> f32 {
    let (_, block_in_row) = grid.row_blocks.divide(block);
    let col = block_in_row * u64::from(F::BLOCK) + u64::from(part);
    // SAFETY: the caller's promise.
    if col < grid.cols { unsafe { *weights.add(col as usize) } } else { 0.0 }
}

/// Quantizes the blocks whose elements the lanes hold. Entered by the whole warp.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a warp's whole state, taken out of a loop to be read")]
unsafe fn one<D: Dtype, F: Searched>(
    format: &F,
    mut values: [f32; EACH],
    weights: [f32; EACH],
    block: u64,
    exists: bool,
    target: Target,
    report: *mut ReportSlot,
    options: &SearchOptions,
    counts: &mut Counts,
) {
    let part = warp::lane() % const { lanes::<F>() };
    let mut nan_block = false;
    let magnitudes = |values: [f32; EACH]| values.map(|value| value.to_bits() & 0x7FFF_FFFF);
    let mut amax_bits = most::<F>(largest(magnitudes(values)));
    if warp::ballot(block::is_non_finite(amax_bits)) != 0 {
        cold_path();
        let non_finite = packed(values.map(|value| u32::from(!value.is_finite())), 1);
        let nan = packed(values.map(|value| u32::from(value.is_nan())), 1);
        // Each lane counts its own; of the block's positions the first wins.
        if non_finite != 0 {
            let first = part * SEARCH_EACH + non_finite.trailing_zeros();
            let first = block * u64::from(F::BLOCK) + u64::from(first);
            // SAFETY: the report slot is the caller's promise.
            unsafe { by_block::count_non_finite(report, nan.count_ones(), non_finite, first) };
        }
        nan_block = block::is_non_finite(amax_bits) && !format.saturates_non_finite();
        values = values.map(|value| {
            let finite = if value.is_nan() { 0.0 } else { value.clamp(-D::MAX, D::MAX) };
            let replaced = if format.saturates_non_finite() { finite } else { 0.0 };
            if value.is_finite() { value } else { replaced }
        });
        amax_bits = most::<F>(largest(magnitudes(values)));
    }

    let (plain, _, plain_events) = format.define::<D>(amax_bits);
    let mut larger = plain;
    if options.search == Search::FourSix as u32 {
        (larger, _, _) = format.define::<D>((f32::from_bits(amax_bits) * 1.5).to_bits());
    }
    let unit = search::unit(amax_bits);
    let lane = Lane {
        format,
        a: values.map(|value| f32::from_bits(value.to_bits() & 0x7FFF_FFFF) * unit),
        weights,
        weighted: !options.importance.is_null(),
        unit,
        amax: f32::from_bits(amax_bits) * unit,
    };
    let (byte, tried) = lane.search(options.search, u32::from(plain), u32::from(larger));
    let byte = byte as u8;
    let (scaling, events) = format.define_under::<D>(amax_bits, byte);
    let scale = if nan_block { F::NAN_SCALE } else { byte };
    let codes = packed(values.map(|value| u32::from(format.code(value, scaling))), 4);
    let codes = if nan_block { 0 } else { codes };
    if exists {
        // SAFETY: four code bytes, aligned as codes are, and one scale byte a block, each written by one lane.
        unsafe {
            let place = block * u64::from(F::BYTES) + u64::from(part * (SEARCH_EACH / 2));
            *target.codes.add(place as usize).cast::<u32>() = codes;
            if part == 0 {
                *target.scales.add(ScalePlaces::new(target.scale_grid, block).offset(block)) = scale;
            }
        }
    }
    let counted = part == 0 && exists && !nan_block;
    let changed = byte != plain;
    counts.clipped += u32::from(counted && if changed { events.clipped } else { plain_events.clipped });
    counts.flushed += u32::from(counted && if changed { events.flushed } else { plain_events.flushed });
    counts.scale_saturated += u32::from(counted && plain_events.scale_saturated);
    counts.rescaled += u32::from(counted && changed);
    counts.tried += if counted { tried } else { 0 };
}

/// Adds what the lanes have counted. Entered by the whole warp.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
unsafe fn count(counts: Counts, report: *mut ReportSlot) {
    let total = |mut count: u32| {
        let mut distance = 1;
        while distance < WARP {
            count += warp::shuffle_xor(count, distance);
            distance *= 2;
        }
        u64::from(count)
    };
    let [clipped, flushed, saturated, rescaled, tried] =
        [counts.clipped, counts.flushed, counts.scale_saturated, counts.rescaled, counts.tried].map(total);
    if warp::lane() != 0 {
        return;
    }
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        ptx::add_to_counter(&raw mut (*report).rescaled, rescaled);
        ptx::add_to_counter(&raw mut (*report).tried, tried);
        if clipped | flushed | saturated != 0 {
            ptx::add_to_counter(&raw mut (*report).clipped, clipped);
            ptx::add_to_counter(&raw mut (*report).flushed, flushed);
            ptx::add_to_counter(&raw mut (*report).scale_saturated, saturated);
        }
    }
}

/// The MX formats' entry points: `name<dtype, ties>`.
macro_rules! mx_entries {
    ($($name:ident<$dtype:ty, $ties:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, searching scales, and adding to the report.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype and which nothing writes meanwhile; `codes` (aligned to 4) has
        /// room for `grid.blocks` blocks, and `scales` for their bytes where `scale_grid` puts them; `report` points to
        /// `REPORT_SLOTS` slots; `importance` is null, or there is a weight for each of the grid's columns. All in global memory,
        /// and none overlap. The launch shape is the one that `microscale_kernels_abi` gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: QuantizeOptions,
            importance: *const f32,
            search: u32,
        ) {
            let format = Mx::<E2m1, $ties>::new(options);
            let target = Target { codes, scales, scale_grid };
            // SAFETY: the same contract.
            unsafe { quantize::<$dtype, _>(&format, values, target, report, grid, SearchOptions { importance, search }) }
        }
    )+};
}

mx_entries! {
    mxfp4_search_f32_even<F32, 0>
    mxfp4_search_f16_even<F16, 0>
    mxfp4_search_bf16_even<Bf16, 0>
    mxfp4_search_f32_away<F32, 1>
    mxfp4_search_f16_away<F16, 1>
    mxfp4_search_bf16_away<Bf16, 1>
    mxfp4_search_f32_zero<F32, 2>
    mxfp4_search_f16_zero<F16, 2>
    mxfp4_search_bf16_zero<Bf16, 2>
}

/// NVFP4's entry points: `name<dtype, plan from the slot>`.
macro_rules! nv_entries {
    ($($name:ident<$dtype:ty, $from_slot:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, searching scales, and adding to the report. The global scale
        /// is the one of the options or, in the `planned` variants, of the plan in the slot at `global`; it is written there.
        ///
        /// # Safety
        /// As for the MX formats; `global` points to a slot in global memory, whose scale only this kernel writes and whose other
        /// fields nothing writes meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name(
            values: *const u8,
            codes: *mut u8,
            scales: *mut u8,
            global: *mut GlobalSlot,
            report: *mut ReportSlot,
            grid: BlockGrid,
            scale_grid: ScaleGrid,
            options: NvQuantizeOptions,
            importance: *const f32,
            search: u32,
        ) {
            let target = Target { codes, scales, scale_grid };
            // SAFETY: nothing writes the plan during the kernel, and one thread the scale; the rest is the same contract.
            unsafe {
                let plan = if $from_slot { (*global).plan } else { options.plan };
                if warp::thread_block() == 0 && warp::thread() == 0 {
                    (*global).scale = plan.global_scale;
                }
                let format = Nv::new(plan, options.saturate_non_finite);
                quantize::<$dtype, _>(&format, values, target, report, grid, SearchOptions { importance, search });
            }
        }
    )+};
}

nv_entries! {
    nvfp4_search_f32_given<F32, false>
    nvfp4_search_f16_given<F16, false>
    nvfp4_search_bf16_given<Bf16, false>
    nvfp4_search_f32_planned<F32, true>
    nvfp4_search_f16_planned<F16, true>
    nvfp4_search_bf16_planned<Bf16, true>
}
