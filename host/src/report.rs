//! The report of quantization: counts of lossy events, and the position of the first non-finite
//! value.

use std::ops::AddAssign;

/// The position of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Counted from 0.
    pub row: usize,
    /// Counted from 0.
    pub col: usize,
}

/// Counts of lossy events during quantization. Every call returns a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// NaN elements in the input.
    pub nan: u64,
    /// Infinite elements in the input.
    pub infinite: u64,
    /// Clipped blocks: amax is above the largest element times the scale.
    ///
    /// For NVFP4, amax must exceed it by more than rounding the scale explains (above 6.5 scales).
    pub clipped_blocks: u64,
    /// Blocks that were not zero and became zero.
    pub flushed_blocks: u64,
    /// Blocks whose scale left the range of the scale format and was clamped.
    pub saturated_scales: u64,
    /// Blocks whose scale a search changed from the plain one.
    pub rescaled_blocks: u64,
    /// Scales whose error a search computed, including the plain ones.
    pub tried_scales: u64,
    /// The first NaN or infinity in row-major order.
    pub first_non_finite: Option<Position>,
}

impl AddAssign for Report {
    /// Adds the counts. Keeps the earlier position, which is meaningful only within one tensor.
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
    /// Returns the report with its position changed by `map`, for the report of a part of a tensor.
    #[must_use]
    pub fn map_position(mut self, map: impl FnOnce(Position) -> Position) -> Self {
        self.first_non_finite = self.first_non_finite.map(map);
        self
    }

    /// Returns the sum of two reports.
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self += other;
        self
    }
}
