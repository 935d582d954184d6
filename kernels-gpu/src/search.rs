//! Quantization with searched block scales (`microscale_formats::search`): a lane sixteen elements, a block of NVFP4 or half of one of
//! the MX formats.
//!
//! Each lane goes through the scales that its block may take; the warp goes on until the last is done. A candidate costs two shuffles, and
//! each of its elements six instructions. A warp with a block that is not usual does its blocks over again, one after another, each by the
//! whole warp: slowly, but without a register's cost to the others.

use core::hint::cold_path;
use core::marker::PhantomData;

use microscale_formats::arithmetic::Fused;
use microscale_formats::search::{
    self, CHAINED, CHAINS, Candidate, Measure, REACH, Search, add_term, last_to_try,
};
use microscale_formats::{BlockEvents, E2m1, NegativeZero};
use microscale_kernels_abi::{
    BlockGrid, GlobalSlot, NvQuantizeOptions, QuantizeOptions, REPORT_SLOTS, ReportSlot, SEARCH_EACH,
    ScaleGrid, THREADS, WARP,
};

use crate::access::{self, Scales as ScalePlaces};
use crate::by_block::{self, OfWarp};
use crate::dtype::{self, Bf16, Chunk, Dtype, F16, F32};
use crate::format::{Blocks, Mx, Nv, Plain, Searched};
use crate::quantize::Target;
use crate::{ptx, warp};

/// The GPU's own instructions.
pub(crate) struct Ptx;

impl Fused for Ptx {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        ptx::fma_f32(a, b, c)
    }

    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        a.min(b)
    }
}

/// How to search.
#[derive(Clone, Copy)]
struct SearchOptions {
    /// Weights by column, or null.
    importance: *const f32,
    /// [`Search`] as a number.
    search: u32,
}

impl SearchOptions {
    /// The search; a kernel is not launched without one.
    #[inline(always)]
    fn search(&self) -> Search {
        const FOUR_SIX: u32 = Search::FourSix as u32;
        const WINDOW: u32 = Search::Window as u32;
        match self.search {
            FOUR_SIX => Search::FourSix,
            WINDOW => Search::Window,
            _ => Search::Full,
        }
    }
}

/// What happened in blocks that did not get the NaN scale.
#[derive(Clone, Copy, Default)]
struct Counts {
    clipped: u32,
    flushed: u32,
    scale_saturated: u32,
    rescaled: u32,
    tried: u32,
}

impl Counts {
    /// Adds a block.
    #[inline(always)]
    fn add(&mut self, events: BlockEvents, changed: bool, tried: u32) {
        self.clipped += u32::from(events.clipped);
        self.flushed += u32::from(events.flushed);
        self.scale_saturated += u32::from(events.scale_saturated);
        self.rescaled += u32::from(changed);
        self.tried += tried;
    }

    /// Those of a warp, of which some lanes have one block each. All lanes of the warp take part.
    #[inline(always)]
    fn of_lanes(counted: bool, events: BlockEvents, changed: bool, tried: u32) -> Self {
        let count = |happened: bool| warp::ballot(counted && happened).count_ones();
        let mut all_tried = if counted { tried } else { 0 };
        let mut distance = 1;
        while distance < WARP {
            all_tried += warp::shuffle_xor(all_tried, distance);
            distance *= 2;
        }
        Self {
            clipped: count(events.clipped),
            flushed: count(events.flushed),
            scale_saturated: count(events.scale_saturated),
            rescaled: count(changed),
            tried: all_tried,
        }
    }
}

/// Elements that a lane has.
const EACH: usize = SEARCH_EACH as usize;
const _: () = assert!(EACH == CHAINED);

/// An array of something for each number. Written out, lest a loop or a call leave arrays in memory.
macro_rules! each {
    (4, $i:ident => $value:expr) => {
        each!([0, 1, 2, 3], $i => $value)
    };
    (16, $i:ident => $value:expr) => {
        each!([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], $i => $value)
    };
    ([$($number:literal),+], $i:ident => $value:expr) => {
        [$({ let $i: usize = $number; $value }),+]
    };
}

/// Lanes that share a block.
const fn lanes<F: Blocks>() -> u32 {
    F::BLOCK / SEARCH_EACH
}

