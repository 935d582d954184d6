//! A shortcut that scales and rounds 16-bit values to NVFP4 with a product and ten more bits.
//!
//! The quotient x / d or product x · r, rounded to f32, matters only in how it compares with the
//! midpoints of E2M1. Those midpoints are powers of two times 1, 1.25, 1.5 or 1.75. The values x
//! are short, 8 or 11 bits, so for each d few x come near a midpoint. It can be tested whether a
//! cheaper arithmetic decides these x as the reference does.
//!
//! The cheaper arithmetic multiplies by a factor near 1/d, truncates the product to f16's 11 bits,
//! sets the last bit or not, and rounds to E2M1 with ties to even. Truncation moves products just
//! above a midpoint onto it. At midpoints of 1 and 1.25 even is down, so the last bit must be set
//! there, unless the product is exactly the midpoint. At the others even is up, and either choice
//! works. The last bit of the factor holds the choice.
//!
//! Scaling is periodic in powers of two, as block scales are, so the eight mantissas of E4M3 stand
//! for all its normal numbers.

use crate::E4m3;
use crate::nvfp4::{Quantizer, Scaling};

/// Number of mantissas of block scales.
pub const NV_MANTISSAS: usize = 8;

/// Bits of an f32 that f16 cannot hold.
const CUT: u32 = (1 << 13) - 1;

/// The factors of a tensor for the block scales 1, 1.125 and so on up to 1.875.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct NvShortcut {
    /// One factor per mantissa, as f32 bits.
    ///
    /// The last bit also says whether to set the last bit of products.
    pub factors: [u32; NV_MANTISSAS],
    /// 1 if every mantissa has a factor.
    pub complete: u32,
}

impl NvShortcut {
    /// Makes the shortcut for a dtype with a `significand` of 8 or 11 bits. Other dtypes have none.
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

/// Number of candidate factors per mantissa.
pub const NV_CANDIDATES: u32 = 6;

/// Returns the factor of a block-scale mantissa: the first candidate that agrees with the
/// reference.
pub fn nv_factor(quantizer: &Quantizer, significand: u32, mantissa: u8) -> Option<u32> {
    (0..NV_CANDIDATES).find_map(|number| nv_candidate(quantizer, significand, mantissa, number))
}

/// Returns candidate `number`, near the reciprocal, if it agrees with the reference.
///
/// `number` is below [`NV_CANDIDATES`].
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

/// Returns whether a factor decides every value as the reference does.
///
/// It tests the values that are scaled to within a few units of a midpoint. The unit is the last
/// place of the value or of the product, whichever is larger.
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
