//! Quantizing with searched scales. A [`Find`] finds a block's scale: [`Weighted`] is
//! `microscale_formats::search`, [`WeightedLanes`] the same for several blocks at a time, and `Hessians` is
//! in its own file.

use std::marker::PhantomData;

use microscale_formats::nvfp4::{Quantizer, Scaling};
use microscale_formats::search::{Block, Found, Measure, PowersOfTwo, Scales};
use microscale_formats::{BlockEvents, E2m1, NegativeZero, Search, Ties, block, mx, nvfp4};

use super::blocks::{Blocks, Mx};
use super::lanes::{AWAY, EVEN, Mxfp4, Nvfp4, Vectorised, ZERO};
use super::piece::Output;
use super::policy::{self, Tally, block_at};
use super::rule::{Kind, Rule, Searching};
use super::search_lanes;
use super::vector::{LANES, Portable, Scalars, Vector};
use super::widen::{ByElement, Widen};
use crate::element::Element;

/// The search for the scale of a block of a piece.
pub(super) trait Find<const N: usize> {
    /// Finds the scale of block `i`.
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        format: &impl Vectorised<N>,
        candidates: &impl Scales,
        start: Start,
    ) -> Found;

    /// Finds the scales of some blocks from block `first` on; entries past them mean nothing.
    #[inline(always)]
    fn find_all<T: Element>(
        &self,
        first: usize,
        wide: &[[f32; N]; LANES],
        format: &impl Vectorised<N>,
        candidates: &impl Scales,
        starts: &[Start],
    ) -> [Found; LANES] {
        let mut all = [Found { byte: 0, tried: 0 }; LANES];
        for (i, start) in starts.iter().enumerate() {
            all[i] = self.find::<T>(first + i, &wide[i], format, candidates, *start);
        }
        all
    }
}

/// The start of a search for a block's scale.
#[derive(Clone, Copy, Default)]
pub(super) struct Start {
    pub(super) search: Search,
    /// The block's, finite.
    pub(super) amax_bits: u32,
    /// The convention's byte.
    pub(super) plain: u8,
    /// The convention's byte for 1.5 times the amax.
    pub(super) larger: u8,
    /// The block got the NaN scale: it is not searched.
    nan_block: bool,
}

/// The search by squared errors, with the importance of the piece's elements: a block at a time, by the
/// definition.
struct Weighted<'a>(Option<&'a [f32]>);

impl Weighted<'_> {
    /// The importance of the elements of block `i`.
    #[inline(always)]
    fn of<const N: usize>(&self, i: usize) -> Option<[f32; N]> {
        self.0.map(|importance| {
            let mut padded = [0.0; N];
            *block_at(importance, i, &mut padded)
        })
    }
}

impl<const N: usize> Find<N> for Weighted<'_> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        _: &impl Vectorised<N>,
        candidates: &impl Scales,
        Start { search, plain, larger, .. }: Start,
    ) -> Found {
        Block::new(wide, self.of(i)).search::<Scalars, _>(search, candidates, plain, larger)
    }
}

/// The same, several blocks at a time.
struct WeightedLanes<'a, V>(Weighted<'a>, PhantomData<V>);

impl<const N: usize, V: Vector> Find<N> for WeightedLanes<'_, V> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        format: &impl Vectorised<N>,
        candidates: &impl Scales,
        start: Start,
    ) -> Found {
        self.0.find::<T>(i, wide, format, candidates, start)
    }

    #[inline(always)]
    fn find_all<T: Element>(
        &self,
        first: usize,
        wide: &[[f32; N]; LANES],
        _: &impl Vectorised<N>,
        candidates: &impl Scales,
        starts: &[Start],
    ) -> [Found; LANES] {
        // Past the end the last once more.
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
        search_lanes::search::<V, N, _>(wide, importance, starts[0].search, candidates, &plain, &larger)
    }
}

/// Quantizes a piece by the definition. `importance` has a weight for each of its elements.
pub(super) fn quantize_by_definition<T: Element>(
    values: &[T],
    importance: Option<&[f32]>,
    rule: &Rule,
    searching: &Searching,
    output: Output<'_>,
) -> Tally {
    quantize_finding::<T, ByElement<Portable>>(values, &Weighted(importance), rule, searching, output)
}

