//! The report of quantizing: counts of values that could not be kept, and the place of the first of them.

use std::ops::AddAssign;

/// The place of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Counted from 0.
    pub row: usize,
    /// Counted from 0.
    pub col: usize,
}

/// Counts of what a quantization met and could not keep. Every call returns one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// NaN elements in the input.
    pub nan: u64,
    /// Infinite elements in the input.
    pub infinite: u64,
    /// Blocks whose largest magnitude is above the largest element times the scale, for NVFP4 by more than
    /// rounding the scale accounts for (above 6.5 scales): clipped.
    pub clipped_blocks: u64,
    /// Blocks that were not zero and became zeros.
    pub flushed_blocks: u64,
    /// Blocks whose scale left the range of the scale format and was clamped.
    pub saturated_scales: u64,
    /// Blocks that a search gave another scale than the convention's.
    pub rescaled_blocks: u64,
    /// Scales whose error a search computed, that of the convention among them.
    pub tried_scales: u64,
    /// The first NaN or infinity in row-major order.
    pub first_non_finite: Option<Position>,
}

impl AddAssign for Report {
    /// Adds the counts. The position that comes first is kept, which only means something within one tensor.
    fn add_assign(&mut self, other: Self) {
        self.nan += other.nan;
        self.infinite += other.infinite;
        self.clipped_blocks += other.clipped_blocks;
        self.flushed_blocks += other.flushed_blocks;
        self.saturated_scales += other.saturated_scales;
        self.rescaled_blocks += other.rescaled_blocks;
        self.tried_scales += other.tried_scales;
        self.first_non_finite = match (self.first_non_finite, other.first_non_finite) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

impl Report {
    /// The sum of two.
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self += other;
        self
    }
}
