//! Sums of k-steps in f64, truncated as tensor cores do: one trait, and AVX2's version of it.

#[cfg(target_arch = "x86_64")]
mod avx2;

use super::products::Products;
#[cfg(target_arch = "aarch64")]
use super::tokens::Neon;
use super::tokens::{LANES, Lanes, Portable};

/// A number for each of four tokens.
pub(in crate::cpu) type Four = [f64; 4];

/// The accumulators of four tokens, and their range.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Range {
    /// The smallest magnitude above zero that loses no bits.
    pub(in crate::cpu) lowest: Four,
    /// Magnitudes are below it.
    pub(in crate::cpu) limits: Four,
}

/// Vectors that add k-steps.
pub(in crate::cpu) trait KSteps: Products {
    /// Four f64, one per k-step.
    type Sums4: Copy;

    /// Adds lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15, exactly if the sums have at most 53 bits.
    fn sums_of_groups(self, terms: Self::Number) -> Self::Sums4;

    /// Adds the sums of four tokens to their accumulators, k-step by k-step, and truncates after
    /// each to the 24 bits of f32.
    ///
    /// Returns false if an accumulator to be added to is not in range.
    fn add_k_steps(self, sums: [Self::Sums4; 4], accumulators: &mut Four, range: &Range) -> bool;
}

/// [`KSteps`] in arrays.
macro_rules! in_arrays {
    ($token:ty) => {
        impl KSteps for $token {
            type Sums4 = Four;

            #[inline(always)]
            fn sums_of_groups(self, terms: Self::Number) -> Four {
                use super::vector::Vector;
                sums_of_groups(&self.store(terms))
            }

            #[inline(always)]
            fn add_k_steps(self, sums: [Four; 4], accumulators: &mut Four, range: &Range) -> bool {
                add_k_steps(&sums, accumulators, range)
            }
        }
    };
}

in_arrays!(Portable);
#[cfg(target_arch = "aarch64")]
in_arrays!(Neon);

#[inline(always)]
fn sums_of_groups(terms: &Lanes<f32>) -> Four {
    let mut sums = [0.0; 4];
    for (k_step, sum) in sums.iter_mut().enumerate() {
        let [a, b, c, d] = [0, 1, 2, 3].map(|group| f64::from(terms[LANES / 4 * group + k_step]));
        *sum = (a + b) + (c + d);
    }
    sums
}

#[inline(always)]
fn add_k_steps(sums: &[Four; 4], accumulators: &mut Four, range: &Range) -> bool {
    let mut in_range = true;
    for k_step in 0..4 {
        let sums = sums.map(|token| token[k_step]);
        for (token, (accumulator, sum)) in accumulators.iter_mut().zip(sums).enumerate() {
            let magnitude = accumulator.abs();
            in_range &=
                (magnitude == 0.0 || magnitude >= range.lowest[token]) & (magnitude < range.limits[token]);
            *accumulator = truncated(*accumulator + sum);
        }
    }
    in_range
}

/// The bits of f64 that f32 has.
const KEPT: u64 = u64::MAX << (f64::MANTISSA_DIGITS - f32::MANTISSA_DIGITS);

/// Truncates toward zero to the bits of f32, whatever the exponent.
#[inline(always)]
fn truncated(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & KEPT)
}

#[cfg(test)]
mod tests;
