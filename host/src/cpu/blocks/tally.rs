//! Counts of events in a run of blocks.

use microscale_formats::BlockEvents;
use microscale_formats::search::Found;

use crate::report::{Position, Report};

/// A [`Report`] for one run of blocks. Its position is an offset within the run.
#[derive(Default)]
pub(in crate::cpu) struct Tally {
    counts: Report,
    first_non_finite: Option<usize>,
}

impl Tally {
    /// Adds the events of a block.
    #[inline(always)]
    pub(in crate::cpu) fn add(&mut self, events: BlockEvents) {
        self.counts.clipped_blocks += u64::from(events.clipped);
        self.counts.flushed_blocks += u64::from(events.flushed);
        self.counts.saturated_scales += u64::from(events.scale_saturated);
    }

    /// Adds the number of clipped blocks.
    #[inline(always)]
    pub(in crate::cpu) fn add_clipped(&mut self, blocks: u32) {
        self.counts.clipped_blocks += u64::from(blocks);
    }

    /// Adds the result of a search that started from the scale byte of plain rounding.
    #[inline(always)]
    pub(in crate::cpu) fn add_search(&mut self, found: Found, plain: u8) {
        self.counts.rescaled_blocks += u64::from(found.byte != plain);
        self.counts.tried_scales += u64::from(found.tried);
    }

    /// Converts to a report. `position` maps an offset in the run to a position in the matrix.
    pub(in crate::cpu) fn placed(self, position: impl Fn(usize) -> Position) -> Report {
        Report { first_non_finite: self.first_non_finite.map(position), ..self.counts }
    }

    /// Counts the NaN and infinite values of a block that starts at `offset`.
    pub(super) fn count_non_finite(&mut self, values: &[f32], offset: usize) {
        self.counts.nan += values.iter().filter(|v| v.is_nan()).count() as u64;
        self.counts.infinite += values.iter().filter(|v| v.is_infinite()).count() as u64;
        // Blocks are counted in any order.
        let first = values.iter().position(|v| !v.is_finite()).map(|i| offset + i);
        self.first_non_finite = self.first_non_finite.into_iter().chain(first).min();
    }
}
