//! The recursion over the columns of one block, in one lane.

use core::hint::cold_path;

use microscale_formats::Ties;
use microscale_formats::e2m1::{MAX, MIDPOINTS, VALUES};

use super::factor::{BlockFactor, QUAD};
use crate::hardware::ptx;

/// The sign bit.
const SIGN: u32 = 1 << 31;

/// The scale of a block, or of one of its columns.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    /// Multiplies the values of codes.
    pub(super) factor: f32,
    /// Scales elements into the range of E2M1: a divisor or a factor.
    pub(super) scaling: f32,
}

/// How elements are scaled and rounded.
#[derive(Clone, Copy)]
pub(super) struct Rounding {
    pub(super) divides: bool,
    pub(super) ties: Ties,
}

impl Rounding {
    /// The magnitude of the code nearest to a magnitude.
    #[inline(always)]
    pub(super) fn magnitude(self, magnitude: f32, scaling: f32) -> f32 {
        let scaled = if self.divides { magnitude / scaling } else { magnitude * scaling };
        // A NaN becomes 6 too, as in encoding.
        let scaled = scaled.min(MAX);
        if matches!(self.ties, Ties::Even) {
            return nearest_even(scaled);
        }
        cold_path();
        let mut rounded = 0.0;
        let mut i = 0;
        while i < MIDPOINTS.len() {
            let passed = match self.ties {
                Ties::Away => scaled >= MIDPOINTS[i],
                _ => scaled > MIDPOINTS[i],
            };
            rounded += if passed { VALUES[i + 1] - VALUES[i] } else { 0.0 };
            i += 1;
        }
        rounded
    }

    /// The dequantized value of the code nearest to a value.
    #[inline(always)]
    pub(super) fn round(self, value: f32, candidate: Candidate) -> f32 {
        let magnitude = self.magnitude(value.abs(), candidate.scaling) * candidate.factor;
        f32::from_bits(magnitude.to_bits() | value.to_bits() & SIGN)
    }
}

/// The magnitude of E2M1 nearest to 0 ≤ s ≤ 6, ties to the even code.
///
/// The parts of s below 2, from 2 to 4, and above 4 are rounded to multiples of ½, 1 and 2, ties to
/// the even multiple. Adding 1.5·2^(22 + i) rounds to a multiple of 2^(i − 1). All differences are
/// exact.
#[inline(always)]
fn nearest_even(s: f32) -> f32 {
    const BASE: f32 = 1.5 * (1u32 << 22) as f32;
    let low = s.min(2.0);
    let middle = s.max(2.0).min(4.0) - 2.0;
    let high = s.max(4.0) - 4.0;
    let low = (low + BASE) - BASE;
    let middle = (middle + 2.0 * BASE) - 2.0 * BASE;
    let high = (high + 4.0 * BASE) - 4.0 * BASE;
    low + middle + high
}

/// The value, or the other one if it is not finite.
#[inline(always)]
pub(super) fn finite_or(value: f32, other: f32) -> f32 {
    if value.abs() <= f32::MAX { value } else { other }
}

/// The result of the recursion.
pub(super) struct Descent<const N: usize> {
    /// The weights that were rounded.
    pub(super) rounded_from: [f32; N],
    /// The sum of squared errors, in squares of the unit.
    pub(super) error: f32,
    /// The largest magnitude that was rounded.
    pub(super) largest: f32,
}

/// Subtracts the products of `residual` and row `k` of the factor from later columns.
///
/// # Safety
/// As for [`BlockFactor::quad`].
#[inline(always)]
pub(super) unsafe fn feed_back<const N: usize>(
    factor: &BlockFactor<N>,
    k: usize,
    residual: f32,
    later: &mut [f32; N],
) {
    let mut quad = (k + 1) / QUAD;
    while quad < N / QUAD {
        // SAFETY: the same contract.
        let entries = unsafe { factor.quad(k, quad) };
        let mut i = 0;
        while i < QUAD {
            let col = quad * QUAD + i;
            if col > k {
                later[col] = ptx::fma_f32(-residual, entries[i], later[col]);
            }
            i += 1;
        }
        quad += 1;
    }
}

/// Quantizes the columns one after the other, each to `round` of its weight with feedback. Passes
/// each column to `see`: its weight, its dequantized value, and its pivot.
///
/// # Safety
/// The block of `factor` exists, and nothing writes the factor during the kernel.
#[inline(always)]
pub(super) unsafe fn descend<const N: usize>(
    factor: &BlockFactor<N>,
    updated: &[f32; N],
    unit: f32,
    round: impl Fn(usize, f32) -> f32,
    mut see: impl FnMut(usize, f32, f32, f32),
) -> Descent<N> {
    let mut descent = Descent { rounded_from: *updated, error: 0.0, largest: 0.0 };
    let mut pivots = [0.0; QUAD];
    let mut k = 0;
    while k < N {
        if k % QUAD == 0 {
            // SAFETY: the same contract.
            pivots = unsafe { factor.pivots(k / QUAD) };
        }
        let from = finite_or(descent.rounded_from[k], updated[k]);
        let dequantized = round(k, from);
        let error = (from - dequantized) * unit * pivots[k % QUAD];
        descent.error += error * error;
        descent.largest = descent.largest.max(from.abs());
        descent.rounded_from[k] = from;
        see(k, from, dequantized, pivots[k % QUAD]);
        // SAFETY: the same contract.
        unsafe { feed_back(factor, k, dequantized - updated[k], &mut descent.rounded_from) };
        k += 1;
    }
    descent
}