/// Chunks that a lane has.
const fn chunks<D: Dtype>() -> u32 {
    SEARCH_EACH / D::CHUNK
}

/// The largest of a block's lanes' numbers, in all of them.
#[inline(always)]
fn most<F: Blocks>(number: u32) -> u32 {
    if const { lanes::<F>() } == 2 { number.max(warp::shuffle_xor(number, 1)) } else { number }
}

/// What a lane searches a block's scale with: [`Measure`], for all blocks of a warp at a time, with a unit of 1. All lanes of the warp
/// take part in everything.
struct Lane<F> {
    /// [`Searched::candidates_of_lanes`].
    of_lane: (f32, f32),
    /// Magnitudes.
    a: [f32; EACH],
    /// The block's.
    amax: f32,
    format: PhantomData<F>,
}

/// Where the weights of a lane's elements lie: sixteen, on 16 bytes. They are loaded whenever they are needed, lest they take the registers
/// of searches without weights.
#[derive(Clone, Copy)]
struct Weights(*const f32);

impl Weights {
    /// Four of them.
    #[inline(always)]
    fn four(self, first: usize) -> [f32; 4] {
        // SAFETY: `usual` has seen that all sixteen are in global memory, and nothing writes them during the kernel.
        unsafe { ptx::load_16_here(self.0.add(first).cast()).map(f32::from_bits) }
    }
}

impl<F: Searched> Lane<F> {
    /// A scale's candidate.
    #[inline(always)]
    fn candidate(&self, byte: u32) -> Candidate {
        let (factor, inverse) = F::candidate(self.of_lane, byte);
        Candidate::with_inverse::<Ptx>(factor, inverse)
    }

    /// The error of a scale.
    #[inline(always)]
    fn error(&self, byte: u32, weights: Option<Weights>) -> f32 {
        let candidate = self.candidate(byte);
        let mut chains = [0.0; CHAINS];
        chains = self.add_four(0, chains, &candidate, weights);
        chains = self.add_four(4, chains, &candidate, weights);
        chains = self.add_four(8, chains, &candidate, weights);
        chains = self.add_four(12, chains, &candidate, weights);
        let sum = search::sum_of_chains::<Ptx>(chains);
        if const { lanes::<F>() } == 2 {
            return sum + f32::from_bits(warp::shuffle_xor(sum.to_bits(), 1));
        }
        sum
    }

    /// Adds the terms of four elements to the chains.
    #[inline(always)]
    fn add_four(
        &self,
        first: usize,
        chains: [f32; CHAINS],
        candidate: &Candidate,
        weights: Option<Weights>,
    ) -> [f32; CHAINS] {
        let four = weights.map(|weights| weights.four(first));
        each!(4, i => {
            let a = self.a[first + i];
            match four {
                Some(weights) => {
                    add_term::<Ptx>(candidate.rest::<Ptx, false>(a, a * a), Some(weights[i]), chains[i])
                }
                None => add_term::<Ptx>(candidate.rest::<Ptx, true>(a, a * a), None, chains[i]),
            }
        })
    }

    /// The largest of the bits of four elements' [`Measure::most_clipped`].
    #[inline(always)]
    fn clipped_of_four(&self, first: usize, candidate: &Candidate, weights: Weights) -> u32 {
        let weights = weights.four(first);
        let [a, b, c, d] = each!(4, i => {
            add_term::<Ptx>(candidate.clipped::<Ptx>(self.a[first + i]), Some(weights[i]), 0.0).to_bits()
        });
        a.max(b).max(c.max(d))
    }

    /// [`Measure::most_clipped`].
    #[inline(always)]
    fn most_clipped(&self, candidate: &Candidate, weights: Option<Weights>) -> f32 {
        let Some(weights) = weights else {
            return add_term::<Ptx>(candidate.clipped::<Ptx>(self.amax), None, 0.0);
        };
        // Not negative, so their bits order as they do.
        let low =
            self.clipped_of_four(0, candidate, weights).max(self.clipped_of_four(4, candidate, weights));
        let high =
            self.clipped_of_four(8, candidate, weights).max(self.clipped_of_four(12, candidate, weights));
        f32::from_bits(most::<F>(low.max(high)))
    }

