//! Dtypes of unquantized values (f32, f16 and bf16): the trait [`Element`] and its conversions.

use half::{bf16, f16};
pub use microscale_formats::Dtype;

/// A value rounded to a dtype and widened again.
pub fn narrow(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::F16 => <f16 as Element>::from_f32(value).to_f32(),
        Dtype::Bf16 => <bf16 as Element>::from_f32(value).to_f32(),
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Bound for elements in GPU memory. Without the feature `cuda` it requires nothing.
#[cfg(feature = "cuda")]
mod device {
    pub trait OnDevice: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits {}
    impl<T: cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits> OnDevice for T {}
}
#[cfg(not(feature = "cuda"))]
mod device {
    pub trait OnDevice {}
    impl<T> OnDevice for T {}
}

/// Converts the bits of a 16-bit element to f32.
#[inline(always)]
pub(crate) fn halfword_to_f32<T: Element>(halfword: u16) -> f32 {
    bytemuck::cast::<_, T>(halfword).to_f32()
}

/// Returns the bits of a 16-bit element, rounded as in [`Element::from_f32`].
#[inline(always)]
pub(crate) fn halfword_from_f32<T: Element>(value: f32) -> u16 {
    bytemuck::cast(T::from_f32(value))
}

/// A type to quantize from and dequantize to: `f32`, [`half::f16`], [`half::bf16`].
pub trait Element:
    sealed::Sealed + device::OnDevice + bytemuck::Pod + Default + Send + Sync + std::fmt::Debug
{
    /// The dtype.
    const DTYPE: Dtype;
    /// The largest finite value, as f32.
    const MAX: f32;
    /// Bits of a significand, including the hidden one.
    const SIGNIFICAND: u32;

    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;

    /// Rounds to nearest, ties to even.
    ///
    /// Rounding turns NaN into the canonical quiet NaN. f32 stays unchanged.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const MAX: f32 = f32::MAX;
    const SIGNIFICAND: u32 = f32::MANTISSA_DIGITS;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    const MAX: f32 = f32::from_bits(0x7F7F_0000);
    const SIGNIFICAND: u32 = bf16::MANTISSA_DIGITS;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Branch-free, so that loops over it vectorize: half's own conversion tests for NaN first.
        let bits = value.to_bits();
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        Self::from_bits(if value.is_nan() { 0x7FC0 } else { rounded })
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    const MAX: f32 = 65504.0;
    const SIGNIFICAND: u32 = f16::MANTISSA_DIGITS;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        // Branch-free: shift the magnitude into place and rebias. Subnormals lack the hidden one,
        // which is subtracted.
        let magnitude = (self.to_bits() as u32 & 0x7FFF) << 13;
        let sign = (self.to_bits() as u32 & 0x8000) << 16;
        let rebias = (127 - 15) << 23;
        let normal = magnitude + rebias;
        let subnormal = (f32::from_bits(normal + (1 << 23)) - f32::from_bits(rebias + (1 << 23))).to_bits();
        let non_finite = normal + rebias;
        let bits = if magnitude < 1 << 23 { subnormal } else { normal };
        let bits = if magnitude >= 0x1F << 23 { non_finite } else { bits };
        f32::from_bits(bits | sign)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // Branch-free too. For normal results: rebias, add just under half a unit, drop 13 bits.
        // For subnormal results, adding ½ does the rounding, because its unit in the last place is
        // f16's smallest step.
        let magnitude = value.to_bits() & 0x7FFF_FFFF;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + (magnitude >> 13 & 1)) >> 13;
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
        let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
        let bits = if magnitude >= (127 + 16) << 23 { 0x7C00 } else { finite };
        let sign = (value.to_bits() >> 16) & 0x8000;
        Self::from_bits(if value.is_nan() { 0x7E00 } else { (bits | sign) as u16 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_agrees_with_half_on_every_value() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            let same = |ours: f32, theirs: f32| {
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan())
            };
            assert!(same(Element::to_f32(h), h.to_f32()), "f16 {bits:#06x}");
            assert!(same(Element::to_f32(b), b.to_f32()), "bf16 {bits:#06x}");
        }
    }

    #[test]
    fn narrowing_agrees_with_half() {
        for i in 0..=u16::MAX as u32 {
            for low in [0u32, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(i << 16 | low);
                let (h, b) = (<f16 as Element>::from_f32(value), <bf16 as Element>::from_f32(value));
                if value.is_nan() {
                    assert_eq!((h.to_bits(), b.to_bits()), (0x7E00, 0x7FC0));
                } else {
                    assert_eq!((h, b), (f16::from_f32(value), bf16::from_f32(value)), "{value:e}");
                }
            }
        }
    }
}
