//! Dtypes of unquantized values, with exact conversions to and from f64.

use half::{bf16, f16};
use microscale::Element;

use super::element::power_of_two;

/// An element with its exact conversions to and from f64.
pub trait Exact: Element {
    /// The largest finite value.
    const LARGEST: f64;
    /// The exponent of the smallest subnormal.
    const SMALLEST_EXPONENT: i32;
    /// Bits of the type.
    const BITS: u32;

    /// Widens to f64.
    fn to_f64(self) -> f64;

    /// Rounds to nearest, ties to even. NaN gives the canonical quiet NaN.
    fn round_f64(value: f64) -> Self;

    /// Makes a number from the low bits.
    fn of_bits(bits: u32) -> Self;

    /// Returns the bits.
    fn bits(self) -> u32;
}

impl Exact for f32 {
    const LARGEST: f64 = f32::MAX as f64;
    const SMALLEST_EXPONENT: i32 = -149;
    const BITS: u32 = 32;

    fn to_f64(self) -> f64 {
        self.into()
    }

    fn round_f64(value: f64) -> Self {
        if value.is_nan() { f32::from_bits(0x7FC0_0000) } else { value as f32 }
    }

    fn of_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

/// Returns the distance of neighbouring floats of `mantissa` stored bits at a value.
///
/// The distance is at least 2^`smallest`.
fn step_at(value: f64, smallest: i32, mantissa: i32) -> f64 {
    let exponent = (value.to_bits() >> 52 & 0x7FF) as i32 - 1023;
    power_of_two((exponent - mantissa).max(smallest))
}

/// Implements both 16-bit types. Exact conversions are the `half` crate's.
macro_rules! exact_16_bit {
    ($type:ident, $largest:expr, $mantissa:literal, $bias:literal, $nan:literal) => {
        impl Exact for $type {
            const LARGEST: f64 = $largest;
            const SMALLEST_EXPONENT: i32 = 1 - $bias - $mantissa;
            const BITS: u32 = 16;

            fn to_f64(self) -> f64 {
                $type::to_f64(self)
            }

            fn round_f64(value: f64) -> Self {
                // half 2.7 reads only the upper half of an f64, and treats values just next to a
                // tie as the tie.
                let step = step_at(value, 1 - $bias - $mantissa, $mantissa);
                let rounded = if value.is_finite() { (value / step).round_ties_even() * step } else { value };
                if value.is_nan() { $type::from_bits($nan) } else { $type::from_f64(rounded) }
            }

            fn of_bits(bits: u32) -> Self {
                $type::from_bits(bits as u16)
            }

            fn bits(self) -> u32 {
                self.to_bits().into()
            }
        }
    };
}
exact_16_bit!(f16, 65504.0, 10, 15, 0x7E00);
exact_16_bit!(bf16, 255.0 / 128.0 * (1u128 << 127) as f64, 7, 127, 0x7FC0);
