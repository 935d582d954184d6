//! E2M1, the 4-bit floating-point element of MXFP4 and NVFP4 (OCP MX v1.0, section 5.3.3).
//!
//! One sign bit, two exponent bits (bias 1), one mantissa bit; no infinities and no NaN.

use crate::arithmetic::Machine;

/// The magnitudes of codes 0 to 7. Bit 3 of a code is the sign.
pub const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// `MIDPOINTS[i]` lies halfway between `VALUES[i]` and `VALUES[i + 1]`: the ties.
pub const MIDPOINTS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// The largest magnitude, of code 7.
pub const MAX: f32 = 6.0;

/// Rounding of a value exactly between two codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ties {
    /// To the code with an even mantissa bit.
    ///
    /// Used by OCP, NVIDIA's `cvt`, torchao, compressed-tensors and `ml_dtypes`.
    #[default]
    Even,
    /// Away from zero: cublade's MXFP4 ladder, microxcaling's default.
    Away,
    /// Toward zero: ggml, ModelOpt's MXFP4, qwantize.
    Zero,
}

/// One E2M1 code, in the low four bits of a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E2m1(u8);

impl E2m1 {
    /// Takes the code from the low four bits. The high four bits are ignored.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xF)
    }

    /// Returns the code, 0 to 15.
    #[inline(always)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Rounds to the nearest code, saturating at ±6.
    ///
    /// Zero, and values that round to it, keep their sign. NaN gives code 7 without a sign, as
    /// NVIDIA's `cvt.rn.satfinite.e2m1x2.f32` does.
    #[inline]
    pub fn from_f32(x: f32, ties: Ties) -> Self {
        if x.is_nan() {
            return Self(7);
        }
        let magnitude = magnitude_code(f32::from_bits(x.to_bits() & 0x7FFF_FFFF), ties);
        Self(((x.to_bits() >> 28) & 8) as u8 | magnitude)
    }

    /// Returns the exact value.
    #[inline]
    pub fn to_f32(self) -> f32 {
        // Shifted into f32's exponent and mantissa fields, the code is the value times 2^-126,
        // subnormals included.
        let bits = ((self.0 as u32 & 8) << 28) | ((self.0 as u32 & 7) << 22);
        f32::from_bits(bits) * f32::from_bits((126 + 127) << 23)
    }
}

/// Returns the code (0 to 7) nearest to the magnitude `a` ≥ 0: the number of midpoints below it.
#[inline]
pub fn magnitude_code(a: f32, ties: Ties) -> u8 {
    let mut code = 0;
    let mut i = 0;
    while i < MIDPOINTS.len() {
        let passed = match ties {
            // Between codes i and i + 1, the upper one is even if i is odd.
            Ties::Even if i % 2 == 1 => a >= MIDPOINTS[i],
            Ties::Even | Ties::Zero => a > MIDPOINTS[i],
            Ties::Away => a >= MIDPOINTS[i],
        };
        code += passed as u8;
        i += 1;
    }
    code
}

/// Constants of an identity that rounds with three additions and three minima, ties to even.
///
/// It replaces the seven comparisons of [`magnitude_code`]:
///
/// ```text
/// code(a) = min(rne(2a), rne(a) + 2, rne(a / 2) + 4, 7)          for a ≥ 0
/// ```
///
/// Each term is the code on the part of the grid whose step is ½, 1 or 2, continued as a straight
/// line. The grid is coarser for larger values, so the smallest line wins. At the seven ties the
/// even neighbour is the same on every line.
///
/// A float addition does the rounding to nearest even: where one unit in the last place is 1, `BASE
/// + y` is `BASE + rne(y)`, and its bits are the bits of `BASE` plus rne(y). The minimum may
/// therefore be taken over floats or over bit patterns. The code is in the low bits, which are zero
/// in every `BASE`.
pub mod identity {
    /// The f32 base, 1.5 · 2²³. One unit in the last place is 1 around it.
    pub const BASE_F32: f32 = 12_582_912.0;
    /// The f32 base for non-negative terms, 2²³. It has more trailing zero bits than [`BASE_F32`].
    pub const LOW_BASE_F32: f32 = 8_388_608.0;
    /// The f16 base, 2¹⁰, as bits in both halves of a word.
    pub const BASE_F16X2: u32 = 0x6400_6400;
    /// The bf16 base, 2⁷, as bits in both halves of a word.
    pub const BASE_BF16X2: u32 = 0x4300_4300;
}

/// Branch-free [`magnitude_code`] with ties to even, by the [`identity`], for `a` ≥ 0.
///
/// Above 2²⁰ the sums are no longer exact, but they still exceed 7. That includes infinity.
#[inline(always)]
pub fn magnitude_code_even(a: f32) -> u32 {
    use identity::BASE_F32 as BASE;
    let halves = (a * 2.0 + BASE).to_bits();
    let ones = (a + (BASE + 2.0)).to_bits();
    let twos = (a * 0.5 + (BASE + 4.0)).to_bits();
    let most = (BASE + 7.0).to_bits();
    halves.min(ones).min(twos.min(most)) & 7
}

