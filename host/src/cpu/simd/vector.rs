//! Sixteen f32 at a time, for what the compiler does not turn into vector instructions by itself: one trait,
//! and a thin file for each instruction set.
//!
//! The methods of the x86-64 types compile to single instructions in functions that have the features
//! enabled, which are the instances of `isa`; everything between is `inline(always)`.

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

    /// Returns the token without detecting anything.
    ///
    /// # Safety
    /// The CPU has the instruction set, as the token's `detect` finds out.
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

    /// The numbers with an even index, and the others, of two vectors after each other.
    fn deinterleave(self, a: Self::Number, b: Self::Number) -> (Self::Number, Self::Number);

    /// One number in the first half, one in the second.
    fn halves(self, first: f32, second: f32) -> Self::Number;

    /// The bits of numbers.
    fn bits(self, numbers: Self::Number) -> Self::Bits;

    /// The numbers of bits.
    fn number(self, bits: Self::Bits) -> Self::Number;

    /// The same bits in every lane.
    fn splat_bits(self, bits: u32) -> Self::Bits;

    /// a & b
    fn and(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// a | b
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The bits of `set` where the mask has ones, and those of `unset` where it has zeros.
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

    /// The larger, as integers.
    fn max_bits(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The larger ones of the two halves of a, and after them those of b.
    fn fold_max(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The largest of each half of the vectors, in order.
    fn max_of_halves(self, vectors: &[Self::Bits; LANES / 2]) -> Self::Bits;

    /// a + b, without carry.
    fn add_bits(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// Bit i for lane i: where a > b, both below 2^31.
    fn above(self, a: Self::Bits, b: Self::Bits) -> u16;

    /// The bits of numbers that are not negative, rounded to f16, to nearest, ties to even.
    fn f32_to_f16(self, numbers: Self::Number) -> Self::Bits;

    /// The numbers that f16 are, which are not negative, by their bits.
    fn f16_to_f32(self, bits: Self::Bits) -> Self::Number;

    /// The bits of numbers that are not negative, nor NaN, rounded to a 16-bit dtype.
    #[inline(always)]
    fn narrow<T: Element>(self, numbers: Self::Number) -> Self::Bits {
        if T::DTYPE == Dtype::F16 {
            return self.f32_to_f16(numbers);
        }
        let bits = self.bits(numbers);
        let odd = self.and(self.shift_right(bits, 16), self.splat_bits(1));
        self.shift_right(self.add_bits(self.add_bits(bits, odd), self.splat_bits(0x7FFF)), 16)
    }

    /// The numbers of a 16-bit dtype that are not negative, by their bits.
    #[inline(always)]
    fn widen<T: Element>(self, bits: Self::Bits) -> Self::Number {
        if T::DTYPE == Dtype::F16 {
            return self.f16_to_f32(bits);
        }
        self.number(self.shift_left(bits, 16))
    }

    /// The exact f32 of each element of a block. By default element by element, which the compiler vectorizes.
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

    /// The smaller of |a| and b ≥ 0.
    #[inline(always)]
    fn min_magnitude(self, a: Self::Number, b: Self::Number) -> Self::Number {
        self.min(self.number(self.and(self.bits(a), self.splat_bits(0x7FFF_FFFF))), b)
    }

    /// a / b
    fn div(self, a: Self::Number, b: Self::Number) -> Self::Number;

    /// Bit i for lane i: where a ≤ b.
    fn at_most(self, a: Self::Number, b: Self::Number) -> u16;

    /// The lanes of `set` whose bits are set in the mask, and those of `unset`.
    fn select(self, mask: u16, set: Self::Number, unset: Self::Number) -> Self::Number;
}

#[cfg(test)]
mod tests;
