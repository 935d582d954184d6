//! Plain rounding: the loop that a piece goes through, by its format and dtype.

use microscale_formats::nvfp4::{self, Quantizer};
use microscale_formats::{E2m1, NegativeZero, Ties, block, mx};

use super::blocks::Mx;
use super::groups;
use super::groups::grouped::{DROP, DROP_INPUT, FORCE, Grouped, KEEP};
use super::groups::mxfp4::MxGroups;
use super::groups::nvfp4::{NvFactors, NvGroups};
use super::lanes::{AWAY, EVEN, Mxfp4, Nvfp4, Vectorised, ZERO};
use super::piece::{Output, Piece};
use super::policy::{self, Tally, block_at};
use super::rule::{Kind, Rule};
use super::thresholds::Thresholds;
use super::vector::Vector;
use super::widen::Widen;
use crate::element::{Dtype, Element};

/// Quantizes a piece. What the loops must not ask for each element is a type here.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen>(values: &[T], rule: &Rule, output: Output<'_>) -> Tally {
    let mut piece = Piece { values, policy: rule.non_finite, output, tally: Tally::default() };
    match &rule.kind {
        Kind::Mxfp4(mx) => piece.mxfp4::<W>(*mx, &rule.thresholds),
        Kind::Mxfp8E4m3(mx) => piece.one_by_one::<W, _, _>(mx),
        Kind::Mxfp8E5m2(mx) => piece.one_by_one::<W, _, _>(mx),
        Kind::Nvfp4(quantizer, factors) => piece.nvfp4::<W>(quantizer, factors, &rule.thresholds),
    }
    piece.tally
}

impl<T: Element> Piece<'_, T> {
    #[inline(always)]
    fn mxfp4<W: Widen>(&mut self, mx: Mx<E2m1>, thresholds: &Thresholds) {
        const N: usize = mx::BLOCK;
        let groups = &MxGroups { mx, thresholds };
        let halfwords = T::DTYPE != Dtype::F32;
        let vectors = W::Vector::FUSED && mx.arithmetic.ties == Ties::Even;
        match (mx.arithmetic.ties, mx.arithmetic.negative_zero) {
            (_, NegativeZero::Keep) if halfwords || vectors => self.in_groups::<W, _, N, KEEP>(groups),
            (_, NegativeZero::DropInput) if halfwords || vectors => {
                self.in_groups::<W, _, N, DROP_INPUT>(groups)
            }
            (_, NegativeZero::Drop) if halfwords => self.in_groups::<W, _, N, DROP>(groups),
            (_, NegativeZero::Force) if halfwords => self.in_groups::<W, _, N, FORCE>(groups),
            (Ties::Even, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<EVEN, true>(mx)),
            (Ties::Even, _) => self.one_by_one::<W, _, _>(&Mxfp4::<EVEN, false>(mx)),
            (Ties::Away, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<AWAY, true>(mx)),
            (Ties::Away, _) => self.one_by_one::<W, _, _>(&Mxfp4::<AWAY, false>(mx)),
            (Ties::Zero, NegativeZero::Keep) => self.one_by_one::<W, _, _>(&Mxfp4::<ZERO, true>(mx)),
            (Ties::Zero, _) => self.one_by_one::<W, _, _>(&Mxfp4::<ZERO, false>(mx)),
        }
    }

    #[inline(always)]
    fn nvfp4<W: Widen>(&mut self, quantizer: &Quantizer, factors: &NvFactors, thresholds: &Thresholds) {
        const N: usize = nvfp4::BLOCK;
        let halfwords = T::DTYPE != Dtype::F32;
        let divided = &NvGroups::<true> { quantizer, factors, thresholds };
        let multiplied = &NvGroups::<false> { quantizer, factors, thresholds };
        // Halfwords are compared, however thresholds were found.
        match (quantizer.negative_zero(), factors.divides && !halfwords) {
            (NegativeZero::Keep, false) if halfwords => self.in_groups::<W, _, N, KEEP>(multiplied),
            (NegativeZero::DropInput, false) if halfwords => {
                self.in_groups::<W, _, N, DROP_INPUT>(multiplied)
            }
            (NegativeZero::Drop, false) if halfwords => self.in_groups::<W, _, N, DROP>(multiplied),
            (NegativeZero::Force, false) if halfwords => self.in_groups::<W, _, N, FORCE>(multiplied),
            (NegativeZero::Keep, true) if W::Vector::FUSED => self.in_groups::<W, _, N, KEEP>(divided),
            (NegativeZero::Keep, false) if W::Vector::FUSED => self.in_groups::<W, _, N, KEEP>(multiplied),
            (NegativeZero::DropInput, true) if W::Vector::FUSED => {
                self.in_groups::<W, _, N, DROP_INPUT>(divided);
            }
            (NegativeZero::DropInput, false) if W::Vector::FUSED => {
                self.in_groups::<W, _, N, DROP_INPUT>(multiplied);
            }
            (NegativeZero::Keep, _) => self.one_by_one::<W, _, _>(&Nvfp4::<true>(*quantizer)),
            _ => self.one_by_one::<W, _, _>(&Nvfp4::<false>(*quantizer)),
        }
    }

    #[inline(always)]
    fn in_groups<W: Widen, G: Grouped<N>, const N: usize, const SIGNS: u8>(&mut self, format: &G) {
        let Self { values, policy, output: Output { codes, scales }, tally } = self;
        groups::quantize::<T, W::Vector, G, N, SIGNS>(values, format, *policy, codes, scales, tally);
    }

    /// A block at a time.
    #[inline(always)]
    fn one_by_one<W: Widen, V: Vectorised<N>, const N: usize>(&mut self, format: &V) {
        let codes = self.output.codes.chunks_exact_mut(self.output.block_bytes());
        for (i, (codes, scale)) in codes.zip(&mut *self.output.scales).enumerate() {
            let mut padded = [T::default(); N];
            let block = block_at(self.values, i, &mut padded);
            let wide = W::widen(block);
            let amax = block::amax_bits(&wide);
            if block::is_non_finite(amax) {
                *scale = policy::quantize_block(block, i * N, format, self.policy, codes, &mut self.tally);
                continue;
            }
            let (byte, scaling, events) = format.scale::<T>(amax);
            self.tally.add(events);
            format.encode(&wide, scaling, codes);
            *scale = byte;
        }
    }
}
