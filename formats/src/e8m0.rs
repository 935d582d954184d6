//! E8M0, the power-of-two block scale of the MX formats (OCP MX v1.0, section 5.4.1).
//!
//! Byte b is 2^(b − 127), and 255 is NaN.

/// A block scale 2^(b − 127), stored as the byte b; 255 is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E8m0(u8);

impl E8m0 {
    /// The only value that is not a power of two.
    pub const NAN: Self = Self(255);
    /// 2^−127, also the scale of an all-zero block.
    pub const MIN: Self = Self(0);

    /// Takes the scale from a byte.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns the byte.
    #[inline(always)]
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Returns whether the byte is 255.
    #[inline(always)]
    pub const fn is_nan(self) -> bool {
        self.0 == 255
    }

    /// Returns the exact value: NaN for 255, and the subnormal 2^−127 for 0.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        f32::from_bits(match self.0 {
            0 => 0x0040_0000,
            255 => 0x7FC0_0000,
            b => (b as u32) << 23,
        })
    }

    /// Returns the exact reciprocal 2^(127 − b), or NaN for 255.
    ///
    /// Multiplying by it divides by the scale exactly.
    #[inline(always)]
    pub const fn reciprocal(self) -> f32 {
        f32::from_bits(match self.0 {
            254 => 0x0040_0000,
            255 => 0x7FC0_0000,
            b => (254 - b as u32) << 23,
        })
    }

    /// Branch-free [`Self::reciprocal`] of a scale that is not NaN.
    #[inline(always)]
    pub fn reciprocal_of_number(self) -> f32 {
        // The reciprocal of 2^127 is a subnormal number. The maximum supplies it.
        f32::from_bits(254u32.wrapping_sub(self.0.into()).wrapping_mul(1 << 23).max(0x0040_0000))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_reciprocal() {
        for bits in 0..255 {
            let scale = E8m0::from_bits(bits);
            assert_eq!(scale.reciprocal_of_number().to_bits(), scale.reciprocal().to_bits());
        }
    }

    #[test]
    fn every_byte_is_its_power_of_two() {
        for bits in 0..=254u8 {
            let scale = E8m0::from_bits(bits);
            let exact = f64::powi(2.0, bits as i32 - 127);
            assert_eq!(scale.to_f32() as f64, exact);
            assert_eq!(scale.reciprocal() as f64, 1.0 / exact);
        }
        assert!(E8m0::NAN.is_nan() && E8m0::NAN.to_f32().is_nan() && E8m0::NAN.reciprocal().is_nan());
    }
}
