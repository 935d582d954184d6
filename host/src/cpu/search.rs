//! Quantizing with searched scales.
//!
//! A [`ScaleSearch`] finds the scale of a block. [`ReferenceSearch`] is
//! `microscale_formats::search`, [`VectorSearch`] computes the same for sixteen blocks at a time,
//! and `Hessians` weighs errors by a layer's Hessian.

pub(super) mod hessian;
mod vectors;

use microscale_formats::nvfp4::{Quantizer, Scaling};
use microscale_formats::search::{Block, Found, Measure, PowersOfTwo, Scales};
use microscale_formats::{BlockEvents, E2m1, NegativeZero, Search, Ties, block, mx, nvfp4};

use crate::cpu::blocks::format::{BlockFormat, Mx};
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::slow_path::{self, block_at};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::{AWAY, EVEN, Mxfp4, Nvfp4, VectorizedFormat, ZERO};
use crate::cpu::rounding::params::{FormatParams, QuantizeParams, SearchParams};
use crate::cpu::simd::{LANES, Portable, Scalars, Vector};
use crate::element::Element;

/// A search for the scales of a run's blocks.
pub(super) trait ScaleSearch<const N: usize> {
    /// Finds the scale of block `i`.
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        format: &impl VectorizedFormat<N>,
        candidates: &impl Scales,
        start: SearchStart,
    ) -> Found;

    /// Finds the scales of blocks `first .. first + starts.len()`. Later entries are undefined.
    #[inline(always)]
    fn find_group<T: Element>(
        &self,
        first: usize,
        wide: &[[f32; N]; LANES],
        format: &impl VectorizedFormat<N>,
        candidates: &impl Scales,
        starts: &[SearchStart],
    ) -> [Found; LANES] {
        let mut all = [Found { byte: 0, tried: 0 }; LANES];
        for (i, start) in starts.iter().enumerate() {
            all[i] = self.find::<T>(first + i, &wide[i], format, candidates, *start);
        }
        all
    }
}

/// The starting point of the search for a block's scale.
#[derive(Clone, Copy, Default)]
pub(super) struct SearchStart {
    pub(super) search: Search,
    /// The bits of the block's amax, which is finite.
    pub(super) amax_bits: u32,
    /// The scale byte of plain rounding.
    pub(super) plain: u8,
    /// The scale byte of plain rounding for 1.5 times the amax.
    pub(super) larger: u8,
    /// True if the block got the NaN scale. It is not searched.
    nan_block: bool,
}

/// The reference search by squared errors, one block at a time.
///
/// It has the importance of each element of the run, if elements differ in importance.
struct ReferenceSearch<'a>(Option<&'a [f32]>);

impl ReferenceSearch<'_> {
    /// The importance of the elements of block `i`.
    #[inline(always)]
    fn of<const N: usize>(&self, i: usize) -> Option<[f32; N]> {
        self.0.map(|importance| {
            let mut padded = [0.0; N];
            *block_at(importance, i, &mut padded)
        })
    }
}

impl<const N: usize> ScaleSearch<N> for ReferenceSearch<'_> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        _: &impl VectorizedFormat<N>,
        candidates: &impl Scales,
        SearchStart { search, plain, larger, .. }: SearchStart,
    ) -> Found {
        Block::new(wide, self.of(i)).search::<Scalars, _>(search, candidates, plain, larger)
    }
}

/// The search by squared errors, sixteen blocks at a time.
struct VectorSearch<'a, V>(ReferenceSearch<'a>, V);

impl<const N: usize, V: Vector> ScaleSearch<N> for VectorSearch<'_, V> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        format: &impl VectorizedFormat<N>,
        candidates: &impl Scales,
        start: SearchStart,
    ) -> Found {
        self.0.find::<T>(i, wide, format, candidates, start)
    }

    #[inline(always)]
    fn find_group<T: Element>(
        &self,
        first: usize,
        wide: &[[f32; N]; LANES],
        _: &impl VectorizedFormat<N>,
        candidates: &impl Scales,
        starts: &[SearchStart],
    ) -> [Found; LANES] {
        // Lanes past the end repeat the last block.
        let last = starts.len() - 1;
        let (mut plain, mut larger) = ([0; LANES], [0; LANES]);
        for (lane, (plain, larger)) in plain.iter_mut().zip(&mut larger).enumerate() {
            let start = &starts[lane.min(last)];
            (*plain, *larger) = (start.plain, start.larger);
        }
        let mut importance = [[0.0; LANES]; N];
        for lane in 0..LANES {
            let Some(of_block) = self.0.of::<N>(first + lane.min(last)) else { break };
            for (importance, weight) in importance.iter_mut().zip(of_block) {
                importance[lane] = weight;
            }
        }
        let importance = self.0.0.map(|_| &importance);
        vectors::search(self.1, wide, importance, starts[0].search, candidates, &plain, &larger)
    }
}

