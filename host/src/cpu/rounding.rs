//! Plain rounding: the loop that a piece goes through, by its format and dtype.

pub(super) mod groups;
pub(super) mod params;
pub(super) mod thresholds;

use microscale_formats::nvfp4::{self, Quantizer};
use microscale_formats::{E2m1, NegativeZero, Ties, block, mx};

use self::groups::format::{DROP, DROP_INPUT, FORCE, GroupFormat, KEEP};
use self::groups::mxfp4::Mxfp4Groups;
use self::groups::nvfp4::{Nvfp4Factors, Nvfp4Groups};
use self::params::{FormatParams, QuantizeParams};
use self::thresholds::Thresholds;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::reference::Mx;
use crate::cpu::blocks::slow_path::{self, block_at};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::{AWAY, EVEN, Mxfp4, Nvfp4, VectorizedFormat, ZERO};
use crate::cpu::simd::Vector;
use crate::cpu::simd::widen::Widen;
use crate::element::{Dtype, Element};
use crate::scheme::NonFinite;

/// Contiguous blocks, the last of which may not be whole, on their way.
struct Run<'a, T> {
    values: &'a [T],
    policy: NonFinite,
    output: Output<'a>,
    tally: Tally,
}

/// Quantizes a piece. What the loops must not ask for each element is a type here.
#[inline(always)]
pub(super) fn quantize<T: Element, W: Widen>(
    values: &[T],
    params: &QuantizeParams,
    output: Output<'_>,
) -> Tally {
    let mut run = Run { values, policy: params.non_finite, output, tally: Tally::default() };
    match &params.format {
        FormatParams::Mxfp4(mx) => run.mxfp4::<W>(*mx, &params.thresholds),
        FormatParams::Mxfp8E4m3(mx) => run.one_by_one::<W, _, _>(mx),
        FormatParams::Mxfp8E5m2(mx) => run.one_by_one::<W, _, _>(mx),
        FormatParams::Nvfp4(quantizer, factors) => run.nvfp4::<W>(quantizer, factors, &params.thresholds),
    }
    run.tally
}

impl<T: Element> Run<'_, T> {
    #[inline(always)]
    fn mxfp4<W: Widen>(&mut self, mx: Mx<E2m1>, thresholds: &Thresholds) {
        const N: usize = mx::BLOCK;
        let groups = &Mxfp4Groups { mx, thresholds };
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
    fn nvfp4<W: Widen>(&mut self, quantizer: &Quantizer, factors: &Nvfp4Factors, thresholds: &Thresholds) {
        const N: usize = nvfp4::BLOCK;
        let halfwords = T::DTYPE != Dtype::F32;
        let divided = &Nvfp4Groups::<true> { quantizer, factors, thresholds };
        let multiplied = &Nvfp4Groups::<false> { quantizer, factors, thresholds };
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
    fn in_groups<W: Widen, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(&mut self, format: &G) {
        let Self { values, policy, output: Output { codes, scales }, tally } = self;
        groups::quantize::<T, W::Vector, G, N, SIGNS>(values, format, *policy, codes, scales, tally);
    }

    /// A block at a time.
    #[inline(always)]
    fn one_by_one<W: Widen, V: VectorizedFormat<N>, const N: usize>(&mut self, format: &V) {
        let codes = self.output.codes.chunks_exact_mut(self.output.block_bytes());
        for (i, (codes, scale)) in codes.zip(&mut *self.output.scales).enumerate() {
            let mut padded = [T::default(); N];
            let block = block_at(self.values, i, &mut padded);
            let wide = W::widen(block);
            let amax = block::amax_bits(&wide);
            if block::is_non_finite(amax) {
                *scale = slow_path::quantize_block(block, i * N, format, self.policy, codes, &mut self.tally);
                continue;
            }
            let (byte, scaling, events) = format.scale::<T>(amax);
            self.tally.add(events);
            format.encode(&wide, scaling, codes);
            *scale = byte;
        }
    }
}
