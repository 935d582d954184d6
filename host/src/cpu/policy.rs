//! Counts of the CPU paths, and the treatment of blocks that hold NaN or infinities.

use microscale_formats::search::Found;
use microscale_formats::{BlockEvents, block};

use super::blocks::Blocks;
use crate::element::Element;
use crate::report::{Position, Report};
use crate::scheme::NonFinite;

/// Counts of one contiguous piece; like [`Report`], but its position is an offset in the piece.
#[derive(Default)]
pub(super) struct Tally {
    counts: Report,
    first_non_finite: Option<usize>,
}

impl Tally {
    /// Adds what happened in a block.
    #[inline(always)]
    pub(super) fn add(&mut self, events: BlockEvents) {
        self.counts.clipped_blocks += u64::from(events.clipped);
        self.counts.flushed_blocks += u64::from(events.flushed);
        self.counts.saturated_scales += u64::from(events.scale_saturated);
    }

    /// Adds blocks that were clipped.
    #[inline(always)]
    pub(super) fn add_clipped(&mut self, blocks: u32) {
        self.counts.clipped_blocks += u64::from(blocks);
    }

    /// Adds a search that began with the convention's byte.
    #[inline(always)]
    pub(super) fn add_search(&mut self, found: Found, plain: u8) {
        self.counts.rescaled_blocks += u64::from(found.byte != plain);
        self.counts.tried_scales += u64::from(found.tried);
    }

    /// The report, given where an offset in the piece stands in the matrix.
    pub(super) fn placed(self, position: impl Fn(usize) -> Position) -> Report {
        Report { first_non_finite: self.first_non_finite.map(position), ..self.counts }
    }

    /// Counts the NaN and infinite values of a block that starts at `offset`.
    fn count_non_finite(&mut self, values: &[f32], offset: usize) {
        self.counts.nan += values.iter().filter(|v| v.is_nan()).count() as u64;
        self.counts.infinite += values.iter().filter(|v| v.is_infinite()).count() as u64;
        // Blocks come in any order.
        let first = values.iter().position(|v| !v.is_finite()).map(|i| offset + i);
        self.first_non_finite = self.first_non_finite.into_iter().chain(first).min();
    }
}

/// Quantizes one block by the definition, after the policy for non-finite values. Returns the scale byte.
#[inline(never)]
pub(super) fn quantize_block<T: Element, const N: usize>(
    block: &[T; N],
    offset: usize,
    blocks: &impl Blocks<N>,
    non_finite: NonFinite,
    codes: &mut [u8],
    tally: &mut Tally,
) -> u8 {
    let mut values = block.map(T::to_f32);
    if block::is_non_finite(block::amax_bits(&values)) {
        values = replace_non_finite::<T, N>(values, offset, non_finite, tally);
    }
    let (scale, events) = blocks.quantize_block::<T>(&values, codes);
    tally.add(events);
    scale
}

/// Counts what is not finite in a block, and replaces it if the policy wants that.
#[cold]
pub(super) fn replace_non_finite<T: Element, const N: usize>(
    values: [f32; N],
    offset: usize,
    non_finite: NonFinite,
    tally: &mut Tally,
) -> [f32; N] {
    tally.count_non_finite(&values, offset);
    match non_finite {
        NonFinite::Saturate => values.map(|v| if v.is_nan() { 0.0 } else { v.clamp(-T::MAX, T::MAX) }),
        NonFinite::Error | NonFinite::Propagate => values,
    }
}

/// Block `i` of a piece, as it lies in memory; a last block that is not whole is copied to `padded`, which
/// holds zeros.
#[inline(always)]
pub(super) fn block_at<'a, T: Element, const N: usize>(
    values: &'a [T],
    i: usize,
    padded: &'a mut [T; N],
) -> &'a [T; N] {
    let rest = &values[i * N..];
    match rest.first_chunk() {
        Some(whole) => whole,
        None => {
            padded[..rest.len()].copy_from_slice(rest);
            padded
        }
    }
}
