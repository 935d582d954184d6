//! One block at a time, in loops without branches on the data.
//!
//! The compiler turns each loop into vector instructions of the instance that calls it.

use microscale_formats::nvfp4::{self, Quantizer, Scaling};
use microscale_formats::{BlockEvents, E2m1, E4m3, E8m0, NegativeZero, Ties, e2m1, mx};

use super::format::{BlockFormat, Mx};
use crate::element::Element;

/// A format whose blocks are quantized in two loops: first the scale, then all codes.
pub(in crate::cpu) trait VectorizedFormat<const N: usize>: BlockFormat<N> {
    /// The operation that scales elements: multiply by a factor, or divide by a divisor.
    type Scaling: Copy;

    /// Chooses the scale byte of a block with a finite amax.
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, Self::Scaling, BlockEvents);

    /// The scaling and the events of a block under another scale byte.
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (Self::Scaling, BlockEvents);

    /// Encodes and packs a block of finite values.
    fn encode(&self, wide: &[f32; N], scaling: Self::Scaling, codes: &mut [u8]);
}

pub(in crate::cpu) const EVEN: u8 = 0;
pub(in crate::cpu) const AWAY: u8 = 1;
pub(in crate::cpu) const ZERO: u8 = 2;

/// MXFP4, compiled for a rule of ties, and for −0 kept or not.
pub(in crate::cpu) struct Mxfp4<const TIES: u8, const KEEP: bool>(pub(in crate::cpu) Mx<E2m1>);

impl<const TIES: u8, const KEEP: bool> BlockFormat<{ mx::BLOCK }> for Mxfp4<TIES, KEEP> {
    fn quantize_block<T: Element>(&self, values: &[f32; mx::BLOCK], codes: &mut [u8]) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(&self.0, values, codes)
    }
}

impl<const TIES: u8, const KEEP: bool> VectorizedFormat<{ mx::BLOCK }> for Mxfp4<TIES, KEEP> {
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
        let negative_zero = self.0.arithmetic.negative_zero;
        let mut nibbles = [0u8; mx::BLOCK];
        for (nibble, value) in nibbles.iter_mut().zip(wide) {
            let magnitude = f32::from_bits(value.to_bits() & 0x7FFF_FFFF);
            let code = magnitude_code::<TIES>(magnitude * reciprocal);
            *nibble = with_sign::<KEEP>(code, *value, negative_zero);
        }
        pack(&nibbles, codes);
    }
}

/// Every MX format. MXFP8 has no faster version.
impl<E: mx::Element> VectorizedFormat<{ mx::BLOCK }> for Mx<E> {
    type Scaling = f32;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, f32, BlockEvents) {
        let addend = self.arithmetic.scale_rule.mantissa_addend::<E>();
        let exponent = mx::rounded_exponent(amax_bits, addend);
        let scale = mx::scale_from_exponent::<E>(exponent);
        let events = mx::events::<E>(amax_bits, exponent, self.arithmetic.ties);
        (scale.to_bits(), scale.reciprocal(), events)
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (f32, BlockEvents) {
        let scale = E8m0::from_bits(byte);
        let scaled = f32::from_bits(amax_bits) * scale.reciprocal();
        let flushed = amax_bits != 0 && E::encode(scaled, self.arithmetic.ties) == 0;
        let events =
            BlockEvents { clipped: mx::clips::<E>(amax_bits, scale), flushed, scale_saturated: false };
        (scale.reciprocal(), events)
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; mx::BLOCK], reciprocal: f32, codes: &mut [u8]) {
        for (code, value) in codes.iter_mut().zip(wide) {
            *code = E::encode(value * reciprocal, Ties::Even);
        }
    }
}

/// NVFP4, compiled for −0 kept or not.
pub(in crate::cpu) struct Nvfp4<const KEEP: bool>(pub(in crate::cpu) Quantizer);

