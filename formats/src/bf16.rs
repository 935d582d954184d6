//! bf16 as a block scale: the upper half of an f32.

/// A block scale in bf16. Scales have no sign; that of negative numbers is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// The NaN of blocks that become NaN.
    pub const NAN: Self = Self(0x7FC0);
    /// The largest finite value, 2^128 − 2^120.
    pub const MAX: Self = Self(0x7F7F);

    /// The scale of these bits.
    #[inline]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The bits.
    #[inline]
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// Returns whether the scale is no number: NaN, or an infinity, under which a block would be lost too.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7F80 == 0x7F80
    }

    /// Returns whether the sign bit is set.
    #[inline]
    pub const fn is_sign_negative(self) -> bool {
        self.0 >> 15 == 1
    }

    /// The exact value; NaN for bits that [are no number](Self::is_nan).
    #[inline]
    pub const fn to_f32(self) -> f32 {
        if self.is_nan() { f32::from_bits(0x7FC0_0000) } else { f32::from_bits((self.0 as u32) << 16) }
    }

    /// Rounds a finite number that is not negative to nearest, ties to even. Numbers above the largest scale
    /// become that scale.
    #[inline]
    pub const fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        // Half a unit of what is left, less one bit if what is left is even.
        let rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        if rounded > Self::MAX.0 { Self::MAX } else { Self(rounded) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_its_own_nearest() {
        for bits in 0..=Bf16::MAX.to_bits() {
            let scale = Bf16::from_bits(bits);
            assert_eq!(Bf16::from_f32(scale.to_f32()), scale);
            if scale == Bf16::MAX {
                continue;
            }
            let middle = f32::from_bits(u32::from(bits) << 16 | 0x8000);
            let around = [-1, 0, 1].map(|step| f32::from_bits(middle.to_bits().wrapping_add_signed(step)));
            let even = bits + (bits & 1);
            assert_eq!(around.map(|x| Bf16::from_f32(x).to_bits()), [bits, even, bits + 1]);
        }
        assert_eq!(Bf16::from_f32(f32::MAX), Bf16::MAX);
    }
}