/// Quantizes a run by the reference. `importance` has one weight per element.
pub(super) fn quantize_reference<T: Element>(
    values: &[T],
    importance: Option<&[f32]>,
    params: &QuantizeParams,
    searching: &SearchParams,
    output: Output<'_>,
) -> Tally {
    quantize_with::<T, Portable>(Portable, values, &ReferenceSearch(importance), params, searching, output)
}

/// Quantizes a run. `importance` has one weight per element.
#[inline(always)]
pub(super) fn quantize<T: Element, V: Vector>(
    simd: V,
    values: &[T],
    importance: Option<&[f32]>,
    params: &QuantizeParams,
    searching: &SearchParams,
    output: Output<'_>,
) -> Tally {
    quantize_with(simd, values, &VectorSearch(ReferenceSearch(importance), simd), params, searching, output)
}

/// Quantizes a run with the scales that `finder` finds.
#[inline(always)]
pub(super) fn quantize_with<T: Element, V: Vector>(
    simd: V,
    values: &[T],
    finder: &(impl ScaleSearch<{ mx::BLOCK }> + ScaleSearch<{ nvfp4::BLOCK }>),
    params: &QuantizeParams,
    searching: &SearchParams,
    output: Output<'_>,
) -> Tally {
    let mut run = Run { values, finder, params, searching, output };
    match &params.format {
        FormatParams::Mxfp4(mx) => run.blocks(simd, &AnyMxfp4(*mx), &PowersOfTwo),
        FormatParams::Nvfp4(quantizer, _) => run.blocks(simd, &AnyNvfp4(*quantizer), &searching.factors),
        // `Recipe::check` refuses searches for these formats.
        FormatParams::Mxfp8E4m3(_) | FormatParams::Mxfp8E5m2(_) => Tally::default(),
    }
}

/// MXFP4 with any rule of ties.
///
/// Plain rounding is compiled for each rule. Here the rule is a branch per block, so that the
/// search is compiled once.
pub(super) struct AnyMxfp4(pub(super) Mx<E2m1>);

impl BlockFormat<{ mx::BLOCK }> for AnyMxfp4 {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(&self.0, values, codes)
    }
}

impl VectorizedFormat<{ mx::BLOCK }> for AnyMxfp4 {
    type Scaling = f32;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, f32, BlockEvents) {
        VectorizedFormat::scale::<T>(&self.0, amax_bits)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (f32, BlockEvents) {
        VectorizedFormat::rescale::<T>(&self.0, amax_bits, byte)
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; mx::BLOCK], reciprocal: f32, codes: &mut [u8]) {
        let mx = self.0;
        match (mx.arithmetic.ties, mx.arithmetic.negative_zero == NegativeZero::Keep) {
            (Ties::Even, true) => Mxfp4::<EVEN, true>(mx).encode(wide, reciprocal, codes),
            (Ties::Even, false) => Mxfp4::<EVEN, false>(mx).encode(wide, reciprocal, codes),
            (Ties::Away, true) => Mxfp4::<AWAY, true>(mx).encode(wide, reciprocal, codes),
            (Ties::Away, false) => Mxfp4::<AWAY, false>(mx).encode(wide, reciprocal, codes),
            (Ties::Zero, true) => Mxfp4::<ZERO, true>(mx).encode(wide, reciprocal, codes),
            (Ties::Zero, false) => Mxfp4::<ZERO, false>(mx).encode(wide, reciprocal, codes),
        }
    }
}

/// NVFP4 with any rule for −0, see [`AnyMxfp4`].
pub(super) struct AnyNvfp4(pub(super) Quantizer);

