//! The GPU's own instructions for the arithmetic that `microscale_formats` leaves to the processor.

use microscale_formats::arithmetic::Fused;

use crate::hardware::ptx;

/// Divides by 2^`bits`: the quotient and the remainder.
#[inline(always)]
pub(crate) fn divide_by_power(number: u32, bits: u32) -> (u32, u32) {
    (number >> bits, number & ((1 << bits) - 1))
}

/// The GPU's own instructions.
pub(crate) struct Ptx;

impl Fused for Ptx {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        ptx::fma_f32(a, b, c)
    }

    #[inline(always)]
    fn min(a: f32, b: f32) -> f32 {
        a.min(b)
    }
}