impl<const KEEP: bool> BlockFormat<{ nvfp4::BLOCK }> for Nvfp4<KEEP> {
    fn quantize_block<T: Element>(
        &self,
        values: &[f32; nvfp4::BLOCK],
        codes: &mut [u8],
    ) -> (u8, BlockEvents) {
        BlockFormat::quantize_block::<T>(&self.0, values, codes)
    }
}

impl<const KEEP: bool> VectorizedFormat<{ nvfp4::BLOCK }> for Nvfp4<KEEP> {
    type Scaling = Scaling;

    #[inline(always)]
    fn scale<T: Element>(&self, amax_bits: u32) -> (u8, Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.0.wanted_scale(amax, |x| T::from_f32(x).to_f32());
        let scale = self.0.rounded_scale(wanted);
        let scaling = self.0.scaling(scale);
        (scale.to_bits(), scaling, self.0.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn rescale<T: Element>(&self, amax_bits: u32, byte: u8) -> (Scaling, BlockEvents) {
        let amax = f32::from_bits(amax_bits);
        let wanted = self.0.wanted_scale(amax, |x| T::from_f32(x).to_f32());
        let scale = E4m3::from_bits(byte);
        let scaling = self.0.scaling(scale);
        (scaling, self.0.events(amax, wanted, scale, scaling))
    }

    #[inline(always)]
    fn encode(&self, wide: &[f32; nvfp4::BLOCK], scaling: Scaling, codes: &mut [u8]) {
        let mut scaled = [0.0; nvfp4::BLOCK];
        match scaling {
            Scaling::Multiply(factor) => {
                scaled.iter_mut().zip(wide).for_each(|(scaled, value)| *scaled = value * factor);
            }
            Scaling::Divide(divisor) => {
                scaled.iter_mut().zip(wide).for_each(|(scaled, value)| *scaled = value / divisor);
            }
        }
        let mut nibbles = [0u8; nvfp4::BLOCK];
        for ((nibble, value), scaled) in nibbles.iter_mut().zip(wide).zip(scaled) {
            // A given global scale may scale elements far above 6. The identity holds up to 2^20.
            let magnitude = f32::from_bits(scaled.to_bits() & 0x7FFF_FFFF);
            let code = magnitude_code::<EVEN>(if magnitude < 8.0 { magnitude } else { 8.0 });
            *nibble = with_sign::<KEEP>(code, *value, self.0.negative_zero());
        }
        pack(&nibbles, codes);
    }
}

/// Encodes a scaled magnitude.
///
/// Only ties to even have the identity of three terms. The other rules count midpoints.
#[inline(always)]
fn magnitude_code<const TIES: u8>(a: f32) -> u32 {
    match TIES {
        EVEN => e2m1::magnitude_code_even(a),
        AWAY => e2m1::MIDPOINTS.iter().map(|&m| u32::from(a >= m)).sum(),
        _ => e2m1::MIDPOINTS.iter().map(|&m| u32::from(a > m)).sum(),
    }
}

/// Adds the sign of the value to a code, and applies the rule for −0.
#[inline(always)]
fn with_sign<const KEEP: bool>(code: u32, value: f32, negative_zero: NegativeZero) -> u8 {
    let mut sign = value.to_bits() >> 28 & 8;
    if !KEEP {
        let magnitude = value.to_bits() & 0x7FFF_FFFF;
        let zero = if negative_zero == NegativeZero::Drop { code } else { magnitude };
        let sign_of_zero = if negative_zero == NegativeZero::Force { 8 } else { 0 };
        sign = if zero == 0 { sign_of_zero } else { sign };
    }
    (code | sign) as u8
}

/// Packs codes, two per byte.
#[inline(always)]
fn pack<const N: usize>(nibbles: &[u8; N], codes: &mut [u8]) {
    for (byte, pair) in codes.iter_mut().zip(nibbles.as_chunks::<2>().0) {
        // Shifting the halfword by 4 puts the upper code next to the lower one.
        let pair = u16::from_le_bytes(*pair);
        *byte = (pair | pair >> 4) as u8;
    }
}
