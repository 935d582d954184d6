//! The MX formats: blocks of 32 elements along a row that share an [`E8m0`] scale (OCP MX v1.0).
//!
//! MXFP4 has [`E2m1`] elements, two per byte. MXFP8 has [`E4m3`] or [`E5m2`] elements, one per
//! byte.

use crate::block::{self, BlockEvents, NegativeZero, with_zero_sign};
use crate::e2m1::{self, E2m1, Ties};
use crate::e3m0::E3m0;
use crate::e8m0::E8m0;
use crate::fp8::{E4m3, E5m2};

/// Elements that share a scale.
pub const BLOCK: usize = 32;

/// The scale of a block that holds a NaN or an infinity.
pub const NAN_SCALE: E8m0 = E8m0::NAN;

/// An element format. The implementations of this trait are the table of MX formats.
pub trait Element {
    /// Bits of a code, 4 or 8. The top bit is the sign.
    const BITS: usize;
    /// The exponent of the largest value.
    const LARGEST_EXPONENT: u32;
    /// The largest value's mantissa, as the 23 bits of an f32.
    const LARGEST_MANTISSA: u32;
    /// Stored mantissa bits.
    const MANTISSA_BITS: u32;

    /// Returns the nearest code, saturating at the largest value. Only E2M1 supports ties other
    /// than even.
    fn encode(value: f32, ties: Ties) -> u8;

    /// Returns the value of a code.
    fn decode(code: u8) -> f32;
}

/// Returns the largest value of an element.
pub const fn largest<E: Element>() -> f32 {
    f32::from_bits((127 + E::LARGEST_EXPONENT) << 23 | E::LARGEST_MANTISSA)
}

impl Element for E2m1 {
    const BITS: usize = 4;
    const LARGEST_EXPONENT: u32 = 2;
    const LARGEST_MANTISSA: u32 = 0x40_0000;
    const MANTISSA_BITS: u32 = 1;

    #[inline(always)]
    fn encode(value: f32, ties: Ties) -> u8 {
        Self::from_f32(value, ties).to_bits()
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        Self::from_bits(code).to_f32()
    }
}

/// Defines elements that have a single rule for ties.
///
/// Arguments: `type: bits, largest exponent, largest mantissa, mantissa bits`.
macro_rules! elements {
    ($($type:ty: $bits:literal, $exponent:literal, $mantissa:literal, $mantissa_bits:literal;)+) => {$(
        impl Element for $type {
            const BITS: usize = $bits;
            const LARGEST_EXPONENT: u32 = $exponent;
            const LARGEST_MANTISSA: u32 = $mantissa;
            const MANTISSA_BITS: u32 = $mantissa_bits;

            #[inline(always)]
            fn encode(value: f32, _: Ties) -> u8 {
                Self::from_f32(value).to_bits()
            }

            #[inline(always)]
            fn decode(code: u8) -> f32 {
                Self::from_bits(code).to_f32()
            }
        }
    )+};
}

elements! {
    E4m3: 8, 8, 0x60_0000, 3;
    E5m2: 8, 15, 0x60_0000, 2;
    E3m0: 4, 4, 0, 0;
}

/// The rule that derives a block's scale from its largest magnitude.
///
/// All four rules are one formula on amax's f32 bits: add a constant to the mantissa, keep the
/// exponent field, subtract the exponent of the element's largest value, clamp at 0. Integer
/// arithmetic makes them exact everywhere, including next to powers of two, where `log2`
/// implementations are off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// The exponent of amax, as in OCP MX v1.0 and torchao's default.
    ///
    /// Magnitudes above the largest element are clipped.
    #[default]
    Floor,
    /// The exponent of amax, rounded up unless amax is a power of two.
    Ceil,
    /// The exponent of amax after rounding its mantissa half up to the element's bits:
    /// compressed-tensors.
    Even,
    /// The smallest power of two that is at least amax over the largest element.
    ///
    /// NVIDIA's rule. Nothing is clipped.
    Rceil,
}

impl ScaleRule {
    /// Returns the number to add to the bits of amax before the mantissa is dropped.
    #[inline(always)]
    pub const fn mantissa_addend<E: Element>(self) -> u32 {
        match self {
            Self::Floor => 0,
            Self::Ceil => 0x7F_FFFF,
            Self::Even => 1 << (22 - E::MANTISSA_BITS),
            // amax ≤ m · 2^e · 2^k for the largest element m · 2^e: the exponent rises by one
            // exactly if amax's mantissa is above m's.
            Self::Rceil => 0x7F_FFFF - E::LARGEST_MANTISSA,
        }
    }
}

