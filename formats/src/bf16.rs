//! bf16 as a block scale: the upper half of an f32.

/// A block scale in bf16. Scales have no sign: the bits of a negative number are not a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Bf16(u16);

impl Bf16 {
    /// The NaN that marks a NaN block.
    pub const NAN: Self = Self(0x7FC0);
    /// The largest finite value, 2^128 − 2^120.
    pub const MAX: Self = Self(0x7F7F);

    /// Reinterprets `bits` as a scale.
    #[inline]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Returns the bits.
    #[inline]
    pub const fn to_bits(self) -> u16 {
        self.0
    }

    /// Returns whether the scale is NaN or infinite. An infinite scale would lose its block too.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7F80 == 0x7F80
    }

    /// Returns whether the sign bit is set.
    #[inline]
    pub const fn is_sign_negative(self) -> bool {
        self.0 >> 15 == 1
    }

    /// Returns the exact value, or NaN for bits that [are no number](Self::is_nan).
    #[inline]
    pub const fn to_f32(self) -> f32 {
        if self.is_nan() { f32::from_bits(0x7FC0_0000) } else { f32::from_bits((self.0 as u32) << 16) }
    }

    /// Rounds a finite non-negative number to nearest, ties to even, saturating at [`Self::MAX`].
    #[inline]
    pub const fn from_f32(x: f32) -> Self {
        let bits = x.to_bits();
        // Adds half a unit of the kept bits, less one bit if the kept part is even.
        let rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        if rounded > Self::MAX.0 { Self::MAX } else { Self(rounded) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_rounds_to_itself() {
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