    /// Whether clipping alone does not make a scale's error larger than the plain one's.
    #[inline(always)]
    fn may_win(&self, byte: u32, plain_error: f32, weights: Option<Weights>) -> bool {
        self.most_clipped(&self.candidate(byte), weights) <= plain_error
    }

    /// [`Measure::bounds`]. A first byte that has no usual candidate may be too large.
    #[inline(always)]
    fn bounds(&self, plain_error: f32, near_least: u32, weights: Option<Weights>) -> (u32, u32) {
        let reaches = REACH * self.candidate(near_least).factor >= self.amax;
        let least = near_least + u32::from(!reaches);
        let mut first = least;
        let mut lower = true;
        while warp::ballot(lower) != 0 {
            // Two steps at a time; where the first is one too many, so is the second.
            let one = self.may_win(first.saturating_sub(1), plain_error, weights);
            let two = self.may_win(first.saturating_sub(2), plain_error, weights);
            first -= u32::from(lower && one && first > F::LAST_UNUSUAL);
            lower &= one && two && first > F::LAST_UNUSUAL;
            first -= u32::from(lower);
        }
        (first, u32::from(last_to_try::<F>(least as u8)))
    }

    /// [`Measure::search`]: the byte of the scale that is chosen, and how many were tried. `None`, in all lanes, if a block may take
    /// a scale that has no [usual candidate](Searched::LAST_UNUSUAL) or is limited, or without weights an element is not
    /// [near](search::NEAR).
    #[inline(always)]
    fn search(
        &self,
        search: Search,
        plain: u32,
        near_least: u32,
        larger: u32,
        weights: Option<Weights>,
    ) -> Option<(u32, u32)> {
        let plain_error = self.error(plain, weights);
        let (mut byte, mut last) = (larger, larger);
        if !matches!(search, Search::FourSix) {
            (byte, last) = self.bounds(plain_error, near_least, weights);
            if matches!(search, Search::Window) {
                let (low, high) = search::window::<F>(plain as u8);
                (byte, last) = (byte.max(u32::from(low)), last.min(u32::from(high)));
            }
            let factor = self.candidate(byte).factor;
            // Weights may lead to scales so small that the definition limits them, or the one below, which the bounds have looked at.
            let limited = search::limited(0.5 * factor, 1.0) != 0.5 * factor;
            let far = if weights.is_none() { self.amax > search::NEAR * factor } else { limited };
            if warp::ballot(byte <= F::LAST_UNUSUAL || far) != 0 {
                cold_path();
                return None;
            }
        }
        let (mut best, mut least, mut tried) = (plain, plain_error, 1);
        byte += u32::from(byte == plain);
        while warp::ballot(byte <= last) != 0 {
            let error = self.error(byte, weights);
            if byte <= last {
                tried += 1;
                if error < least {
                    (best, least) = (byte, error);
                }
            }
            byte += 1;
            byte += u32::from(byte == plain);
        }
        Some((best, tried))
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
    let at_once = const { WARP / lanes::<F>() };
    let vector = (values.addr() as u64 | grid.row_stride * u64::from(D::BYTES)).is_multiple_of(16);
    let first = u64::from(warp_number) * u64::from(at_once);
    if first >= grid.blocks {
        return; // The whole warp.
    }
    let share = Share::<F> {
        grid: &grid,
        block: first + u64::from(warp::lane() / const { lanes::<F>() }),
        format: PhantomData,
    };
    // SAFETY: the same contract; all lanes are here.
    let done = unsafe {
        let count = const { chunks::<D>() };
        let chunks =
            access::load_of_block::<D, F>(values, &grid, vector, share.block, share.first_element(), count);
        usual::<D, F>(format, chunks, &share, target, report, &options)
    };
    if !done {
        cold_path();
        let mut counts = Counts::default();
        // A number that the compiler does not know, lest it unroll the loop.
        for block in first..grid.blocks.min(first + u64::from(ptx::opaque(at_once))) {
            // SAFETY: the same contract; the block exists.
            unsafe {
                of_warp::<D, F>(format, values, target, report, &grid, block, &options, &mut counts);
            }
        }
        if warp::lane() == 0 {
            // SAFETY: the report slot is the caller's promise.
            unsafe { add_to_report(&counts, report) };
        }
    }
}

/// A lane's part of a block.
struct Share<'a, F> {
    grid: &'a BlockGrid,
    block: u64,
    format: PhantomData<F>,
}

