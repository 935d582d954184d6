//! E3M0, a 4-bit element without a mantissa: a sign and three exponent bits, with bias 3.
//!
//! It has neither infinities nor NaN. E3M0 follows from the element rules of the OCP MX
//! specification for these widths, as microxcaling's `_quantize_elemwise_core` implements them for
//! three exponent bits and no mantissa. Exponent field 0 holds the subnormal numbers, which are
//! only 0, and the largest field is a number. The magnitudes are 0 and the powers of two from ¼ to
//! 16.

/// The magnitudes of codes 0 to 7. Bit 3 of a code is the sign.
pub const VALUES: [f32; 8] = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];

/// `MIDPOINTS[i]` lies halfway between `VALUES[i]` and `VALUES[i + 1]`: the ties.
pub const MIDPOINTS: [f32; 7] = [0.125, 0.375, 0.75, 1.5, 3.0, 6.0, 12.0];

/// One E3M0 code, in the low four bits of a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E3m0(u8);

impl E3m0 {
    /// Takes the code from the low four bits. The high four bits are ignored.
    #[inline]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xF)
    }

    /// Returns the code, 0 to 15.
    #[inline]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Rounds to the nearest code, saturating at ±16.
    ///
    /// Zero, and values that round to it, keep their sign. NaN gives code 7 without a sign, as with
    /// [`E2m1`](crate::E2m1).
    ///
    /// A tie goes to the even neighbour, which is 0 if 0 is one of the two, and otherwise to the
    /// larger magnitude. Both neighbours then have the significand 1, and for that case IEEE
    /// 754-2019 (4.3.1) has roundTiesToEven take the larger. microxcaling's `round="even"` does the
    /// same.
    #[inline]
    pub fn from_f32(x: f32) -> Self {
        if x.is_nan() {
            return Self(7);
        }
        let (magnitude, sign) = (x.abs(), (x.to_bits() >> 28) as u8 & 8);
        let [to_zero, others @ ..] = MIDPOINTS;
        let passed = others.iter().filter(|midpoint| magnitude >= **midpoint).count() as u8;
        Self(sign | (passed + u8::from(magnitude > to_zero)))
    }

    /// Returns the exact value.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let magnitude = VALUES[(self.0 & 7) as usize];
        if self.0 & 8 == 0 { magnitude } else { -magnitude }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_decodes_to_its_value_and_back() {
        for bits in 0..16u8 {
            let value = E3m0::from_bits(bits).to_f32();
            let exponent = i32::from(bits & 7);
            let magnitude = if exponent == 0 { 0.0 } else { f32::powi(2.0, exponent - 3) };
            assert_eq!((value.abs(), value.is_sign_negative()), (magnitude, bits >= 8));
            assert_eq!(E3m0::from_f32(value).to_bits(), bits);
        }
    }

    #[test]
    fn ties_go_to_zero_or_up() {
        for (i, midpoint) in MIDPOINTS.into_iter().enumerate() {
            assert_eq!(midpoint, (VALUES[i] + VALUES[i + 1]) / 2.0);
            let code = |x: f32| usize::from(E3m0::from_f32(x).to_bits());
            let below = f32::from_bits(midpoint.to_bits() - 1);
            let above = f32::from_bits(midpoint.to_bits() + 1);
            let tie = if i == 0 { 0 } else { i + 1 };
            assert_eq!([below, midpoint, above].map(code), [i, tie, i + 1]);
        }
    }

    #[test]
    fn signs_saturation_and_nan() {
        let code = |x| E3m0::from_f32(x).to_bits();
        assert_eq!([-0.0, -1e-30, -0.125].map(code), [8; 3]);
        assert_eq!([17.0, 1e30, f32::INFINITY].map(code), [7; 3]);
        assert_eq!([f32::NEG_INFINITY, f32::NAN, -f32::NAN].map(code), [15, 7, 7]);
    }
}
