//! MXFP4: blocks of 32 [`E2m1`] elements along a row that share one [`E8m0`] scale (OCP MX v1.0).

use crate::e2m1::{self, E2m1, E2m1x2, Ties};
use crate::e8m0::E8m0;

/// Elements that share a scale.
pub const BLOCK: usize = 32;
/// Bytes of packed codes in a block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// How a block's scale follows from its largest magnitude.
///
/// All four are one formula on the bits of amax as f32: add a constant to the mantissa, keep the exponent field, subtract
/// 2 (6 = 1.5 · 2²), clamp at 0. Being integer arithmetic they are exact everywhere, next to powers of two too, where
/// implementations by `log2` slip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleRule {
    /// The exponent of amax: OCP MX v1.0 and torchao's default. Magnitudes above 6 scales are clipped.
    #[default]
    Floor,
    /// The exponent of amax, rounded up unless amax is a power of two.
    Ceil,
    /// The exponent of amax rounded half up at 1.75: compressed-tensors.
    Even,
    /// The smallest power of two that is at least amax / 6, so that nothing is clipped: NVIDIA.
    Rceil,
}

impl ScaleRule {
    /// What is added to the bits of amax before the mantissa is dropped.
    #[inline(always)]
    pub const fn mantissa_addend(self) -> u32 {
        match self {
            Self::Floor => 0,
            Self::Ceil => 0x7F_FFFF,
            Self::Even => 0x20_0000,
            // amax ≤ 6 · 2^k = 1.5 · 2^(k+2): up by one exactly when the mantissa is above one half.
            Self::Rceil => 0x3F_FFFF,
        }
    }
}

/// The exponent of amax after the rule's rounding, as f32's biased field, for the bits of a finite amax ≥ 0.
#[inline(always)]
pub const fn rounded_exponent(amax_bits: u32, mantissa_addend: u32) -> u32 {
    (amax_bits + mantissa_addend) >> 23
}

/// The scale for a rounded exponent. What would lie below 2^−127 is clamped to it; 255 is out of reach.
#[inline(always)]
pub const fn scale_from_exponent(rounded_exponent: u32) -> E8m0 {
    E8m0::from_bits(rounded_exponent.saturating_sub(2) as u8)
}

/// What becomes of the sign of a zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum NegativeZero {
    /// −0 and negatives that round to zero become code 8: IEEE, OCP, torchao.
    #[default]
    Keep = 0,
    /// Input −0 becomes code 0; negatives that round to zero become code 8: compressed-tensors.
    DropInput = 1,
    /// Code 8 is never written: ggml.
    Drop = 2,
    /// Input zeros of either sign become code 8, as do negatives that round to zero: ModelOpt.
    Force = 3,
}

/// The arithmetic of a block: everything that decides its bytes, given finite values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// How the scale follows from amax.
    pub scale_rule: ScaleRule,
    /// How elements round.
    pub ties: Ties,
    /// What becomes of −0.
    pub negative_zero: NegativeZero,
}

/// What happened in one block, besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEvents {
    /// amax is above 6 scales, so at least one element was clipped by more than rounding.
    pub clipped: bool,
    /// amax is not zero, and every code is.
    pub flushed: bool,
    /// The scale wanted to be smaller than 2^−127.
    pub scale_saturated: bool,
}

impl BlockEvents {
    /// The events of a block, given the bits of its finite amax and the exponent that its scale comes from.
    #[inline(always)]
    pub fn of(amax_bits: u32, rounded_exponent: u32, ties: Ties) -> Self {
        let scale = scale_from_exponent(rounded_exponent).to_bits() as u32;
        // 6 scales are 1.5 · 2^(b + 2 − 127): for b = 253 the bits of a NaN, above every amax as 6 · 2^126 is.
        let six_scales = (scale + 2) << 23 | 0x40_0000;
        let scale_saturated = rounded_exponent < 2 && amax_bits != 0;
        // Every rule's own scale puts amax at 2 or above; only the clamped one can leave it below the first midpoint.
        let flushed = scale_saturated
            && e2m1::magnitude_code(f32::from_bits(amax_bits) * E8m0::MIN.reciprocal(), ties) == 0;
        Self { clipped: amax_bits > six_scales, flushed, scale_saturated }
    }
}

/// The largest magnitude's bits. As integers they order like the magnitudes, and any NaN lies above infinity.
#[inline(always)]
pub fn amax_bits(values: &[f32; BLOCK]) -> u32 {
    let mut most = 0;
    for value in values {
        most = most.max(value.to_bits() & 0x7FFF_FFFF);
    }
    most
}

/// Whether the bits of an amax are those of an infinity or a NaN.
#[inline(always)]
pub const fn is_non_finite(amax_bits: u32) -> bool {
    amax_bits >= 0x7F80_0000
}