impl<F: Blocks> Share<'_, F> {
    #[inline(always)]
    fn exists(&self) -> bool {
        self.block < self.grid.blocks
    }

    /// The lane's number within those of the block.
    #[inline(always)]
    fn part(&self) -> u32 {
        warp::lane() % const { lanes::<F>() }
    }

    /// Its first element's number in the block.
    #[inline(always)]
    fn first_element(&self) -> u32 {
        self.part() * SEARCH_EACH
    }
}

/// Where the weights of a block's elements lie from one on, of as many as columns, and how many there are.
#[inline(always)]
fn weights<F: Blocks>(weights: *const f32, grid: &BlockGrid, block: u64, element: u32) -> (*const f32, u32) {
    let (_, block_in_row) = grid.row_blocks.divide(block);
    let col = block_in_row * u64::from(F::BLOCK) + u64::from(element);
    let rest = grid.cols.saturating_sub(col).min(u64::from(F::BLOCK)) as u32;
    (weights.wrapping_add(col as usize), rest)
}

/// Quantizes the blocks whose elements the lanes hold, if all are usual; else it does nothing. Entered by the whole warp.
///
/// # Safety
/// The contract of the kernels below.
#[inline(always)]
unsafe fn usual<D: Dtype, F: Searched>(
    format: &F,
    mut chunks: [Chunk; 4],
    share: &Share<F>,
    target: Target,
    report: *mut ReportSlot,
    options: &SearchOptions,
) -> bool {
    let exists = share.exists();
    let amax_bits = amax::<D, F>(&chunks);
    let amax = f32::from_bits(amax_bits);
    let Plain { byte: plain, near_least, usual } = format.plain::<D>(amax_bits);
    if warp::ballot(exists && !(usual && search::is_near(amax_bits))) != 0 {
        return false;
    }
    let (plain, near_least) = (u32::from(plain), u32::from(near_least));
    let mut larger = plain;
    if matches!(options.search(), Search::FourSix) {
        larger = u32::from(format.plain::<D>((amax * 1.5).to_bits()).byte);
    }
    let lane = Lane::<F> {
        of_lane: format.candidates_of_lanes(),
        a: each!(16, i => D::widen(&chunks[i / D::CHUNK as usize], i as u32 % D::CHUNK).abs()),
        amax,
        format: PhantomData,
    };
    let found = if options.importance.is_null() {
        lane.search(options.search(), plain, near_least, larger, None)
    } else {
        cold_path();
        let first = share.first_element();
        let (start, count) = weights::<F>(options.importance, share.grid, share.block, first);
        if warp::ballot(exists && (count < SEARCH_EACH || !start.addr().is_multiple_of(16))) != 0 {
            return false;
        }
        // Lanes without a block read the first weights.
        let weights = Weights(if exists { start } else { options.importance });
        lane.search(options.search(), plain, near_least, larger, Some(weights))
    };
    let Some((byte, tried)) = found else { return false };
    let byte = byte as u8;

    let mut shortcut = format.has_shortcut::<D>();
    let mut under = format.usual_under::<D>(amax_bits, byte);
    if warp::ballot(exists && !under.in_range) != 0 {
        cold_path();
        shortcut = false;
        under = format.scale_under::<D>(amax_bits, byte);
        if warp::ballot(exists && !under.in_range) != 0 {
            return false;
        }
        if F::LIMITS && warp::ballot(under.events.clipped) != 0 {
            chunks = each!(4, k => F::limit::<D>(&chunks[k], under.factor));
        }
    }
    let zeros = format.negative_zero();
    if zeros == NegativeZero::DropInput as u32 {
        chunks = each!(4, k => chunks[k].map(D::drop_negative_zeros));
    } else if zeros == NegativeZero::Force as u32 {
        cold_path();
        chunks = each!(4, k => chunks[k].map(D::force_negative_zeros));
    }
    let mut codes = if shortcut {
        pack_chunks::<D>(each!(4, k => format.shortcut_encode::<D>(&chunks[k], under.factor[0])))
    } else {
        pack_chunks::<D>(each!(4, k => format.encode::<D>(&chunks[k], under.factor)))
    };
    if zeros == NegativeZero::Drop as u32 {
        cold_path();
        codes = codes.map(dtype::drop_negative_zero_codes);
    }
    if exists {
        let [low, high] = codes.map(u64::from);
        let place = share.block * u64::from(F::BYTES) + u64::from(share.part() * (SEARCH_EACH / 2));
        // SAFETY: eight code bytes, aligned as codes are, and one scale byte a block, each written by one lane.
        unsafe {
            *target.codes.add(place as usize).cast::<u64>() = high << 32 | low;
            if share.part() == 0 {
                *target.scales.add(ScalePlaces::new(target.scale_grid, share.block).offset(share.block)) =
                    byte;
            }
        }
    }
    let changed = u32::from(byte) != plain;
    let counts = Counts::of_lanes(exists && share.part() == 0, under.events, changed, tried);
    if warp::lane() == 0 {
        // SAFETY: the report slot is the caller's promise.
        unsafe { add_to_report(&counts, report) };
    }
    true
}

