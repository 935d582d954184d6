//! What the CPU paths count, and what they do about blocks that hold NaN or infinities.

use microscale_formats::mxfp4::{self, BLOCK, BLOCK_BYTES, BlockEvents};

use crate::element::Element;
use crate::recipe::{NonFinite, Recipe};
use crate::report::{Position, Report};

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

    /// The report, given where an offset in the piece stands in the matrix.
    pub(super) fn placed(self, position: impl Fn(usize) -> Position) -> Report {
        Report { first_non_finite: self.first_non_finite.map(position), ..self.counts }
    }

    /// Counts the NaN and infinite values of a block that starts at `offset`.
    fn count_non_finite(&mut self, values: &[f32; BLOCK], offset: usize) {
        self.counts.nan += values.iter().filter(|v| v.is_nan()).count() as u64;
        self.counts.infinite += values.iter().filter(|v| v.is_infinite()).count() as u64;
        if self.first_non_finite.is_none() {
            self.first_non_finite = values.iter().position(|v| !v.is_finite()).map(|i| offset + i);
        }
    }
}

/// Quantizes one MXFP4 block by the definition, after the policy for non-finite values. Returns the scale byte.
#[inline(never)]
pub(super) fn quantize_block<T: Element>(
    block: &[T; BLOCK],
    offset: usize,
    recipe: &Recipe,
    codes: &mut [u8; BLOCK_BYTES],
    tally: &mut Tally,
) -> u8 {
    let mut values = block.map(T::to_f32);
    if mxfp4::is_non_finite(mxfp4::amax_bits(&values)) {
        tally.count_non_finite(&values, offset);
        if recipe.non_finite == NonFinite::Saturate {
            values = values.map(|v| if v.is_nan() { 0.0 } else { v.clamp(-T::MAX, T::MAX) });
        }
    }
    let (scale, block_codes, events) = mxfp4::quantize_block(&values, &recipe.arithmetic);
    *codes = block_codes;
    tally.add(events);
    scale.to_bits()
}

/// Block `i` of a piece, as it lies in memory; a last block that is not whole is copied to `padded`, which holds zeros.
#[inline(always)]
pub(super) fn block_at<'a, T: Element>(
    values: &'a [T],
    i: usize,
    padded: &'a mut [T; BLOCK],
) -> &'a [T; BLOCK] {
    let rest = &values[i * BLOCK..];
    match rest.first_chunk() {
        Some(whole) => whole,
        None => {
            padded[..rest.len()].copy_from_slice(rest);
            padded
        }
    }
}