/// Quantizes a piece. `importance` has a weight for each of its elements.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen>(
    values: &[T],
    importance: Option<&[f32]>,
    rule: &Rule,
    searching: &Searching,
    output: Output<'_>,
) -> Tally {
    quantize_finding::<T, W>(
        values,
        &WeightedLanes(Weighted(importance), PhantomData::<W::Vector>),
        rule,
        searching,
        output,
    )
}

/// Quantizes a piece whose scales `finder` finds.
#[inline(always)]
pub(super) fn quantize_finding<T: Element, W: Widen>(
    values: &[T],
    finder: &(impl Find<{ mx::BLOCK }> + Find<{ nvfp4::BLOCK }>),
    rule: &Rule,
    searching: &Searching,
    output: Output<'_>,
) -> Tally {
    let mut piece = Piece { values, finder, rule, searching, output };
    match &rule.kind {
        Kind::Mxfp4(mx) => piece.blocks::<W, _, _, _>(&AnyMxfp4(*mx), &PowersOfTwo),
        Kind::Nvfp4(quantizer, _) => piece.blocks::<W, _, _, _>(&AnyNvfp4(*quantizer), &searching.factors),
        // A recipe with a search is refused for these.
        Kind::Mxfp8E4m3(_) | Kind::Mxfp8E5m2(_) => Tally::default(),
    }
}

/// MXFP4 whatever its ties: what quantizing without a search knows by a type is asked for here once a block,
/// and so the search is not compiled for each.
struct AnyMxfp4(Mx<E2m1>);

impl Blocks<{ mx::BLOCK }> for AnyMxfp4 {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(&self.0, values, codes)
    }
}

impl Vectorised<{ mx::BLOCK }> for AnyMxfp4 {
    type Scaling = f32;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, f32, BlockEvents) {
        Vectorised::scale::<T>(&self.0, amax_bits)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (f32, BlockEvents) {
        Vectorised::rescale::<T>(&self.0, amax_bits, byte)
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

/// The same for NVFP4 and −0.
struct AnyNvfp4(Quantizer);

impl Blocks<{ nvfp4::BLOCK }> for AnyNvfp4 {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        Blocks::quantize_block::<T>(&self.0, values, codes)
    }
}

impl Vectorised<{ nvfp4::BLOCK }> for AnyNvfp4 {
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

/// Contiguous blocks, with where they go to.
struct Piece<'a, T, F> {
    values: &'a [T],
    finder: &'a F,
    rule: &'a Rule,
    searching: &'a Searching,
    output: Output<'a>,
}

impl<T: Element, F> Piece<'_, T, F> {
    #[inline(always)]
    fn blocks<W: Widen, V: Vectorised<N>, S: Scales, const N: usize>(
        &mut self,
        format: &V,
        candidates: &S,
    ) -> Tally
    where
        F: Find<N>,
    {
        let mut tally = Tally::default();
        let block_bytes = self.output.block_bytes();
        let unset = (format.scale::<T>(0).1, BlockEvents::default());
        let Output { codes, scales } = &mut self.output;
        let groups = codes.chunks_mut(block_bytes * LANES).zip(scales.chunks_mut(LANES));
        for (number, (codes, scales)) in groups.enumerate() {
            let first = number * LANES;
            let mut wide = [[0.0; N]; LANES];
            let mut starts = [Start::default(); LANES];
            let mut chosen = [unset; LANES];
            for i in 0..scales.len() {
                let mut padded = [T::default(); N];
                wide[i] = W::widen(block_at(self.values, first + i, &mut padded));
                let mut amax = block::amax_bits(&wide[i]);
                if block::is_non_finite(amax) {
                    let offset = (first + i) * N;
                    wide[i] =
                        policy::replace_non_finite::<T, N>(wide[i], offset, self.rule.non_finite, &mut tally);
                    amax = block::amax_bits(&wide[i]);
                    if block::is_non_finite(amax) {
                        let (scale, _) = format
                            .quantize_block::<T>(&wide[i], &mut codes[i * block_bytes..][..block_bytes]);
                        scales[i] = scale;
                        starts[i].nan_block = true;
                        // Searched with the others, for nothing.
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
                starts[i] = Start {
                    search: self.searching.search,
                    amax_bits: amax,
                    plain,
                    larger,
                    nan_block: starts[i].nan_block,
                };
            }
            let starts = &starts[..scales.len()];
            let found = self.finder.find_all::<T>(first, &wide, format, candidates, starts);
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