/// The bits of a block's amax, from its lanes' chunks.
#[inline(always)]
fn amax<D: Dtype, F: Blocks>(chunks: &[Chunk; 4]) -> u32 {
    let [a, b, c, d] = each!(4, k => {
        let [a, b, c, d] = chunks[k];
        D::max_magnitudes(D::max_magnitudes(a, b), D::max_magnitudes(c, d))
    });
    let mut word = D::max_magnitudes(a, b);
    if const { self::chunks::<D>() } == 4 {
        word = D::max_magnitudes(word, D::max_magnitudes(c, d));
    }
    most::<F>(D::magnitude_to_f32_bits(D::largest(word)))
}

/// The codes of a lane's chunks, the first in the lowest bits of the first word.
#[inline(always)]
fn pack_chunks<D: Dtype>(codes: [u64; 4]) -> [u32; 2] {
    let [a, b, c, d] = codes.map(|codes| codes as u32);
    // Above four codes are other bits.
    if D::CHUNK == 8 { [a, b] } else { [a & 0xFFFF | b << 16, c & 0xFFFF | d << 16] }
}

/// A block of which each lane has an element.
struct MeasuredOfWarp<F> {
    /// Its magnitude times the unit.
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
/// The contract of the kernels below; `block` exists, and `report` points to a report slot in global memory.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a kernel's whole state")]
unsafe fn of_warp<D: Dtype, F: Searched>(
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
        let (start, count) = weights::<F>(options.importance, grid, block, warp::lane());
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

/// Adds counts to the report. Entered by one lane.
///
/// # Safety
/// `report` points to a report slot in global memory.
#[inline(always)]
unsafe fn add_to_report(counts: &Counts, report: *mut ReportSlot) {
    let Counts { clipped, flushed, scale_saturated, rescaled, tried } = *counts;
    // SAFETY: fields of a report slot, which is touched by atomic operations only.
    unsafe {
        ptx::add_to_counter(&raw mut (*report).rescaled, u64::from(rescaled));
        ptx::add_to_counter(&raw mut (*report).tried, u64::from(tried));
        if clipped | flushed | scale_saturated != 0 {
            ptx::add_to_counter(&raw mut (*report).clipped, u64::from(clipped));
            ptx::add_to_counter(&raw mut (*report).flushed, u64::from(flushed));
            ptx::add_to_counter(&raw mut (*report).scale_saturated, u64::from(scale_saturated));
        }
    }
}

/// The MX formats' entry points: `name<dtype, ties>`.
macro_rules! mx_entries {
    ($($name:ident<$dtype:ty, $ties:literal>)+) => {$(
        /// Quantizes the matrix at `values` to packed codes and scale bytes, searching scales, and adding to the report.
        ///
        /// # Safety
        /// `grid` describes the matrix at `values`, which is aligned to its dtype and which nothing writes meanwhile; `codes` (aligned to 8) has
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
