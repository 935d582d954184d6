//! Exact sums of products: wide integers times a power of two.

use microscale::formats::GlobalScale;
use microscale::formats::nvfp4::Direction;
use microscale::{Format, QuantizedTensor};

use super::{e2m1_value, e4m3_value, mx, unpack};

/// Number of 64-bit limbs of a sum.
///
/// They reach from the square of f32's smallest number to the square of its largest, over 2^64
/// products.
const LIMBS: usize = 12;

/// Exponent of the lowest bit.
const LOWEST: i32 = -352;

/// A sum of f64 numbers that are multiples of 2^`LOWEST` below 2^300, in two's complement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum([u64; LIMBS]);

impl Sum {
    /// The empty sum.
    pub const ZERO: Self = Self([0; LIMBS]);

    /// Adds a finite number.
    pub fn add(&mut self, x: f64) {
        if x == 0.0 {
            return;
        }
        let field = (x.to_bits() >> 52 & 0x7FF) as i32;
        assert!(field != 0, "a subnormal f64");
        let mut mantissa = x.to_bits() & ((1 << 52) - 1) | 1 << 52;
        let mut exponent = field - 1075 - LOWEST;
        let zeros = mantissa.trailing_zeros() as i32;
        (mantissa, exponent) = (mantissa >> zeros, exponent + zeros);
        assert!((0..620).contains(&exponent), "{x:e} is outside of a sum's range");
        let (limb, shift) = (exponent as usize / 64, exponent % 64);
        let wide = u128::from(mantissa) << shift;
        let mut added = [0; LIMBS];
        (added[limb], added[limb + 1]) = (wide as u64, (wide >> 64) as u64);
        if x < 0.0 {
            added = negated(added);
        }
        let mut carry = false;
        for (limb, added) in self.0.iter_mut().zip(added) {
            let (sum, first) = limb.overflowing_add(added);
            let (sum, second) = sum.overflowing_add(carry.into());
            (*limb, carry) = (sum, first | second);
        }
    }

    /// Returns the nearest f64, ties to even.
    pub fn to_f64(self) -> f64 {
        let negative = self.0[LIMBS - 1] >> 63 != 0;
        let magnitude = if negative { negated(self.0) } else { self.0 };
        let bit = |i: i32| i >= 0 && magnitude[i as usize / 64] >> (i % 64) & 1 != 0;
        let Some(top) = (0..64 * LIMBS as i32).rev().find(|i| bit(*i)) else { return 0.0 };
        let mut mantissa = (0..53).fold(0u64, |mantissa, i| mantissa << 1 | u64::from(bit(top - i)));
        let below = (0..top - 53).any(bit);
        if bit(top - 53) && (below || mantissa & 1 != 0) {
            mantissa += 1;
        }
        // Two factors, so that each is a normal number.
        let rounded = mantissa as f64 * super::power_of_two(top - 52 + LOWEST);
        if negative { -rounded } else { rounded }
    }
}

fn negated(limbs: [u64; LIMBS]) -> [u64; LIMBS] {
    let mut carry = true;
    limbs.map(|limb| {
        let (sum, overflow) = (!limb).overflowing_add(carry.into());
        carry = overflow;
        sum
    })
}

/// Returns the elements of a row, padding included.
///
/// Each is a code's value and its block scale, without a global scale.
pub fn elements(tensor: &QuantizedTensor, row: usize) -> impl Iterator<Item = (f64, f64)> {
    let (format, blocks) = (tensor.format(), tensor.blocks_per_row());
    let bytes = blocks * format.block_bytes();
    let codes = unpack(format, &tensor.codes()[row * bytes..][..bytes]);
    let scales = tensor.scales()[row * blocks..][..blocks].to_vec();
    codes.into_iter().enumerate().map(move |(k, code)| {
        let byte = scales[k / format.block()];
        let scale = match format {
            Format::Nvfp4 if byte == 0x7F => f64::NAN,
            Format::Nvfp4 => e4m3_value(byte),
            _ => mx::scale_value(byte),
        };
        (e2m1_value(code), scale)
    })
}

/// Returns the sum of the products of two rows, and the sum of their magnitudes.
///
/// Global scales are not applied. `None` if a scale is NaN.
pub fn quantized(
    matrix: &QuantizedTensor,
    row: usize,
    vectors: &QuantizedTensor,
    vector: usize,
) -> Option<(Sum, Sum)> {
    let (mut sum, mut magnitudes) = (Sum::ZERO, Sum::ZERO);
    for ((a, s), (b, t)) in elements(matrix, row).zip(elements(vectors, vector)) {
        if (s * t).is_nan() {
            return None;
        }
        sum.add(a * b * (s * t));
        magnitudes.add((a * b * (s * t)).abs());
    }
    Some((sum, magnitudes))
}

/// The sum of a row's products with some numbers, without global scales.
#[derive(Debug)]
pub struct Weighted {
    /// Sum of the finite products.
    pub sum: Sum,
    /// Sum of their magnitudes, rounded.
    pub magnitudes: f64,
    /// Sum of the non-finite products, or zero.
    pub not_finite: f64,
}

/// Returns the sum of a row's products with some numbers.
pub fn weighted(weights: &QuantizedTensor, row: usize, x: &[f64]) -> Weighted {
    weighted_elements(elements(weights, row), x)
}

/// [`weighted`], from a row's [`elements`].
pub fn weighted_elements(elements: impl Iterator<Item = (f64, f64)>, x: &[f64]) -> Weighted {
    let mut all = Weighted { sum: Sum::ZERO, magnitudes: 0.0, not_finite: 0.0 };
    for (k, (weight, scale)) in elements.enumerate() {
        let term = weight * scale * x.get(k).copied().unwrap_or(0.0);
        if term.is_finite() {
            all.sum.add(term);
            all.magnitudes += term.abs();
        } else {
            all.not_finite += term;
        }
    }
    all
}

/// Applies a global scale, rounding to f64 once.
pub fn under(sum: f64, global: Option<GlobalScale>) -> f64 {
    match global.map(|global| (global.direction(), f64::from(global.value()))) {
        None => sum,
        Some((Direction::Divisor, value)) => sum / value,
        Some((Direction::Multiplier, value)) => sum * value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact() {
        let mut sum = Sum::ZERO;
        for x in [2f64.powi(250), 1.5, -2f64.powi(250), 2f64.powi(-300), -1.0] {
            sum.add(x);
        }
        assert_eq!(sum.to_f64(), 0.5);
        sum.add(-0.5);
        assert_eq!(sum.to_f64(), 2f64.powi(-300));
        sum.add(-2f64.powi(-299));
        assert_eq!(sum.to_f64(), -2f64.powi(-300));
    }

    #[test]
    fn sums_are_rounded_to_nearest_even() {
        for (terms, expected) in [
            ([1.0, 2f64.powi(-53), 0.0], 1.0),
            ([1.0, 2f64.powi(-53), 2f64.powi(-300)], 1.0 + f64::EPSILON),
            ([1.0 + f64::EPSILON, 2f64.powi(-53), 0.0], 1.0 + 2.0 * f64::EPSILON),
            ([1.0 + f64::EPSILON, 2f64.powi(-53), -2f64.powi(-300)], 1.0 + f64::EPSILON),
        ] {
            for sign in [1.0, -1.0] {
                let mut sum = Sum::ZERO;
                terms.into_iter().for_each(|term| sum.add(sign * term));
                assert_eq!(sum.to_f64(), sign * expected);
            }
        }
    }
}
