//! Sixteen f32 or u32 at a time: one trait, and one file per instruction set.
//!
//! Methods compile to single instructions within the instances of `dispatch`, which enable the
//! instruction set. Everything between an instance and a method must be `inline(always)`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use super::halfwords::HalfwordVector;
use super::tokens::{LANES, Lanes};
use crate::element::{Dtype, Element};

/// Vectors of sixteen f32, `Number`, and of sixteen u32, `Bits`.
///
/// The implementing type is a token: a value of it proves that the CPU has the instruction set.
pub(in crate::cpu) trait Vector: HalfwordVector<Bits: Copy> {
    /// Sixteen f32.
    type Number: Copy;

    /// True if [`Self::fma`] is one instruction.
    const FUSED: bool = true;

    /// Returns the token without detection.
    ///
    /// # Safety
    /// The CPU has the instruction set, as the token's `detect` would find.
    unsafe fn assume_detected() -> Self;

    /// Puts one number into every lane.
    fn splat(self, x: f32) -> Self::Number;

    /// a · b
    fn mul(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// a + b
    fn add(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// a − b
    fn sub(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// a · b + c, rounded once.
    fn fma(self, a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;

    /// c − a · b, rounded once.
    fn fnma(self, a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;

    /// `if a < b { a } else { b }`
    fn min(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// `if a > b { a } else { b }`
    fn max(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// Loads a vector from memory.
    fn load(self, lanes: &Lanes<f32>) -> Self::Number;

    /// Stores a vector to memory.
    fn store(self, vector: Self::Number) -> Lanes<f32>;

    /// Splits two vectors into the numbers with an even and with an odd index.
    fn deinterleave(self, a: Self::Number, b: Self::Number) -> (Self::Number, Self::Number);

    /// Fills the first half with one number and the second with another.
    fn halves(self, first: f32, second: f32) -> Self::Number;

    /// Reinterprets f32 as u32.
    fn bits(self, numbers: Self::Number) -> Self::Bits;

    /// Reinterprets u32 as f32.
    fn number(self, bits: Self::Bits) -> Self::Number;

    /// Puts the same bits into every lane.
    fn splat_bits(self, bits: u32) -> Self::Bits;

    /// a & b
    fn and(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// a | b
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// Takes the bits of `set` where the mask has ones, and the bits of `unset` elsewhere.
    #[inline(always)]
    fn select_bits(self, mask: Self::Bits, set: Self::Bits, unset: Self::Bits) -> Self::Bits {
        self.or(self.and(mask, set), self.and_not(mask, unset))
    }

    /// !a & b
    fn and_not(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// bits << by
    fn shift_left(self, bits: Self::Bits, by: u32) -> Self::Bits;

    /// bits >> by
    fn shift_right(self, bits: Self::Bits, by: u32) -> Self::Bits;

    /// The larger integer of each lane.
    fn max_bits(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The maxima of the lanes `i` and `i + 8`: of `a`, then of `b`.
    fn fold_max(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The largest integer of each half of each vector, in order.
    fn max_of_halves(self, vectors: &[Self::Bits; LANES / 2]) -> Self::Bits;

    /// a + b, wrapping.
    fn add_bits(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// Truncates numbers to signed integers. Magnitudes must be below 2^31, and none may be NaN.
    fn truncate(self, numbers: Self::Number) -> Self::Bits;

    /// Bit `i` is set where a > b in lane `i`. Both must be below 2^31.
    fn above(self, a: Self::Bits, b: Self::Bits) -> u16;

    /// Rounds non-negative numbers to f16, to nearest, ties to even.
    fn f32_to_f16(self, numbers: Self::Number) -> Self::Bits;

    /// Widens non-negative f16.
    fn f16_to_f32(self, bits: Self::Bits) -> Self::Number;

    /// Rounds numbers that are neither negative nor NaN to a 16-bit dtype.
    #[inline(always)]
    fn narrow<T: Element>(self, numbers: Self::Number) -> Self::Bits {
        if T::DTYPE == Dtype::F16 {
            return self.f32_to_f16(numbers);
        }
        let bits = self.bits(numbers);
        let odd = self.and(self.shift_right(bits, 16), self.splat_bits(1));
        self.shift_right(self.add_bits(self.add_bits(bits, odd), self.splat_bits(0x7FFF)), 16)
    }

    /// Widens non-negative values of a 16-bit dtype.
    #[inline(always)]
    fn widen<T: Element>(self, bits: Self::Bits) -> Self::Number {
        if T::DTYPE == Dtype::F16 {
            return self.f16_to_f32(bits);
        }
        self.number(self.shift_left(bits, 16))
    }

    /// Widens each element of a block to f32. The compiler vectorizes the default.
    #[inline(always)]
    fn widen_block<T: Element, const N: usize>(self, block: &[T; N]) -> [f32; N] {
        let mut wide = [0.0; N];
        for (wide, value) in wide.iter_mut().zip(block) {
            *wide = value.to_f32();
        }
        wide
    }

    /// The low byte of each lane.
    fn low_bytes(self, bits: Self::Bits) -> Lanes<u8>;

    /// The smaller of |a| and b, for b ≥ 0.
    #[inline(always)]
    fn min_magnitude(self, a: Self::Number, b: Self::Number) -> Self::Number {
        self.min(self.number(self.and(self.bits(a), self.splat_bits(0x7FFF_FFFF))), b)
    }

    /// a / b
    fn div(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// Bit `i` is set where a ≤ b in lane `i`.
    fn at_most(self, a: Self::Number, b: Self::Number) -> u16;

    /// Takes the lanes of `set` whose mask bits are set, and the lanes of `unset` elsewhere.
    fn select(self, mask: u16, set: Self::Number, unset: Self::Number) -> Self::Number;
}

#[cfg(test)]
mod tests;