/// Returns the exponent of amax after the rule's rounding, as f32's biased field.
///
/// `amax_bits` are the bits of a finite amax ≥ 0.
#[inline(always)]
pub const fn rounded_exponent(amax_bits: u32, mantissa_addend: u32) -> u32 {
    (amax_bits + mantissa_addend) >> 23
}

/// Returns the scale for a rounded exponent, clamped to at least 2^−127. 255 cannot occur.
#[inline(always)]
pub const fn scale_from_exponent<E: Element>(rounded_exponent: u32) -> E8m0 {
    E8m0::from_bits(rounded_exponent.saturating_sub(E::LARGEST_EXPONENT) as u8)
}

/// The numerics of a block: everything that determines its bytes, given finite values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// The rule that derives the scale from amax.
    pub scale_rule: ScaleRule,
    /// Rounding of elements halfway between two codes.
    pub ties: Ties,
    /// How a zero's sign is encoded.
    pub negative_zero: NegativeZero,
}

/// Returns a block's events, given the bits of its finite amax and its rounded exponent.
#[inline(always)]
pub fn events<E: Element>(amax_bits: u32, rounded_exponent: u32, ties: Ties) -> BlockEvents {
    let scale_saturated = rounded_exponent < E::LARGEST_EXPONENT && amax_bits != 0;
    // Every rule's own scale keeps amax far from zero. Only the clamped scale can leave it below
    // the first midpoint.
    let flushed = scale_saturated && E::encode(f32::from_bits(amax_bits) * E8m0::MIN.reciprocal(), ties) == 0;
    BlockEvents {
        clipped: clips::<E>(amax_bits, scale_from_exponent::<E>(rounded_exponent)),
        flushed,
        scale_saturated,
    }
}

/// Returns whether a finite magnitude, given by its bits, exceeds the largest element times a
/// scale.
#[inline(always)]
pub fn clips<E: Element>(amax_bits: u32, scale: E8m0) -> bool {
    // For E2M1 and scale byte 253 the product is 6 · 2^126. The sum then has the bits of a NaN,
    // which compare above every amax, as they should.
    amax_bits > ((scale.to_bits() as u32 + E::LARGEST_EXPONENT) << 23 | E::LARGEST_MANTISSA)
}

/// Returns the code of one finite element, given the scale's reciprocal.
#[inline(always)]
pub fn encode<E: Element>(value: f32, reciprocal: f32, ties: Ties, negative_zero: NegativeZero) -> u8 {
    with_zero_sign(E::encode(value * reciprocal, ties), 1 << (E::BITS - 1), value, negative_zero)
}

/// Quantizes a block. This is the reference.
///
/// `codes` receives the packed bytes, `BLOCK * E::BITS / 8` of them. A block that holds a NaN or an
/// infinity gets the NaN scale and codes 0. Callers with another policy replace those values first.
pub fn quantize_block<E: Element>(
    values: &[f32; BLOCK],
    arithmetic: &Arithmetic,
    codes: &mut [u8],
) -> (E8m0, BlockEvents) {
    let amax_bits = block::amax_bits(values);
    if block::is_non_finite(amax_bits) {
        codes.fill(0);
        return (NAN_SCALE, BlockEvents::default());
    }
    let exponent = rounded_exponent(amax_bits, arithmetic.scale_rule.mantissa_addend::<E>());
    let scale = scale_from_exponent::<E>(exponent);
    encode_block::<E>(values, scale, arithmetic, codes);
    (scale, events::<E>(amax_bits, exponent, arithmetic.ties))
}

/// Encodes a block of finite values under a scale.
pub fn encode_block<E: Element>(
    values: &[f32; BLOCK],
    scale: E8m0,
    arithmetic: &Arithmetic,
    codes: &mut [u8],
) {
    let code = |value| encode::<E>(value, scale.reciprocal(), arithmetic.ties, arithmetic.negative_zero);
    e2m1::pack(codes, values, E::BITS, code);
}

