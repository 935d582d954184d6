//! Quantizing with searched scales: `microscale_formats::search`, a block at a time, with as many scales at once as there are lanes.

use microscale_formats::search::{Block, Fused, PowersOfTwo, Scales};
use microscale_formats::{BlockEvents, E2m1, NegativeZero, Search, Ties, block};

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
    let mut piece = Piece { values, weights, rule, searching, codes, scales };
    match &rule.kind {
        Kind::Mxfp4(mx) => {
            let keep = mx.arithmetic.negative_zero == NegativeZero::Keep;
            // The types that quantizing without a search chooses among.
            match (mx.arithmetic.ties, keep) {
                (Ties::Even, true) => piece.mxfp4::<W, EVEN, true, LANES>(*mx),
                (Ties::Even, false) => piece.mxfp4::<W, EVEN, false, LANES>(*mx),
                (Ties::Away, true) => piece.mxfp4::<W, AWAY, true, LANES>(*mx),
                (Ties::Away, false) => piece.mxfp4::<W, AWAY, false, LANES>(*mx),
                (Ties::Zero, true) => piece.mxfp4::<W, ZERO, true, LANES>(*mx),
                (Ties::Zero, false) => piece.mxfp4::<W, ZERO, false, LANES>(*mx),
            }
        }
        Kind::Nvfp4(quantizer) => match quantizer.negative_zero() == NegativeZero::Keep {
            true => piece.blocks::<W, _, _, _, LANES>(&Nvfp4::<true>(*quantizer), &searching.factors),
            false => piece.blocks::<W, _, _, _, LANES>(&Nvfp4::<false>(*quantizer), &searching.factors),
        },
        // A recipe with a search is refused for these.
        Kind::Mxfp8E4m3(_) | Kind::Mxfp8E5m2(_) => Tally::default(),
    }
}

/// Contiguous blocks, with where they go to.
struct Piece<'a, T> {
    values: &'a [T],
    weights: Option<&'a [f32]>,
    rule: &'a Rule,
    searching: &'a Searching,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<T: Element> Piece<'_, T> {
    #[inline(always)]
    fn mxfp4<W: Widen, const TIES: u8, const KEEP: bool, const LANES: usize>(
        &mut self,
        mx: Mx<E2m1>,
    ) -> Tally {
        self.blocks::<W, _, _, _, LANES>(&Mxfp4::<TIES, KEEP>(mx), &PowersOfTwo)
    }

    #[inline(always)]
    fn blocks<W: Widen, V: Vectorised<N>, S: Scales, const N: usize, const LANES: usize>(
        &mut self,
        format: &V,
        candidates: &S,
    ) -> Tally {
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
            let weights = self.weights.map(|weights| {
                let mut padded = [0.0; N];
                *block_at(weights, i, &mut padded)
            });
            let amax = block::amax_bits(&wide);
            let (plain, mut scaling, mut events) = format.scale::<T>(amax);
            let larger = match self.searching.search {
                Search::FourSix => format.scale::<T>((f32::from_bits(amax) * 1.5).to_bits()).0,
                _ => plain,
            };
            let found = Block::new(&wide, weights).search_by::<Hosts, _, LANES>(
                self.searching.search,
                candidates,
                plain,
                larger,
            );
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
