//! One block of columns: the factor of its conditional Hessian, and bounds of its errors.

use microscale_formats::Search;
use microscale_formats::search::gptq::BlockBounds;
use microscale_formats::search::{Scales, window};

use super::factor::GptqFactor;

/// The part of the factor that one block of columns needs.
pub(in crate::cpu) struct BlockFactor<const N: usize> {
    /// Rⱼₖ / Rₖₖ, in row j < k.
    pub(super) feedback: [[f32; N]; N],
    /// Rₖₖ.
    pub(super) pivots: [f32; N],
    /// Bounds of the errors.
    pub(super) bounds: BlockBounds,
}

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
        Self { feedback, pivots, bounds: BlockBounds::new(sum.sqrt(), trace.sqrt(), (N as f32).sqrt()) }
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
