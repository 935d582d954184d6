//! Plain rounding: chooses the loop for a run of blocks by format, dtype and rule for −0.

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
use crate::cpu::blocks::format::Mx;
use crate::cpu::blocks::output::Output;
use crate::cpu::blocks::slow_path::{self, block_at};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::blocks::vectorized::{AWAY, EVEN, Mxfp4, Nvfp4, VectorizedFormat, ZERO};
use crate::cpu::simd::Vector;
use crate::element::{Dtype, Element};
use crate::scheme::NonFinite;

/// A run of blocks that is being quantized. The last block may be partial.
struct Run<'a, T> {
    values: &'a [T],
    policy: NonFinite,
    output: Output<'a>,
    tally: Tally,
}

/// Quantizes a run. Each choice becomes a type, so that loops do not branch on it.
#[inline(always)]
pub(super) fn quantize<T: Element, V: Vector>(
    simd: V,
    values: &[T],
    params: &QuantizeParams,
    output: Output<'_>,
) -> Tally {
    let mut run = Run { values, policy: params.non_finite, output, tally: Tally::default() };
    match &params.format {
        FormatParams::Mxfp4(mx) => run.mxfp4(simd, *mx, &params.thresholds),
        FormatParams::Mxfp8E4m3(mx) => run.one_by_one(simd, mx),
        FormatParams::Mxfp8E5m2(mx) => run.one_by_one(simd, mx),
        FormatParams::Nvfp4(quantizer, factors) => run.nvfp4(simd, quantizer, factors, &params.thresholds),
    }
    run.tally
}

impl<T: Element> Run<'_, T> {
    #[inline(always)]
    fn mxfp4<V: Vector>(&mut self, simd: V, mx: Mx<E2m1>, thresholds: &Thresholds) {
        const N: usize = mx::BLOCK;
        let groups = &Mxfp4Groups { mx, thresholds };
        let halfwords = T::DTYPE != Dtype::F32;
        let vectors = V::FUSED && mx.arithmetic.ties == Ties::Even;
        match (mx.arithmetic.ties, mx.arithmetic.negative_zero) {
            (_, NegativeZero::Keep) if halfwords || vectors => self.in_groups::<V, _, N, KEEP>(simd, groups),
            (_, NegativeZero::DropInput) if halfwords || vectors => {
                self.in_groups::<V, _, N, DROP_INPUT>(simd, groups)
            }
            (_, NegativeZero::Drop) if halfwords => self.in_groups::<V, _, N, DROP>(simd, groups),
            (_, NegativeZero::Force) if halfwords => self.in_groups::<V, _, N, FORCE>(simd, groups),
            (Ties::Even, NegativeZero::Keep) => self.one_by_one(simd, &Mxfp4::<EVEN, true>(mx)),
            (Ties::Even, _) => self.one_by_one(simd, &Mxfp4::<EVEN, false>(mx)),
            (Ties::Away, NegativeZero::Keep) => self.one_by_one(simd, &Mxfp4::<AWAY, true>(mx)),
            (Ties::Away, _) => self.one_by_one(simd, &Mxfp4::<AWAY, false>(mx)),
            (Ties::Zero, NegativeZero::Keep) => self.one_by_one(simd, &Mxfp4::<ZERO, true>(mx)),
            (Ties::Zero, _) => self.one_by_one(simd, &Mxfp4::<ZERO, false>(mx)),
        }
    }

    #[inline(always)]
    fn nvfp4<V: Vector>(
        &mut self,
        simd: V,
        quantizer: &Quantizer,
        factors: &Nvfp4Factors,
        thresholds: &Thresholds,
    ) {
        const N: usize = nvfp4::BLOCK;
        let halfwords = T::DTYPE != Dtype::F32;
        let divided = &Nvfp4Groups::<true> { quantizer, factors, thresholds };
        let multiplied = &Nvfp4Groups::<false> { quantizer, factors, thresholds };
        // 16-bit values are compared with thresholds, even if thresholds come from divisions.
        match (quantizer.negative_zero(), factors.divides && !halfwords) {
            (NegativeZero::Keep, false) if halfwords => self.in_groups::<V, _, N, KEEP>(simd, multiplied),
            (NegativeZero::DropInput, false) if halfwords => {
                self.in_groups::<V, _, N, DROP_INPUT>(simd, multiplied)
            }
            (NegativeZero::Drop, false) if halfwords => self.in_groups::<V, _, N, DROP>(simd, multiplied),
            (NegativeZero::Force, false) if halfwords => self.in_groups::<V, _, N, FORCE>(simd, multiplied),
            (NegativeZero::Keep, true) if V::FUSED => self.in_groups::<V, _, N, KEEP>(simd, divided),
            (NegativeZero::Keep, false) if V::FUSED => self.in_groups::<V, _, N, KEEP>(simd, multiplied),
            (NegativeZero::DropInput, true) if V::FUSED => {
                self.in_groups::<V, _, N, DROP_INPUT>(simd, divided);
            }
            (NegativeZero::DropInput, false) if V::FUSED => {
                self.in_groups::<V, _, N, DROP_INPUT>(simd, multiplied);
            }
            (NegativeZero::Keep, _) => self.one_by_one(simd, &Nvfp4::<true>(*quantizer)),
            _ => self.one_by_one(simd, &Nvfp4::<false>(*quantizer)),
        }
    }

    #[inline(always)]
    fn in_groups<V: Vector, G: GroupFormat<N>, const N: usize, const SIGNS: u8>(
        &mut self,
        simd: V,
        format: &G,
    ) {
        let Self { values, policy, output: Output { codes, scales }, tally } = self;
        groups::quantize::<T, V, G, N, SIGNS>(simd, values, format, *policy, codes, scales, tally);
    }

    /// Quantizes one block at a time.
    #[inline(always)]
    fn one_by_one<V: Vector, B: VectorizedFormat<N>, const N: usize>(&mut self, simd: V, format: &B) {
        let codes = self.output.codes.chunks_exact_mut(self.output.block_bytes());
        for (i, (codes, scale)) in codes.zip(&mut *self.output.scales).enumerate() {
            let mut padded = [T::default(); N];
            let block = block_at(self.values, i, &mut padded);
            let wide = simd.widen_block(block);
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
