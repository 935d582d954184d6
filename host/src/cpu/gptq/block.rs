//! One block of columns: the factor of its conditional Hessian, and bounds of its errors.

use microscale_formats::Search;
use microscale_formats::search::{Scales, window};

use super::factor::GptqFactor;

/// The part of the factor that one block of columns needs.
pub(in crate::cpu) struct BlockFactor<const N: usize> {
    /// Rⱼₖ / Rₖₖ, in row j < k.
    pub(super) feedback: [[f32; N]; N],
    /// Rₖₖ.
    pub(super) pivots: [f32; N],
    /// √Σ|Sᵢⱼ| of the block's conditional Hessian S = R·Rᵀ, rounded up.
    sum: f32,
    /// The Frobenius norm of R, rounded up, times a bound of the relative error of an error's root.
    slack: f32,
}

/// A factor that outweighs some roundings in f32.
const MARGIN: f32 = 1.0 / 1024.0;
/// The error of an error's root, in units of the norms of R and of the residuals.
///
/// A chain of 32 products and differences is off by less than 80·2⁻²⁴ of the sum of its terms'
/// magnitudes, and the squares and their sum by less still.
const ROUNDING: f64 = 1.0 / 65536.0;

impl<const N: usize> BlockFactor<N> {
    /// The factor of the block at positions `start ..`.
    pub(super) fn of(factor: &GptqFactor, start: usize) -> Self {
        let mut feedback = [[0.0; N]; N];
        for (j, row) in feedback.iter_mut().enumerate() {
            for (k, entry) in row.iter_mut().enumerate().skip(j + 1) {
                *entry = factor.feedback.at(start + j, start + k);
            }
        }
        let mut pivots = [0.0; N];
        pivots.copy_from_slice(&factor.pivots[start..][..N]);
        let root = |j: usize, k: usize| {
            let quotient = if j == k { 1.0 } else { feedback[j][k] };
            f64::from(quotient) * f64::from(pivots[k])
        };
        let entry = |i: usize, j: usize| -> f64 { (0..N).map(|k| root(i, k) * root(j, k)).sum() };
        let (mut sum, mut trace) = (0.0, 0.0);
        for i in 0..N {
            trace += entry(i, i);
            sum += (0..N).map(|j| entry(i, j).abs()).sum::<f64>();
        }
        Self {
            feedback,
            pivots,
            sum: sum.sqrt() as f32 * (1.0 + MARGIN),
            slack: (trace.sqrt() * ROUNDING) as f32 * (1.0 + MARGIN),
        }
    }

    /// The smallest factor whose error may be below `least`.
    ///
    /// `zeros` is the error of codes 0 and `amax` the block's amax. All three are in units of the
    /// block's unit, and so is the result. It is NaN if nothing is known.
    ///
    /// The root of the error is a norm: with the values x, the codes' values q and a factor f, √E(x
    /// − f·q) ≥ √E(x) − 6·f·√Σ|Sᵢⱼ|. Rounded roots differ by at most the slack times the norm of
    /// the residual, which is at most √N·(amax + 6·f).
    #[inline(always)]
    pub(super) fn least_factor(&self, zeros: f32, least: f32, amax: f32) -> f32 {
        let slack = 2.0 * self.slack * (N as f32).sqrt();
        let room = zeros.sqrt() * (1.0 - MARGIN) - least.sqrt() * (1.0 + MARGIN) - slack * amax;
        room / (6.0 * (self.sum + slack))
    }
}

/// The scale bytes of a format, and the ones that a search tries.
#[derive(Clone, Copy)]
pub(super) struct ScaleRange {
    search: Search,
    pub(super) window: fn(u8) -> (u8, u8),
    pub(super) first: u8,
    pub(super) last: u8,
}

impl ScaleRange {
    pub(super) fn of<S: Scales>(search: Search) -> Self {
        Self { search, window: window::<S>, first: S::FIRST, last: S::LAST }
    }

    /// The first and the last byte to try, besides `plain`. None if the first is above the last.
    #[inline(always)]
    pub(super) fn around(&self, plain: u8, larger: u8) -> (u8, u8) {
        match self.search {
            Search::None => (1, 0),
            Search::FourSix => (larger, larger),
            Search::Window => (self.window)(plain),
            Search::Full => (self.first, self.last),
        }
    }
}
