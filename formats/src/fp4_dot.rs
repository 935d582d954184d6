//! The product of two rows of FP4 with the arithmetic of Blackwell's tensor cores, to the bit.
//!
//! This is the sum that `mma.sync … kind::mxf4nvf4.block_scale.scale_vec::4X` (NVFP4) and
//! `kind::mxf4.block_scale.scale_vec::2X` (MXFP4) compute for one result. [`dot`](crate::dot) is
//! the product of the same operands that rounds least.
//!
//! Source: MMA-Sim, commit c785138 (arXiv 2511.10909), whose authors compared it with an RTX
//! Blackwell GPU. `tests/golden/` has its results. Microscale itself has not run on such a GPU.
//!
//! # A k-step
//!
//! An instruction adds [`STEP`] = 64 products to an accumulator, an f32:
//!
//! 1. Elements form four groups of [`GROUP`] = 16, in MXFP4 too. The sum of a group's products is
//!    exact, and so is its product with the significands of both block scales. It is a [`Term`].
//!    Its exponent is the sum of the exponents of both scales, whatever the sum. Subnormal E4M3
//!    scales have the exponent −6, and E8M0 scales the significand 1.
//! 2. The exponent of the accumulator is −126 if it is zero or subnormal.
//! 3. The four terms and the accumulator are truncated toward zero to multiples of 2^(e − 35). e is
//!    the largest of the five exponents.
//! 4. Their sum is exact. It is truncated toward zero to f32. Zero is +0, and 2^128 is infinite.
//!
//! If a scale or the accumulator is NaN, the result is [`NAN`]. MMA-Sim leaves infinite
//! accumulators open. Here they stay as they are, because all terms are finite.
//!
//! # A row
//!
//! [`row`] takes k-steps in the order of K, starting from +0. Zeros pad the last k-step, and change
//! nothing. A GPU that splits K adds the parts in f32 and gives other bits.
//!
//! # Factor
//!
//! [`factor`] is the number that a sum is multiplied by: alpha times both global scales, in f64,
//! and rounded to f32. A factor that is not a normal number has fewer bits, or is infinite or zero.
//!
//! # Error bound
//!
//! Truncation never makes a magnitude larger, so an accumulator is at most the sum of the products'
//! magnitudes M = Σ |a·b|, block scales included. A k-step loses less than five units of 2^(e − 35)
//! before the sum and 2^−23 of the sum, or 2^−149, after it. With n = ⌈K / 64⌉, while M is below
//! 2^128,
//!
//! ```text
//! |y − Σ a·b| ≤ γ · M + δ
//! γ = n · (2^−23 + 5 · 2^−35)        δ = n · (5 · 2^−35 · S + 2^−149)
//! ```
//!
//! as [`gamma`] and [`delta`] compute. S is the largest product of two powers of two in the
//! row that are the exponents of block scales of the same group, at least 2^−126. The factor adds a
//! relative error of at most 2^−24.

use crate::dot::{quarters, scaled};
use crate::{E4m3, E8m0, Format, GlobalScale};

/// Elements of a k-step.
pub const STEP: usize = 64;

/// Elements of a group, whose products are added exactly.
pub const GROUP: usize = 16;

/// Groups of a k-step.
pub const GROUPS: usize = STEP / GROUP;

/// Fraction bits of the largest exponent that survive truncation.
pub const FRACTION_BITS: i32 = 35;

/// The bits of the NaN that tensor cores return.
pub const NAN: u32 = 0x7FFF_FFFF;

/// Exponent of the smallest normal f32, and of accumulators that are zero or subnormal.
pub(crate) const SMALLEST: i32 = -126;

/// Units of a term's significand per 1: quarters, times 8ths of both significands.
const TERM_BITS: i32 = 8;

/// A group's exact sum: `significand` · 2^(`exponent` − 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The group's quarters times eight times each scale's significand: at most 2304 · 15 · 15.
    pub significand: i32,
    /// The sum of the exponents of both scales.
    pub exponent: i32,
}

impl Term {
    /// No products. Padding with it changes no sum.
    pub const ZERO: Self = Self { significand: 0, exponent: 2 * SMALLEST };

    /// Returns the term of an NVFP4 group from its [`quarters`], or `None` if a scale is NaN.
    ///
    /// Signs of scales are ignored, as in UE4M3.
    pub fn nvfp4(quarters: i32, a: E4m3, b: E4m3) -> Option<Self> {
        let (a, b) = (split(a)?, split(b)?);
        Some(Self { significand: quarters * a.0 * b.0, exponent: a.1 + b.1 })
    }

    /// Returns the term of an MXFP4 group from its [`quarters`], or `None` if a scale is NaN.
    pub fn mxfp4(quarters: i32, a: E8m0, b: E8m0) -> Option<Self> {
        if a.is_nan() || b.is_nan() {
            return None;
        }
        let exponent = i32::from(a.to_bits()) + i32::from(b.to_bits()) - 2 * 127;
        Some(Self { significand: quarters * 64, exponent })
    }
}

/// Returns eight times the significand of a number without its sign, and its exponent, or `None`
/// for NaN.
pub(crate) fn split(scale: E4m3) -> Option<(i32, i32)> {
    let bits = i32::from(scale.to_bits() & 0x7F);
    match (bits >> 3, bits & 7) {
        (15, 7) => None,
        (0, 0) => Some((0, SMALLEST)),
        (0, fraction) => Some((fraction, -6)),
        (exponent, fraction) => Some((8 + fraction, exponent - 7)),
    }
}

