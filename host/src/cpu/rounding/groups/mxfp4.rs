//! The scales of MXFP4 for sixteen blocks at a time, one lane per block.

use microscale_formats::{BlockEvents, E2m1, E8m0, mx};

use super::format::{Factors, GroupFormat};
use crate::cpu::blocks::format::{BlockFormat, Mx};
use crate::cpu::blocks::tally::Tally;
use crate::cpu::rounding::thresholds::Thresholds;
use crate::cpu::simd::{Lanes, Vector};
use crate::element::Element;

/// MXFP4 in groups: 16-bit values, and f32 with ties to even.
pub(in crate::cpu) struct Mxfp4Groups<'a> {
    pub(in crate::cpu) mx: Mx<E2m1>,
    pub(in crate::cpu) thresholds: &'a Thresholds,
}

impl BlockFormat<{ mx::BLOCK }> for Mxfp4Groups<'_> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(&self.mx, values, codes)
    }
}

impl GroupFormat<{ mx::BLOCK }> for Mxfp4Groups<'_> {
    #[inline(always)]
    fn scales<T: Element, V: Vector>(
        &self,
        simd: V,
        amax: V::Number,
        bytes: &mut Lanes<u8>,
        tally: &mut Tally,
    ) -> bool {
        let arithmetic = &self.mx.arithmetic;
        let addend = arithmetic.scale_rule.mantissa_addend::<E2m1>();
        // Rounds exponents and derives scales and clipping as `mx` does.
        let largest_exponent = <E2m1 as mx::Element>::LARGEST_EXPONENT;
        let exponents = simd.shift_right(simd.add_bits(simd.bits(amax), simd.splat_bits(addend)), 23);
        let unclamped = simd.max_bits(exponents, simd.splat_bits(largest_exponent));
        *bytes = simd.low_bytes(simd.add_bits(unclamped, simd.splat_bits(largest_exponent.wrapping_neg())));
        // Only zero and amaxes below this bound may want a scale below the smallest.
        if simd.at_most(amax, simd.splat(E8m0::MIN.to_f32() * 8.0)) != 0 {
            for amax in simd.store(amax) {
                let exponent = mx::rounded_exponent(amax.to_bits(), addend);
                tally.add(mx::events::<E2m1>(amax.to_bits(), exponent, arithmetic.ties));
            }
            return true;
        }
        let mantissa = simd.splat_bits(<E2m1 as mx::Element>::LARGEST_MANTISSA);
        let clips = simd.above(simd.bits(amax), simd.or(simd.shift_left(unclamped, 23), mantissa));
        tally.add_clipped(clips.count_ones());
        true
    }

    #[inline(always)]
    fn factors<V: Vector>(&self, simd: V, [byte, _]: [u8; 2]) -> Factors<V::Number> {
        Factors { y: simd.splat(E8m0::from_bits(byte).reciprocal_of_number()), rest: None }
    }

    #[inline(always)]
    fn thresholds(&self) -> &Thresholds {
        self.thresholds
    }
}