/// The code of one finite element, for a scale's reciprocal.
#[inline(always)]
pub fn encode(value: f32, reciprocal: f32, ties: Ties, negative_zero: NegativeZero) -> E2m1 {
    let code = E2m1::from_f32(value * reciprocal, ties);
    match negative_zero {
        NegativeZero::DropInput if value == 0.0 => E2m1::from_bits(0),
        NegativeZero::Drop if code.to_bits() == 8 => E2m1::from_bits(0),
        NegativeZero::Force if value == 0.0 => E2m1::from_bits(8),
        _ => code,
    }
}

/// Quantizes a block: the definition. A block that holds a NaN or an infinity gets the NaN scale and codes 0; callers with
/// another policy replace those values first.
pub fn quantize_block(
    values: &[f32; BLOCK],
    arithmetic: &Arithmetic,
) -> (E8m0, [u8; BLOCK_BYTES], BlockEvents) {
    let amax_bits = amax_bits(values);
    if is_non_finite(amax_bits) {
        return (E8m0::NAN, [0; BLOCK_BYTES], BlockEvents::default());
    }
    let exponent = rounded_exponent(amax_bits, arithmetic.scale_rule.mantissa_addend());
    let scale = scale_from_exponent(exponent);
    let reciprocal = scale.reciprocal();
    let mut codes = [0; BLOCK_BYTES];
    for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
        let [low, high] = pair.map(|v| encode(v, reciprocal, arithmetic.ties, arithmetic.negative_zero));
        *byte = E2m1x2::new(low, high).to_bits();
    }
    (scale, codes, BlockEvents::of(amax_bits, exponent, arithmetic.ties))
}

/// Dequantizes a block: each element times the scale in f32, which is exact but for overflow to infinity and
/// underflow; the NaN scale gives 32 times the canonical NaN.
pub fn dequantize_block(scale: E8m0, codes: &[u8; BLOCK_BYTES]) -> [f32; BLOCK] {
    let mut values = [f32::from_bits(0x7FC0_0000); BLOCK];
    if !scale.is_nan() {
        for (pair, byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            let codes = E2m1x2::from_bits(*byte);
            *pair = [codes.low().to_f32() * scale.to_f32(), codes.high().to_f32() * scale.to_f32()];
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale_of(amax: f32, rule: ScaleRule) -> i32 {
        let exponent = rounded_exponent(amax.to_bits(), rule.mantissa_addend());
        scale_from_exponent(exponent).to_bits() as i32 - 127
    }

    #[test]
    fn rules_at_their_boundaries() {
        let above = |x: f32| f32::from_bits(x.to_bits() + 1);
        assert_eq!((scale_of(4.0, ScaleRule::Floor), scale_of(7.99, ScaleRule::Floor)), (0, 0));
        assert_eq!((scale_of(4.0, ScaleRule::Ceil), scale_of(above(4.0), ScaleRule::Ceil)), (0, 1));
        assert_eq!((scale_of(6.99, ScaleRule::Even), scale_of(7.0, ScaleRule::Even)), (0, 1));
        assert_eq!((scale_of(6.0, ScaleRule::Rceil), scale_of(above(6.0), ScaleRule::Rceil)), (0, 1));
    }

    #[test]
    fn extremes_stay_in_range() {
        for rule in [ScaleRule::Floor, ScaleRule::Ceil, ScaleRule::Even, ScaleRule::Rceil] {
            assert!(scale_of(f32::MAX, rule) <= 126);
            assert_eq!(scale_of(0.0, rule), -127);
            assert_eq!(scale_of(f32::from_bits(1), rule), -127);
        }
    }

    #[test]
    fn non_finite_blocks_are_nan_blocks() {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; BLOCK];
            values[17] = poison;
            let (scale, codes, events) = quantize_block(&values, &Arithmetic::default());
            assert_eq!((scale, codes, events), (E8m0::NAN, [0; BLOCK_BYTES], BlockEvents::default()));
            assert!(dequantize_block(scale, &codes).iter().all(|v| v.to_bits() == 0x7FC0_0000));
        }
    }

    #[test]
    fn signs_of_zero() {
        let mut values = [0.0; BLOCK];
        (values[0], values[1], values[2]) = (4.0, -0.0, -0.1);
        let codes = |negative_zero| {
            let (_, codes, _) = quantize_block(&values, &Arithmetic { negative_zero, ..Default::default() });
            (codes[0] >> 4, codes[1] & 15, codes[1] >> 4)
        };
        assert_eq!(codes(NegativeZero::Keep), (8, 8, 0));
        assert_eq!(codes(NegativeZero::DropInput), (0, 8, 0));
        assert_eq!(codes(NegativeZero::Drop), (0, 0, 0));
        assert_eq!(codes(NegativeZero::Force), (8, 8, 8));
    }
}