impl BlockFormat<{ nvfp4::BLOCK }> for AnyNvfp4 {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(&self.0, values, codes)
    }
}

impl VectorizedFormat<{ nvfp4::BLOCK }> for AnyNvfp4 {
    type Scaling = Scaling;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, Scaling, BlockEvents) {
        Nvfp4::<true>(self.0).scale::<T>(amax_bits)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (Scaling, BlockEvents) {
        Nvfp4::<true>(self.0).rescale::<T>(amax_bits, byte)
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; nvfp4::BLOCK], scaling: Scaling, codes: &mut [u8]) {
        match self.0.negative_zero() {
            NegativeZero::Keep => Nvfp4::<true>(self.0).encode(wide, scaling, codes),
            _ => Nvfp4::<false>(self.0).encode(wide, scaling, codes),
        }
    }
}

/// A run of blocks, with its search and its output.
struct Run<'a, T, F> {
    values: &'a [T],
    finder: &'a F,
    params: &'a QuantizeParams,
    searching: &'a SearchParams,
    output: Output<'a>,
}

impl<T: Element, F> Run<'_, T, F> {
    #[inline(always)]
    fn blocks<V: Vector, B: VectorizedFormat<N>, S: Scales, const N: usize>(
        &mut self,
        simd: V,
        format: &B,
        candidates: &S,
    ) -> Tally
    where
        F: ScaleSearch<N>,
    {
        let mut tally = Tally::default();
        let block_bytes = self.output.block_bytes();
        let unset = (format.scale::<T>(0).1, BlockEvents::default());
        let Output { codes, scales } = &mut self.output;
        let groups = codes.chunks_mut(block_bytes * LANES).zip(scales.chunks_mut(LANES));
        for (number, (codes, scales)) in groups.enumerate() {
            let first = number * LANES;
            let mut wide = [[0.0; N]; LANES];
            let mut starts = [SearchStart::default(); LANES];
            let mut chosen = [unset; LANES];
            for i in 0..scales.len() {
                let mut padded = [T::default(); N];
                wide[i] = simd.widen_block(block_at(self.values, first + i, &mut padded));
                let mut amax = block::amax_bits(&wide[i]);
                if block::is_non_finite(amax) {
                    let offset = (first + i) * N;
                    wide[i] = slow_path::replace_non_finite::<T, N>(
                        wide[i],
                        offset,
                        self.params.non_finite,
                        &mut tally,
                    );
                    amax = block::amax_bits(&wide[i]);
                    if block::is_non_finite(amax) {
                        let (scale, _) = format
                            .quantize_block::<T>(&wide[i], &mut codes[i * block_bytes..][..block_bytes]);
                        scales[i] = scale;
                        starts[i].nan_block = true;
                        // The search still visits this lane; its result is ignored.
                        wide[i] = [0.0; N];
                        amax = 0;
                    }
                }
                let (plain, scaling, events) = format.scale::<T>(amax);
                let larger = match self.searching.search {
                    Search::FourSix => format.scale::<T>((f32::from_bits(amax) * 1.5).to_bits()).0,
                    _ => plain,
                };
                chosen[i] = (scaling, events);
                starts[i] = SearchStart {
                    search: self.searching.search,
                    amax_bits: amax,
                    plain,
                    larger,
                    nan_block: starts[i].nan_block,
                };
            }
            let starts = &starts[..scales.len()];
            let found = self.finder.find_group::<T>(first, &wide, format, candidates, starts);
            let blocks = codes.chunks_exact_mut(block_bytes).zip(scales);
            for (i, ((codes, scale), start)) in
                blocks.zip(starts).enumerate().filter(|(_, (_, start))| !start.nan_block)
            {
                let (mut scaling, mut events) = chosen[i];
                if found[i].byte != start.plain {
                    let scale_saturated = events.scale_saturated;
                    (scaling, events) = format.rescale::<T>(start.amax_bits, found[i].byte);
                    events = BlockEvents { scale_saturated, ..events };
                }
                tally.add(events);
                tally.add_search(found[i], start.plain);
                format.encode(&wide[i], scaling, codes);
                *scale = found[i].byte;
            }
        }
        tally
    }
}