/// Dequantizes a block: each element times the scale in f32.
///
/// The products are exact except for overflow to infinity and for underflow. The NaN scale gives 32
/// canonical NaNs.
pub fn dequantize_block<E: Element>(scale: E8m0, codes: &[u8]) -> [f32; BLOCK] {
    let mut values = [f32::from_bits(0x7FC0_0000); BLOCK];
    if !scale.is_nan() {
        e2m1::unpack(codes, &mut values, E::BITS, |code| canonical_nan(E::decode(code) * scale.to_f32()));
    }
    values
}

/// Replaces every NaN with the canonical one, because devices propagate payloads differently.
#[inline(always)]
const fn canonical_nan(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Words;

    fn scale_of<E: Element>(amax: f32, rule: ScaleRule) -> i32 {
        let exponent = rounded_exponent(amax.to_bits(), rule.mantissa_addend::<E>());
        scale_from_exponent::<E>(exponent).to_bits() as i32 - 127
    }

    #[test]
    fn rules_at_their_boundaries() {
        let above = |x: f32| f32::from_bits(x.to_bits() + 1);
        let e2m1 = scale_of::<E2m1>;
        assert_eq!((e2m1(4.0, ScaleRule::Floor), e2m1(7.99, ScaleRule::Floor)), (0, 0));
        assert_eq!((e2m1(4.0, ScaleRule::Ceil), e2m1(above(4.0), ScaleRule::Ceil)), (0, 1));
        assert_eq!((e2m1(6.99, ScaleRule::Even), e2m1(7.0, ScaleRule::Even)), (0, 1));
        assert_eq!((e2m1(6.0, ScaleRule::Rceil), e2m1(above(6.0), ScaleRule::Rceil)), (0, 1));
        let e4m3 = scale_of::<E4m3>;
        assert_eq!((e4m3(256.0, ScaleRule::Floor), e4m3(511.0, ScaleRule::Floor)), (0, 0));
        assert_eq!((e4m3(448.0, ScaleRule::Rceil), e4m3(above(448.0), ScaleRule::Rceil)), (0, 1));
        let e5m2 = scale_of::<E5m2>;
        assert_eq!((e5m2(57344.0, ScaleRule::Rceil), e5m2(above(57344.0), ScaleRule::Rceil)), (0, 1));
        assert_eq!((e5m2(61439.0, ScaleRule::Even), e5m2(61440.0, ScaleRule::Even)), (0, 1));
    }

    #[test]
    fn extremes_stay_in_range() {
        for rule in ScaleRule::values() {
            assert!(scale_of::<E2m1>(f32::MAX, rule) <= 126);
            assert_eq!(scale_of::<E2m1>(0.0, rule), -127);
            assert_eq!(scale_of::<E5m2>(f32::from_bits(1), rule), -127);
        }
    }

    #[test]
    fn non_finite_blocks_are_nan_blocks() {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; BLOCK];
            values[17] = poison;
            let mut codes = [0xFF; 16];
            let found = quantize_block::<E2m1>(&values, &Arithmetic::default(), &mut codes);
            assert_eq!((found, codes), ((E8m0::NAN, BlockEvents::default()), [0; 16]));
            assert!(dequantize_block::<E2m1>(found.0, &codes).iter().all(|v| v.to_bits() == 0x7FC0_0000));
        }
    }

    #[test]
    fn signs_of_zero() {
        let mut values = [0.0; BLOCK];
        (values[0], values[1], values[2]) = (4.0, -0.0, -0.1);
        let codes = |negative_zero| {
            let mut codes = [0; 16];
            quantize_block::<E2m1>(&values, &Arithmetic { negative_zero, ..Default::default() }, &mut codes);
            (codes[0] >> 4, codes[1] & 15, codes[1] >> 4)
        };
        assert_eq!(codes(NegativeZero::Keep), (8, 8, 0));
        assert_eq!(codes(NegativeZero::DropInput), (0, 8, 0));
        assert_eq!(codes(NegativeZero::Drop), (0, 0, 0));
        assert_eq!(codes(NegativeZero::Force), (8, 8, 8));
    }

    #[test]
    fn representable_mxfp8_values_round_trip() {
        let mut values = [0.0; BLOCK];
        (values[0], values[1], values[2]) = (448.0, -0.4375, 500.0);
        let mut codes = [0; 32];
        let (scale, events) = quantize_block::<E4m3>(&values, &Arithmetic::default(), &mut codes);
        assert_eq!((scale.to_bits(), events.clipped), (127, true));
        assert_eq!(dequantize_block::<E4m3>(scale, &codes)[..4], [448.0, -0.4375, 448.0, 0.0]);
    }
}
