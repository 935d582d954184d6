//! A candidate scale, and the residuals of elements under it.
//!
//! # Rounding to E2M1 by three additions
//! Where one unit in the last place is S, P − (P − s) is s rounded to a multiple of S. E2M1's step
//! is ½ below 2, 1 from 2 to 4, and 2 from 4 to 6. P must therefore be in [2²², 2²³) for the first
//! range, in [2²³, 2²⁴) for the second and in [2²⁴, 2²⁵) for the third. Around 2 and 4 both steps
//! agree: from 1.75 to 2.25 only 2 is near, and from 3.5 to 4.5 only 4. That leaves room for P =
//! 2²²·(33 + 197/32·s²)/32. It reaches 2²³ at s = 2.244, 2²⁴ at 3.928 and 2²⁵ at 6.019. Beyond
//! 6.019 every rounding gives 6 or more, which becomes 6. For a tie P takes either magnitude.

use crate::arithmetic::{Fused, Machine};
use crate::e2m1::MAX;

/// The smallest and the largest factor of a candidate.
///
/// Both are far enough from 0 and infinity that the square of the reciprocal exists. Beyond them a
/// block is entirely clipped or entirely zero.
const FACTORS: (f32, f32) = (f32::from_bits((127 - 50) << 23), f32::from_bits((127 + 50) << 23));

/// A scale in the form that errors need, or one scale per lane.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<N = f32> {
    /// The factor that dequantizes codes, times the unit.
    pub factor: N,
    /// The reciprocal of `factor`.
    pub inverse: N,
    /// The coefficient of a² in P.
    curve: N,
}

/// P at 0.
const START: f32 = 33.0 / 32.0 * (1 << 22) as f32;
/// The coefficient of s² in P.
const CURVE: f32 = 197.0 / 1024.0 * (1 << 22) as f32;
/// The largest P whose unit in the last place is 2.
const LARGEST: f32 = ((1 << 25) - 2) as f32;

/// Magnitudes up to this multiple of a factor are [near](Candidate::rest).
pub const NEAR: f32 = 16.0;

/// Multiplies a dequantization factor by a block's unit, limited so that the result has a
/// reciprocal.
#[inline(always)]
pub fn limited(factor: f32, unit: f32) -> f32 {
    (factor * unit).clamp(FACTORS.0, FACTORS.1)
}

impl Candidate {
    /// Makes a candidate from a dequantization factor and a block's unit.
    #[inline(always)]
    pub fn new<M: Fused>(factor: f32, unit: f32) -> Self {
        let factor = limited(factor, unit);
        Self::with_inverse::<M>(factor, 1.0 / factor)
    }
}

impl<N: Copy> Candidate<N> {
    /// Makes a candidate from a [limited] factor times the unit, and its reciprocal rounded to
    /// nearest.
    #[inline(always)]
    pub fn with_inverse<M: Machine<Number = N>>(factor: N, inverse: N) -> Self {
        Self { factor, inverse, curve: M::mul(M::mul(inverse, inverse), M::splat(CURVE)) }
    }

    /// Returns the difference of an element and its nearest code.
    ///
    /// `a` is the element's magnitude times the unit, `square` its square. If all elements are
    /// [`NEAR`], this takes one instruction less.
    #[inline(always)]
    pub fn rest<M: Machine<Number = N>, const ALL_NEAR: bool>(&self, a: N, square: N) -> N {
        let p = M::fma(square, self.curve, M::splat(START));
        let p = if ALL_NEAR { p } else { M::min(p, M::splat(LARGEST)) };
        let q = M::sub(p, M::fnma(a, self.inverse, p));
        M::fnma(self.factor, M::min(q, M::splat(MAX)), a)
    }

    /// Returns the least difference that clipping causes, or 0 if the element is not clipped.
    #[inline(always)]
    pub fn clipped<M: Machine<Number = N>>(&self, a: N) -> N {
        M::max(M::fnma(self.factor, M::splat(MAX), a), M::splat(0.0))
    }
}

/// Adds an element's error term to a sum.
#[inline(always)]
pub fn add_term<M: Machine>(rest: M::Number, weight: Option<M::Number>, sum: M::Number) -> M::Number {
    let weighted = match weight {
        Some(weight) => M::mul(weight, rest),
        None => rest,
    };
    M::fma(weighted, rest, sum)
}

/// Elements whose terms are added in chains.
pub const CHAINED: usize = 16;
/// Number of chains.
pub const CHAINS: usize = 4;

/// Returns the sum of the chains.
#[inline(always)]
pub fn sum_of_chains<M: Machine>([a, b, c, d]: [M::Number; CHAINS]) -> M::Number {
    M::add(M::add(a, b), M::add(c, d))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e2m1::{self, VALUES};
    use crate::search::tests::{Hosts, numbers};

    #[test]
    fn rests_belong_to_the_nearest_magnitudes() {
        let mut number = numbers(3);
        for factor in [1.0, 1.125, 1.999_999_9, 2f32.powi(-50), 1.7e9]
            .into_iter()
            .chain((0..20).map(|_| number() + 0.5))
        {
            let candidate = Candidate::new::<Hosts>(factor, 1.0);
            // Tests values around the midpoints and the ends of the steps, and all others in small
            // steps.
            let near = e2m1::MIDPOINTS.iter().chain(&VALUES).chain(&[2.25, 4.5, 6.02, 7.0, 25.0]);
            let near = near
                .flat_map(|x| (-2000..2000).map(move |i| (x * factor).to_bits().saturating_add_signed(i)));
            let all = (0..(34 << 23)).step_by(997).map(|step| (factor * 2f32.powi(-24)).to_bits() + step);
            for a in near.chain(all).map(f32::from_bits).filter(|a| a.is_finite()) {
                let rest = candidate.rest::<Hosts, false>(a, a * a);
                let distance = |value: f32| (f64::from(a) - f64::from(value) * f64::from(factor)).abs();
                let least = VALUES.into_iter().map(distance).fold(f64::INFINITY, f64::min);
                // If the quotient is within a rounding of a midpoint, either side is correct.
                let most = least + f64::from(a) * 2f64.powi(-23);
                assert!(
                    f64::from(rest.abs()) <= most,
                    "{a:e} under {factor:e} leaves {rest:e} instead of {least:e}"
                );
                if a < NEAR * factor {
                    assert_eq!(rest, candidate.rest::<Hosts, true>(a, a * a), "{a:e} under {factor:e}");
                }
            }
        }
    }

    #[test]
    fn factors_out_of_range_clip_or_zero_everything() {
        let [tiny, huge] = [1e-38, 1e38].map(|factor| Candidate::new::<Hosts>(factor, 1.0));
        for a in [0.0f32, 1.0, 1.5] {
            assert_eq!(tiny.rest::<Hosts, false>(a, a * a), a);
            assert_eq!(huge.rest::<Hosts, false>(a, a * a), a);
        }
    }
}