/// [`magnitude_code_even`] in each lane of a vector, for 0 ≤ `a` ≤ 6.
///
/// Returns numbers whose low 22 bits are the codes.
#[inline(always)]
pub fn magnitude_codes_even<M: Machine>(a: M::Number) -> M::Number {
    use identity::BASE_F32 as BASE;
    // The products are exact, so each sum is rounded once.
    let halves = M::fma(a, M::splat(2.0), M::splat(BASE));
    let ones = M::add(a, M::splat(BASE + 2.0));
    let twos = M::fma(a, M::splat(0.5), M::splat(BASE + 4.0));
    M::min(M::min(halves, ones), twos)
}

/// Returns the value of a code from 0 to 7, without a table and without slow CPU subnormals.
///
/// The value of a code c ≥ 2 is the float with c's exponent and mantissa, rebased. Codes 0 and 1
/// would lack their hidden one, so they map to (½, ¾) first and are stretched to (0, ½).
#[inline(always)]
pub const fn magnitude_value(code: u32) -> f32 {
    let rebased = f32::from_bits((code + 2 * 126) << 22);
    if code < 2 { rebased + rebased - 1.0 } else { rebased }
}

/// Two E2M1 codes in a byte. The element with the lower index is in the low four bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E2m1x2(u8);

impl E2m1x2 {
    /// Packs elements 2i and 2i + 1.
    #[inline(always)]
    pub const fn new(low: E2m1, high: E2m1) -> Self {
        Self(low.0 | high.0 << 4)
    }

    /// Takes the pair from a byte.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns the byte.
    #[inline(always)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Returns element 2i.
    #[inline(always)]
    pub const fn low(self) -> E2m1 {
        E2m1(self.0 & 0xF)
    }

    /// Returns element 2i + 1.
    #[inline(always)]
    pub const fn high(self) -> E2m1 {
        E2m1(self.0 >> 4)
    }
}

/// Fills `packed` with the codes of `values`, one per byte or, with 4 bits, two.
///
/// With 4 bits the element with the lower index is in the low nibble.
#[inline(always)]
pub(crate) fn pack(packed: &mut [u8], values: &[f32], bits: usize, code: impl Fn(f32) -> u8) {
    if bits == 8 {
        packed.iter_mut().zip(values).for_each(|(byte, value)| *byte = code(*value));
        return;
    }
    for (byte, pair) in packed.iter_mut().zip(values.as_chunks::<2>().0) {
        let [low, high] = pair.map(|value| E2m1::from_bits(code(value)));
        *byte = E2m1x2::new(low, high).to_bits();
    }
}

/// Decodes codes that [`pack`] packed.
#[inline(always)]
pub(crate) fn unpack(packed: &[u8], values: &mut [f32], bits: usize, value: impl Fn(u8) -> f32) {
    if bits == 8 {
        values.iter_mut().zip(packed).for_each(|(wide, byte)| *wide = value(*byte));
        return;
    }
    for (pair, byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        let codes = E2m1x2::from_bits(*byte);
        *pair = [value(codes.low().to_bits()), value(codes.high().to_bits())];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_decodes_to_its_value_and_back() {
        for bits in 0..16u8 {
            let sign = if bits >= 8 { -1.0 } else { 1.0 };
            let value = E2m1::from_bits(bits).to_f32();
            assert_eq!(value.to_bits(), (sign * VALUES[(bits & 7) as usize]).to_bits());
            for ties in <Ties as crate::Words>::values() {
                assert_eq!(E2m1::from_f32(value, ties).to_bits(), bits);
            }
        }
    }

    #[test]
    fn ties_follow_the_specification() {
        let rounded = |ties| MIDPOINTS.map(|m| E2m1::from_f32(m, ties).to_f32());
        assert_eq!(rounded(Ties::Even), [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
        assert_eq!(rounded(Ties::Away), [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(rounded(Ties::Zero), [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn the_identity_saturates_for_any_magnitude() {
        for bits in (6f32.to_bits()..=f32::INFINITY.to_bits()).step_by(61).chain([f32::INFINITY.to_bits()]) {
            assert_eq!(magnitude_code_even(f32::from_bits(bits)), 7, "{bits:#x}");
        }
    }

    #[test]
    fn signs_saturation_and_nan() {
        assert_eq!(E2m1::from_f32(-0.0, Ties::Even).to_bits(), 8);
        assert_eq!(E2m1::from_f32(-1e-30, Ties::Even).to_bits(), 8);
        assert_eq!(E2m1::from_f32(f32::NEG_INFINITY, Ties::Even).to_bits(), 15);
        assert_eq!(E2m1::from_f32(-f32::NAN, Ties::Even).to_bits(), 7);
    }

    #[test]
    fn pairs_keep_the_lower_index_in_the_low_nibble() {
        let pair = E2m1x2::new(E2m1::from_bits(3), E2m1::from_bits(12));
        assert_eq!(pair.to_bits(), 0xC3);
        assert_eq!((pair.low().to_bits(), pair.high().to_bits()), (3, 12));
    }
}
