//! The 8-bit floats [`E4m3`] and [`E5m2`] (OCP MX v1.0, section 5.3.1; OFP8 v1.0).
//!
//! [`E4m3`] is the block scale of NVFP4 and an element of MXFP8. [`E5m2`] is MXFP8's other element.

/// Rounds the magnitude `a` ≥ 0 to a code without a sign, to nearest, ties to even.
///
/// The target has `mantissa` mantissa bits and the smallest step 2^`smallest`. `a` must not exceed
/// its largest value.
#[inline(always)]
fn magnitude_code(a: f32, mantissa: u32, smallest: i32) -> u32 {
    let bits = a.to_bits();
    let rebias = rebias(mantissa, smallest);
    let dropped = 23 - mantissa;
    let normal =
        bits.wrapping_sub(rebias).wrapping_add((1 << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
    // Below the smallest normal, the code counts smallest steps. Adding a number whose unit in the
    // last place is one step does the rounding.
    let base = ((smallest + 23 + 127) as u32) << 23;
    let subnormal = (a + f32::from_bits(base)).to_bits() - base;
    if bits < rebias + (1 << 23) { subnormal } else { normal }
}

/// Returns the exponent field below the smallest normal's.
///
/// A code counts the smallest normal, 2^(smallest + mantissa), as 1.
const fn rebias(mantissa: u32, smallest: i32) -> u32 {
    ((smallest + mantissa as i32 + 127 - 1) as u32) << 23
}

/// Returns the value of a code without a sign. The code must be a number.
#[inline(always)]
fn magnitude(code: u32, mantissa: u32, smallest: i32) -> f32 {
    let normal = f32::from_bits((code << (23 - mantissa)) + rebias(mantissa, smallest));
    let step = f32::from_bits(((smallest + 127) as u32) << 23);
    if code >> mantissa == 0 { code as f32 * step } else { normal }
}

/// Defines an FP8 type. The types differ only in these numbers.
macro_rules! fp8 {
    ($(#[$doc:meta])* $name:ident { mantissa: $mantissa:literal, smallest: $smallest:literal, max: $max:literal, largest_code: $largest:literal,
        special: $special:expr }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The largest finite value.
            pub const MAX: f32 = $max;
            /// Stored mantissa bits.
            pub const MANTISSA_BITS: u32 = $mantissa;
            /// The bits of f32 that correspond to code 0 in the range of normal numbers.
            pub const NORMAL_ZERO: u32 = rebias($mantissa, $smallest);
            /// The NaN that encoding produces.
            pub const NAN: Self = Self(0x7F);

            /// Takes the number from a byte.
            #[inline(always)]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Returns the byte.
            #[inline(always)]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Rounds to nearest, ties to even, as NVIDIA's `cvt.rn.satfinite` does.
            ///
            /// Larger values and infinities saturate at the largest finite value. NaN gives
            /// [`Self::NAN`].
            #[inline]
            pub fn from_f32(x: f32) -> Self {
                if x.is_nan() {
                    return Self::NAN;
                }
                let a = f32::from_bits(x.to_bits() & 0x7FFF_FFFF);
                let code = if a >= $max { $largest } else { magnitude_code(a, $mantissa, $smallest) };
                Self(code as u8 | (x.to_bits() >> 24) as u8 & 0x80)
            }

            /// [`Self::from_f32`] of a number that is not NaN, without branches, so that loops over
            /// it vectorize.
            #[inline(always)]
            pub fn from_number(x: f32) -> Self {
                let a = f32::from_bits(x.to_bits() & 0x7FFF_FFFF).min($max);
                Self(magnitude_code(a, $mantissa, $smallest) as u8 | (x.to_bits() >> 24) as u8 & 0x80)
            }

            /// Returns the exact value.
            #[inline]
            pub fn to_f32(self) -> f32 {
                let code = u32::from(self.0 & 0x7F);
                let special: fn(u32) -> f32 = $special;
                let a = if code > $largest { special(code) } else { magnitude(code, $mantissa, $smallest) };
                f32::from_bits(a.to_bits() | (u32::from(self.0) & 0x80) << 24)
            }

            /// Returns whether the byte is a NaN.
            #[inline(always)]
            pub fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }

            /// Returns whether the sign bit is set.
            #[inline(always)]
            pub const fn is_sign_negative(self) -> bool {
                self.0 >= 0x80
            }
        }
    };
}

