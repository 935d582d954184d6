//! The types of block scales: their size, their valid bits and the values of those.

use crate::{Bf16, E4m3, E8m0};

/// The type of a format's block scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// A power of two in one byte: [`E8m0`].
    E8m0,
    /// E4M3 without a sign, in one byte: [`E4m3`].
    ///
    /// A byte with the sign bit set is not a scale and is refused. Tensors with such bytes mean
    /// something else: IF4 uses the bit as a flag.
    E4m3,
    /// [`Bf16`] without a sign, in two bytes. Infinities count as NaN.
    Bf16,
}

impl ScaleType {
    /// Returns the bytes of a scale. Scales are little-endian.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::E8m0 | Self::E4m3 => 1,
            Self::Bf16 => 2,
        }
    }

    /// Reads the bits of a scale from its [`Self::bytes`] bytes.
    #[inline]
    pub fn read(self, bytes: &[u8]) -> u16 {
        match self {
            Self::E8m0 | Self::E4m3 => bytes[0].into(),
            Self::Bf16 => u16::from_le_bytes([bytes[0], bytes[1]]),
        }
    }

    /// Writes a scale's bits to its [`Self::bytes`] bytes.
    #[inline]
    pub fn write(self, bits: u16, bytes: &mut [u8]) {
        bytes.copy_from_slice(&bits.to_le_bytes()[..self.bytes()]);
    }

    /// Returns the bits of the NaN scale that marks a NaN block.
    #[inline]
    pub const fn nan(self) -> u16 {
        match self {
            Self::E8m0 => E8m0::NAN.to_bits() as u16,
            Self::E4m3 => E4m3::NAN.to_bits() as u16,
            Self::Bf16 => Bf16::NAN.to_bits(),
        }
    }

    /// Returns the bits of the largest scale.
    #[inline]
    pub const fn largest(self) -> u16 {
        match self {
            Self::E8m0 => E8m0::NAN.to_bits() as u16 - 1,
            Self::E4m3 => E4m3::NAN.to_bits() as u16 - 1,
            Self::Bf16 => Bf16::MAX.to_bits(),
        }
    }

    /// Returns whether the bits are a NaN.
    #[inline]
    pub fn is_nan(self, bits: u16) -> bool {
        match self {
            Self::E8m0 => E8m0::from_bits(bits as u8).is_nan(),
            Self::E4m3 => E4m3::from_bits(bits as u8).is_nan(),
            Self::Bf16 => Bf16::from_bits(bits).is_nan(),
        }
    }

    /// Returns whether the bits are a valid block scale. NaN is valid.
    #[inline]
    pub const fn is_scale(self, bits: u16) -> bool {
        match self {
            Self::E8m0 => true,
            Self::E4m3 => !E4m3::from_bits(bits as u8).is_sign_negative(),
            Self::Bf16 => !Bf16::from_bits(bits).is_sign_negative(),
        }
    }

    /// Returns the number that the bits encode.
    #[inline]
    pub fn value(self, bits: u16) -> f32 {
        match self {
            Self::E8m0 => E8m0::from_bits(bits as u8).to_f32(),
            Self::E4m3 => E4m3::from_bits(bits as u8).to_f32(),
            Self::Bf16 => Bf16::from_bits(bits).to_f32(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_is_nan_or_finite() {
        for scale in [ScaleType::E8m0, ScaleType::E4m3, ScaleType::Bf16] {
            assert!(scale.is_nan(scale.nan()) && scale.is_scale(scale.nan()));
            for bits in 0..=(u16::MAX >> (16 - 8 * scale.bytes())) {
                let mut bytes = [0; 2];
                scale.write(bits, &mut bytes[..scale.bytes()]);
                assert_eq!(scale.read(&bytes), bits);
                assert_eq!(scale.is_nan(bits), scale.value(bits).is_nan(), "{scale:?} {bits:#x}");
                if scale.is_scale(bits) && !scale.is_nan(bits) {
                    let value = scale.value(bits);
                    assert!((0.0..=scale.value(scale.largest())).contains(&value), "{scale:?} {bits:#x}");
                    assert!(value.is_finite());
                }
            }
        }
    }
}
