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

use microscale_formats::arithmetic::Machine;

use super::halfwords::HalfwordVector;
use super::tokens::{LANES, Lanes};
use crate::element::{Dtype, Element};

/// Vectors of an instruction set. As a [`Machine`] it has their arithmetic.
pub(in crate::cpu) trait Vector: Machine + HalfwordVector<Bits: Copy> {
    /// True if [`Machine::fma`] is an instruction.
    const FUSED: bool = true;

    /// Loads a vector from memory.
    fn load(lanes: &Lanes<f32>) -> Self::Number;

    /// Stores a vector to memory.
    fn store(vector: Self::Number) -> Lanes<f32>;

    /// The numbers with an even index, and the others, of two vectors after each other.
    fn deinterleave(a: Self::Number, b: Self::Number) -> (Self::Number, Self::Number);

    /// One number in the first half, one in the second.
    fn halves(first: f32, second: f32) -> Self::Number;

    /// The bits of numbers.
    fn bits(numbers: Self::Number) -> Self::Bits;

    /// The numbers of bits.
    fn number(bits: Self::Bits) -> Self::Number;

    /// The same bits in every lane.
    fn splat_bits(bits: u32) -> Self::Bits;

    /// a & b
    fn and(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// a | b
    fn or(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The bits of `set` where the mask has ones, and those of `unset` where it has zeros.
    #[inline(always)]
    fn select_bits(mask: Self::Bits, set: Self::Bits, unset: Self::Bits) -> Self::Bits {
        Self::or(Self::and(mask, set), Self::and_not(mask, unset))
    }

    /// !a & b
    fn and_not(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// bits << by
    fn shift_left(bits: Self::Bits, by: u32) -> Self::Bits;

    /// bits >> by
    fn shift_right(bits: Self::Bits, by: u32) -> Self::Bits;

    /// The larger, as integers.
    fn max_bits(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The larger ones of the two halves of a, and after them those of b.
    fn fold_max(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// The largest of each half of the vectors, in order.
    fn max_of_halves(vectors: &[Self::Bits; LANES / 2]) -> Self::Bits;

    /// a + b, without carry.
    fn add_bits(a: Self::Bits, b: Self::Bits) -> Self::Bits;

    /// Bit i for lane i: where a > b, both below 2^31.
    fn above(a: Self::Bits, b: Self::Bits) -> u16;

    /// The bits of numbers that are not negative, rounded to f16, to nearest, ties to even.
    fn f32_to_f16(numbers: Self::Number) -> Self::Bits;

    /// The numbers that f16 are, which are not negative, by their bits.
    fn f16_to_f32(bits: Self::Bits) -> Self::Number;

    /// The bits of numbers that are not negative, nor NaN, rounded to a 16-bit dtype.
    #[inline(always)]
    fn narrow<T: Element>(numbers: Self::Number) -> Self::Bits {
        if T::DTYPE == Dtype::F16 {
            return Self::f32_to_f16(numbers);
        }
        let bits = Self::bits(numbers);
        let odd = Self::and(Self::shift_right(bits, 16), Self::splat_bits(1));
        Self::shift_right(Self::add_bits(Self::add_bits(bits, odd), Self::splat_bits(0x7FFF)), 16)
    }

    /// The numbers of a 16-bit dtype that are not negative, by their bits.
    #[inline(always)]
    fn widen<T: Element>(bits: Self::Bits) -> Self::Number {
        if T::DTYPE == Dtype::F16 {
            return Self::f16_to_f32(bits);
        }
        Self::number(Self::shift_left(bits, 16))
    }

    /// The low byte of each lane.
    fn low_bytes(bits: Self::Bits) -> Lanes<u8>;

    /// The smaller of |a| and b ≥ 0.
    #[inline(always)]
    fn min_magnitude(a: Self::Number, b: Self::Number) -> Self::Number {
        Self::min(Self::number(Self::and(Self::bits(a), Self::splat_bits(0x7FFF_FFFF))), b)
    }

    /// a / b
    fn div(a: Self::Number, b: Self::Number) -> Self::Number;

    /// Bit i for lane i: where a ≤ b.
    fn at_most(a: Self::Number, b: Self::Number) -> u16;

    /// The lanes of `set` whose bits are set in the mask, and those of `unset`.
    fn select(mask: u16, set: Self::Number, unset: Self::Number) -> Self::Number;
}

#[cfg(test)]
mod tests;
