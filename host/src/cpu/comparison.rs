//! Formats for comparison. They have only a reference implementation, one block at a time.

use microscale_formats::ScaleLayout;
use microscale_formats::comparison::{ComparisonFormat, Definition};
use rayon::prelude::*;

use crate::element::Element;
use crate::error::Result;
use crate::layout::swizzle;
use crate::recipe::Recipe;
use crate::report::{Position, Report};
use crate::shape::{QuantizedShape, Strided};

/// Quantizes a matrix to a comparison format.
///
/// The caller has checked that the slice holds the matrix, and that `codes` and `scales` have the
/// sizes that the recipe implies.
pub(super) fn quantize<T: Element>(
    values: &[T],
    strided: &Strided,
    recipe: &Recipe,
    format: ComparisonFormat,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<Report> {
    if strided.is_empty() {
        return Ok(Report::default());
    }
    let shape = QuantizedShape::of(recipe, strided.shape());
    let report = match shape.scale_layout {
        ScaleLayout::Linear => rows(values, strided, recipe, format, codes, scales),
        ScaleLayout::Swizzled => {
            let mut linear = vec![0; shape.rows * shape.blocks_per_row() * shape.format.scale_bytes()];
            let report = rows(values, strided, recipe, format, codes, &mut linear);
            scales.copy_from_slice(&swizzle(&linear, shape));
            report
        }
    };
    recipe.accept(report)
}

/// Quantizes all rows, with linear scales.
fn rows<T: Element>(
    values: &[T],
    strided: &Strided,
    recipe: &Recipe,
    format: ComparisonFormat,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Report {
    let count = strided.shape().rows;
    let rows = codes.par_chunks_mut(codes.len() / count).zip(scales.par_chunks_mut(scales.len() / count));
    let one = |(row, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
        let mut report = Report::default();
        let mut block = Vec::new();
        let (facts, definition) = (format.facts(), format.definition());
        let length = facts.block.elements();
        let blocks = codes.chunks_mut(length * facts.element.bits() / 8);
        let starts = (0..strided.cols).step_by(length);
        for ((codes, scale), col) in blocks.zip(scales.chunks_mut(facts.scale.bytes())).zip(starts) {
            block.clear();
            for col in col..strided.cols.min(col + length) {
                let value = values[strided.start(row) + col * strided.col_stride].to_f32();
                count_non_finite(value, Position { row, col }, &mut report);
                block.push(recipe.non_finite.replaced::<T>(value));
            }
            let (bits, events) = (definition.quantize_block)(&block, codes);
            facts.scale.write(bits, scale);
            report.clipped_blocks += u64::from(events.clipped);
            report.flushed_blocks += u64::from(events.flushed);
            report.saturated_scales += u64::from(events.scale_saturated);
        }
        report
    };
    rows.enumerate().map(one).reduce(Report::default, Report::plus)
}

fn count_non_finite(value: f32, position: Position, report: &mut Report) {
    if !value.is_finite() {
        report.nan += u64::from(value.is_nan());
        report.infinite += u64::from(value.is_infinite());
        report.first_non_finite.get_or_insert(position);
    }
}

/// Dequantizes consecutive blocks of a row. The last block may be partial.
pub(super) fn dequantize<T: Element>(
    format: ComparisonFormat,
    codes: &[u8],
    scales: &[u8],
    values: &mut [T],
) {
    let facts = format.facts();
    let Definition { dequantize_block, .. } = format.definition();
    let length = facts.block.elements();
    let mut wide = vec![0.0; length];
    let blocks = codes.chunks(length * facts.element.bits() / 8).zip(scales.chunks(facts.scale.bytes()));
    for ((codes, scale), values) in blocks.zip(values.chunks_mut(length)) {
        let wide = &mut wide[..values.len()];
        dequantize_block(facts.scale.read(scale), codes, wide);
        values.iter_mut().zip(wide).for_each(|(value, wide)| *value = T::from_f32(*wide));
    }
}
