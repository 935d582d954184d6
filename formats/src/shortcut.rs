//! The shortcut by which the kernels scale and round 16-bit values to NVFP4, with a product and ten more
//! bits.
//!
//! A convention's quotient x / d or product x · r, rounded to f32, matters only in how it compares with the
//! midpoints of E2M1. Those are powers of two times 1, 1.25, 1.5 or 1.75. The values x are short, of 8 or 11
//! bits, so for each d few of them come near a midpoint, and whether a cheaper arithmetic decides these as
//! the definition does can be tried out.
//!
//! The cheaper one multiplies by a factor near 1/d, cuts the product to the 11 bits of f16, sets the last of
//! them or not, and rounds to E2M1 with ties to even. The cut puts products just above a midpoint on it. From
//! midpoints of 1 and 1.25 even is down, so there the last bit must be set, unless the midpoint itself is
//! met; from the others it is up, so it may be set or not. The last bit of the factor says which.
//!
//! Scaling goes by powers of two as block scales do, so the eight mantissas of E4M3 stand for all its normal
//! numbers.

use crate::E4m3;
use crate::nvfp4::{Quantizer, Scaling};

/// Mantissas of block scales.
pub const NV_MANTISSAS: usize = 8;

/// Bits of an f32 that f16 has no place for.
const CUT: u32 = (1 << 13) - 1;

/// The factors of a tensor for the block scales 1, 1.125 and so on to 1.875.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct NvShortcut {
    /// Each as the bits of an f32 whose last bit also says whether to set the last bit of products.
    pub factors: [u32; NV_MANTISSAS],
    /// 1 if there is one for each mantissa.
    pub complete: u32,
}

impl NvShortcut {
    /// Makes the shortcut for values of a dtype with `significand` bits, 8 or 11; there is none for others.
    pub fn new(quantizer: &Quantizer, significand: u32) -> Self {
        let mut shortcut = Self { complete: u32::from(significand <= 11), ..Self::default() };
        if shortcut.complete != 0 {
            for (mantissa, factor) in (0..).zip(&mut shortcut.factors) {
                let found = nv_factor(quantizer, significand, mantissa);
                shortcut.complete &= u32::from(found.is_some());
                *factor = found.unwrap_or_default();
            }
        }
        shortcut
    }
}

/// Candidates for the factor of a mantissa.
pub const NV_CANDIDATES: u32 = 6;

/// The factor for a mantissa of block scales: the first candidate that decides as the definition does.
pub fn nv_factor(quantizer: &Quantizer, significand: u32, mantissa: u8) -> Option<u32> {
    (0..NV_CANDIDATES).find_map(|number| nv_candidate(quantizer, significand, mantissa, number))
}

/// The candidate of a number below [`NV_CANDIDATES`], around the reciprocal, if it decides as the definition
/// does.
#[inline(always)]
pub fn nv_candidate(quantizer: &Quantizer, significand: u32, mantissa: u8, number: u32) -> Option<u32> {
    let scaling = quantizer.scaling(E4m3::from_bits(E4m3::ONE.to_bits() + mantissa));
    let reciprocal = match scaling {
        Scaling::Multiply(factor) => factor,
        Scaling::Divide(divisor) => 1.0 / divisor,
    };
    let even = reciprocal.to_bits() & !1;
    let neighbour = match number / 2 {
        0 => even,
        1 => even + 2,
        _ => even - 2,
    };
    let candidate = neighbour | u32::from(number.is_multiple_of(2));
    agrees(scaling, reciprocal, candidate, significand).then_some(candidate)
}

/// Returns whether a factor decides as the definition does for all values: those that it scales to within
/// some units of a midpoint, in the last place of the value or the product, whichever is larger.
#[inline(always)]
fn agrees(scaling: Scaling, reciprocal: f32, factor: u32, significand: u32) -> bool {
    let unit = 1u32 << (f32::MANTISSA_DIGITS - significand);
    let mut agrees = true;
    for quarters in 4..8 {
        let midpoint = quarters as f32;
        let even_is_up = quarters >= 6;
        let near = (midpoint / reciprocal).to_bits() & !(unit - 1);
        for units in 0..6 {
            let x = f32::from_bits((near + units * unit).wrapping_sub(2 * unit));
            let product = (x * f32::from_bits(factor)).to_bits();
            let cut = f32::from_bits((product & !CUT) | ((factor & 1) * (CUT + 1)));
            let passes = |scaled: f32| scaled > midpoint || (scaled == midpoint && even_is_up);
            agrees &= passes(scaling.apply(x)) == passes(cut);
        }
    }
    agrees
}
