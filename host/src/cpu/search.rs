//! Quantizing with searched scales, a block at a time. What finds a block's scale is a [`Find`]: [`Weighted`] is
//! `microscale_formats::search`, with as many scales at once as there are lanes, and `Hessians` is in its own file.

use microscale_formats::search::{Block, Found, Fused, PowersOfTwo, Scales};
use microscale_formats::{BlockEvents, E2m1, NegativeZero, Search, Ties, block, mx, nvfp4};

use super::lanes::{AWAY, EVEN, Mxfp4, Nvfp4, Vectorised, Widen, ZERO};
use super::policy::{self, Tally, block_at};
use super::rule::{Kind, Mx, Rule, Searching};
use crate::element::Element;

/// The processor's own instruction where the stamp has it.
struct Hosts;

impl Fused for Hosts {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// What finds the scale of a block of a piece.
pub(super) trait Find<const N: usize> {
    /// Finds that of block `i`.
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        format: &impl Vectorised<N>,
        candidates: &impl Scales,
        start: Start,
    ) -> Found;
}

/// What a search for a block's scale begins with.
#[derive(Clone, Copy)]
pub(super) struct Start {
    pub(super) search: Search,
    /// The block's, finite.
    pub(super) amax_bits: u32,
    /// The convention's byte.
    pub(super) plain: u8,
    /// What it would be for 1.5 times the amax.
    pub(super) larger: u8,
}

/// By squared errors, computing those of `LANES` scales together, with the weights of the piece's elements.
struct Weighted<'a, const LANES: usize>(Option<&'a [f32]>);

impl<const N: usize, const LANES: usize> Find<N> for Weighted<'_, LANES> {
    #[inline(always)]
    fn find<T: Element>(
        &self,
        i: usize,
        wide: &[f32; N],
        _: &impl Vectorised<N>,
        candidates: &impl Scales,
        Start { search, plain, larger, .. }: Start,
    ) -> Found {
        let weights = self.0.map(|weights| {
            let mut padded = [0.0; N];
            *block_at(weights, i, &mut padded)
        });
        Block::new(wide, weights).search_by::<Hosts, _, LANES>(search, candidates, plain, larger)
    }
}

/// Quantizes a piece, computing the errors of `LANES` scales together. `weights` are those of its elements.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen, const LANES: usize>(
    values: &[T],
    weights: Option<&[f32]>,
    rule: &Rule,
    searching: &Searching,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    quantize_finding::<T, W>(values, &Weighted::<LANES>(weights), rule, searching, codes, scales)
}

/// Quantizes a piece whose scales `finder` finds.
#[inline(always)]
pub(super) fn quantize_finding<T: Element, W: Widen>(
    values: &[T],
    finder: &(impl Find<{ mx::BLOCK }> + Find<{ nvfp4::BLOCK }>),
    rule: &Rule,
    searching: &Searching,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Tally {
    let mut piece = Piece { values, finder, rule, searching, codes, scales };
    match &rule.kind {
        Kind::Mxfp4(mx) => {
            let keep = mx.arithmetic.negative_zero == NegativeZero::Keep;
            // The types that quantizing without a search chooses among.
            match (mx.arithmetic.ties, keep) {
                (Ties::Even, true) => piece.mxfp4::<W, EVEN, true>(*mx),
                (Ties::Even, false) => piece.mxfp4::<W, EVEN, false>(*mx),
                (Ties::Away, true) => piece.mxfp4::<W, AWAY, true>(*mx),
                (Ties::Away, false) => piece.mxfp4::<W, AWAY, false>(*mx),
                (Ties::Zero, true) => piece.mxfp4::<W, ZERO, true>(*mx),
                (Ties::Zero, false) => piece.mxfp4::<W, ZERO, false>(*mx),
            }
        }
        Kind::Nvfp4(quantizer) => match quantizer.negative_zero() == NegativeZero::Keep {
            true => piece.blocks::<W, _, _, _>(&Nvfp4::<true>(*quantizer), &searching.factors),
            false => piece.blocks::<W, _, _, _>(&Nvfp4::<false>(*quantizer), &searching.factors),
        },
        // A recipe with a search is refused for these.
        Kind::Mxfp8E4m3(_) | Kind::Mxfp8E5m2(_) => Tally::default(),
    }
}

/// Contiguous blocks, with where they go to.
struct Piece<'a, T, F> {
    values: &'a [T],
    finder: &'a F,
    rule: &'a Rule,
    searching: &'a Searching,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<T: Element, F> Piece<'_, T, F> {
    #[inline(always)]
    fn mxfp4<W: Widen, const TIES: u8, const KEEP: bool>(&mut self, mx: Mx<E2m1>) -> Tally
    where
        F: Find<{ mx::BLOCK }>,
    {
        self.blocks::<W, _, _, _>(&Mxfp4::<TIES, KEEP>(mx), &PowersOfTwo)
    }

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
        let block_bytes = self.codes.len() / self.scales.len();
        let blocks = self.codes.chunks_exact_mut(block_bytes).zip(self.scales.iter_mut());
        for (i, (codes, scale)) in blocks.enumerate() {
            let mut padded = [T::default(); N];
            let mut wide = W::widen(block_at(self.values, i, &mut padded));
            if block::is_non_finite(block::amax_bits(&wide)) {
                wide = policy::replace_non_finite::<T, N>(wide, i * N, self.rule.non_finite, &mut tally);
                if block::is_non_finite(block::amax_bits(&wide)) {
                    (*scale, _) = format.quantize_block::<T>(&wide, codes);
                    continue;
                }
            }
            let amax = block::amax_bits(&wide);
            let (plain, mut scaling, mut events) = format.scale::<T>(amax);
            let larger = match self.searching.search {
                Search::FourSix => format.scale::<T>((f32::from_bits(amax) * 1.5).to_bits()).0,
                _ => plain,
            };
            let start = Start { search: self.searching.search, amax_bits: amax, plain, larger };
            let found = self.finder.find::<T>(i, &wide, format, candidates, start);
            if found.byte != plain {
                let scale_saturated = events.scale_saturated;
                (scaling, events) = format.rescale::<T>(amax, found.byte);
                events = BlockEvents { scale_saturated, ..events };
            }
            tally.add(events);
            tally.add_search(found, plain);
            format.encode(&wide, scaling, codes);
            *scale = found.byte;
        }
        tally
    }
}