/// Adds the terms of a k-step to an accumulator. `None` is a term with a NaN scale.
pub fn step(accumulator: f32, terms: [Option<Term>; GROUPS]) -> f32 {
    let [Some(a), Some(b), Some(c), Some(d)] = terms else { return f32::from_bits(NAN) };
    if accumulator.is_nan() {
        return f32::from_bits(NAN);
    }
    if accumulator.is_infinite() {
        return accumulator;
    }
    let terms = [a, b, c, d];
    let (significand, exponent) = split_f32(accumulator);
    let largest = terms.iter().fold(exponent, |largest, term| largest.max(term.exponent));
    let aligned = |significand: i32, exponent: i32, bits: i32| {
        shifted(i64::from(significand), FRACTION_BITS - bits + exponent - largest)
    };
    let sum = aligned(significand, exponent, f32::MANTISSA_DIGITS as i32 - 1)
        + terms.iter().map(|term| aligned(term.significand, term.exponent, TERM_BITS)).sum::<i64>();
    truncated(sum, largest - FRACTION_BITS)
}

/// Returns an f32's signed significand in units of 2^−23 and its exponent, at least −126.
pub(crate) fn split_f32(x: f32) -> (i32, i32) {
    let (field, fraction) = ((x.to_bits() >> 23 & 0xFF) as i32, (x.to_bits() & 0x7F_FFFF) as i32);
    let magnitude = if field == 0 { fraction } else { fraction | 1 << 23 };
    (if x.is_sign_negative() { -magnitude } else { magnitude }, field.max(1) - 127)
}

/// Returns `x` · 2^`by`, truncated toward zero.
pub(crate) fn shifted(x: i64, by: i32) -> i64 {
    if by >= 0 { x << by } else { x / (1 << (-by).min(62)) }
}

/// Returns `sum` · 2^`unit`, truncated toward zero to f32. `unit` is at least −161.
pub(crate) fn truncated(sum: i64, unit: i32) -> f32 {
    let magnitude = sum.unsigned_abs();
    let Some(top) = magnitude.checked_ilog2() else { return 0.0 };
    let exponent = top as i32 + unit;
    // The unit in the last place of the result.
    let last = (exponent - 23).max(SMALLEST - 23);
    let drop = last - unit;
    let significand = if drop >= 0 { magnitude >> drop } else { magnitude << -drop } as u32;
    if significand == 0 {
        return 0.0;
    }
    // The hidden bit, if there is one, adds 1 to the field.
    let bits = if exponent > 127 {
        f32::INFINITY.to_bits()
    } else {
        (((last + 23 + 126) as u32) << 23) + significand
    };
    f32::from_bits(bits | u32::from(sum < 0) << 31)
}

/// Returns the product of two rows, k-step by k-step. No global scale is applied.
///
/// Rows are codes, two per byte, and one scale byte per block of `format`, which is NVFP4 or MXFP4.
/// Both rows have the same number of blocks.
pub fn row(format: Format, a: (&[u8], &[u8]), b: (&[u8], &[u8])) -> f32 {
    let blocks = STEP / format.block();
    let codes = a.0.chunks(STEP / 2).zip(b.0.chunks(STEP / 2));
    let scales = a.1.chunks(blocks).zip(b.1.chunks(blocks));
    codes.zip(scales).fold(0.0, |sum, ((x, y), (s, t))| step(sum, terms(format, (x, s), (y, t))))
}

/// Returns the terms of a k-step, from the codes and scales of up to 64 elements of two rows.
pub fn terms(format: Format, a: (&[u8], &[u8]), b: (&[u8], &[u8])) -> [Option<Term>; GROUPS] {
    let mut terms = [Some(Term::ZERO); GROUPS];
    let codes = a.0.chunks(GROUP / 2).zip(b.0.chunks(GROUP / 2));
    for (i, (term, (x, y))) in terms.iter_mut().zip(codes).enumerate() {
        let block = i * GROUP / format.block();
        let (quarters, s, t) = (quarters(x, y), a.1[block], b.1[block]);
        *term = match format {
            Format::Nvfp4 => Term::nvfp4(quarters, E4m3::from_bits(s), E4m3::from_bits(t)),
            _ => Term::mxfp4(quarters, E8m0::from_bits(s), E8m0::from_bits(t)),
        };
    }
    terms
}

/// Returns the factor of the sums, given the global scales of the activations and of the weights.
#[inline(always)]
pub fn factor(alpha: f32, [activations, weights]: [Option<GlobalScale>; 2]) -> f32 {
    scaled(scaled(f64::from(alpha), activations), weights) as f32
}

/// Returns γ of the error bound, for rows of `cols` elements.
pub fn gamma(cols: usize) -> f64 {
    cols.div_ceil(STEP) as f64 * (1.0 / f64::from(1 << 23) + 5.0 / (1u64 << 35) as f64)
}

/// Returns δ of the error bound for rows of `cols` elements.
///
/// `scales` is S, the largest product of powers of two of block scales.
pub fn delta(cols: usize, scales: f64) -> f64 {
    let scales = scales.max(f64::from(f32::MIN_POSITIVE));
    cols.div_ceil(STEP) as f64 * (5.0 * scales / (1u64 << 35) as f64 + f64::from(f32::from_bits(1)))
}

#[cfg(test)]
mod tests;