fp8! {
    /// Four exponent bits (bias 7) and three mantissa bits: up to 448, in steps down to 2⁻⁹.
    ///
    /// There are no infinities. 0x7F and 0xFF are NaN.
    ///
    /// NVFP4 uses it as a block scale without its sign. A scale byte with the sign bit set is not a
    /// negative scale: IF4 uses the bit as a flag.
    E4m3 { mantissa: 3, smallest: -9, max: 448.0, largest_code: 0x7E, special: |_| f32::from_bits(0x7FC0_0000) }
}

fp8! {
    /// Five exponent bits (bias 15) and two mantissa bits: up to 57344, in steps down to 2⁻¹⁶.
    ///
    /// This is the upper half of an f16. 0x7C is infinity, 0x7D to 0x7F are NaN.
    E5m2 { mantissa: 2, smallest: -16, max: 57344.0, largest_code: 0x7B,
        special: |code| if code == 0x7C { f32::INFINITY } else { f32::from_bits(0x7FC0_0000) } }
}

impl E4m3 {
    /// 2⁻⁶, the smallest normal number.
    pub const MIN_NORMAL: Self = Self(0x08);
    /// 1.
    pub const ONE: Self = Self(0x38);
    /// 2⁻⁹, the smallest number above zero.
    pub const MIN_POSITIVE: Self = Self(0x01);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_decodes_and_encodes_to_itself() {
        for bits in 0..=255u8 {
            let (e4m3, e5m2) = (E4m3::from_bits(bits), E5m2::from_bits(bits));
            if !e4m3.is_nan() {
                assert_eq!(E4m3::from_f32(e4m3.to_f32()), e4m3);
            }
            if e5m2.to_f32().is_finite() {
                assert_eq!(E5m2::from_f32(e5m2.to_f32()), e5m2);
            }
        }
        assert_eq!((E4m3::from_bits(0x7E).to_f32(), E5m2::from_bits(0x7B).to_f32()), (448.0, 57344.0));
        assert_eq!(
            (E4m3::from_bits(0x01).to_f32(), E5m2::from_bits(0x01).to_f32()),
            (0.001953125, 1.0 / 65536.0)
        );
        assert_eq!(E4m3::MIN_NORMAL.to_f32(), 0.015625);
    }

    #[test]
    fn numbers_round_without_branches_as_with_them() {
        for bits in (0..=u32::MAX).step_by(1013) {
            let x = f32::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(E4m3::from_number(x), E4m3::from_f32(x), "{x:e}");
                assert_eq!(E5m2::from_number(x), E5m2::from_f32(x), "{x:e}");
            }
        }
        for x in [448.0, 464.0, f32::INFINITY, 57344.0, -0.0] {
            assert_eq!(E4m3::from_number(x), E4m3::from_f32(x));
            assert_eq!(E5m2::from_number(x), E5m2::from_f32(x));
        }
    }

    #[test]
    fn saturation_signs_and_nan() {
        for (x, e4m3, e5m2) in [
            (f32::INFINITY, 0x7E, 0x7B),
            (f32::NEG_INFINITY, 0xFE, 0xFB),
            (1e30, 0x7E, 0x7B),
            (-0.0, 0x80, 0x80),
            (-1e-30, 0x80, 0x80),
            (-f32::NAN, 0x7F, 0x7F),
        ] {
            assert_eq!((E4m3::from_f32(x).to_bits(), E5m2::from_f32(x).to_bits()), (e4m3, e5m2), "{x}");
        }
        assert!(
            E4m3::from_bits(0xFF).is_nan()
                && E5m2::from_bits(0x7D).is_nan()
                && !E5m2::from_bits(0x7C).is_nan()
        );
    }
}
