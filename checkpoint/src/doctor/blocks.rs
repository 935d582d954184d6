//! Checks scale bytes and codes block by block: NaN, signed scales, zero blocks, saturated blocks.

use microscale::{Element, Format};

use super::finding::{Defect, Finding};
use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::packed::bands::PackedBlocks;
use crate::error::Result;
use crate::pipeline::Worker;
use crate::quantize::matrix;
use crate::quantize::matrix::Matrix;
use crate::read::bands::{self, row_bands};
use crate::read::input::Input;
use crate::read::tensor::elements;
use crate::read::values::with_values;

/// Share of zero blocks that is not reported. Pruned and padded models have some.
const MAX_ZERO_BLOCKS: f64 = 0.05;

/// Share of saturated blocks that is not reported. A block counts as saturated if all its codes are
/// ±6, or if at least a quarter are and its scale is the largest that the format has. Plain
/// rounding of weights clips about a tenth of the elements.
const MAX_SATURATED_BLOCKS: f64 = 0.01;

/// Counts of the defects, with the first block of each.
#[derive(Clone, Copy, Default)]
struct DefectCounts {
    nan: Count,
    signed: Count,
    zeros: Count,
    saturated: Count,
}

#[derive(Clone, Copy, Default)]
struct Count {
    blocks: u64,
    /// Index and scale byte of the first block.
    first: Option<(usize, u8)>,
}

impl Count {
    fn add(&mut self, counted: bool, block: usize, scale: u8) {
        if counted {
            self.blocks += 1;
            self.first.get_or_insert((block, scale));
        }
    }

    /// The sum of both; `later` counts blocks after these.
    fn then(self, later: Self) -> Self {
        Self { blocks: self.blocks + later.blocks, first: self.first.or(later.first) }
    }
}

/// Checks a tensor's scales and codes. Zero blocks are not counted if the original has zeros there.
///
/// # Errors
/// The errors of reading the original.
pub(super) fn check_blocks<'env>(
    packed: &'env Packed<'env>,
    original: Option<&Input<'env>>,
    worker: &Worker<'_, 'env>,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let elements = elements(&packed.shape) as usize;
    let count = move |number: usize| {
        Ok(count_defects(packed.format, &packed.blocks_in(bands::band(elements, number))))
    };
    let mut counts = DefectCounts::default();
    worker.each_band(bands::count(elements), count, |of_band| {
        counts = counts.then(of_band);
        Ok(())
    })?;
    let blocks = packed.blocks();
    let comparable = |original: &&Input<'_>| {
        original.tensor.values_dtype().is_some() && original.tensor.shape == packed.shape
    };
    if counts.zeros.blocks > 0
        && let Some(original) = original.filter(comparable)
    {
        counts.zeros = lost_blocks(packed, original, worker)?;
    }
    for (defect, count, tolerated) in [
        (Defect::NanScales, counts.nan, 0.0),
        (Defect::SignedScales, counts.signed, 0.0),
        (Defect::ZeroBlocks, counts.zeros, MAX_ZERO_BLOCKS),
        (Defect::SaturatedBlocks, counts.saturated, MAX_SATURATED_BLOCKS),
    ] {
        if let Some((first, byte)) = count.first.filter(|_| count.blocks as f64 > tolerated * blocks as f64) {
            let blocks_per_row =
                packed.storage.blocks_shape(&packed.shape).last().copied().unwrap_or(1).max(1);
            let (row, block) = (first / blocks_per_row, first % blocks_per_row);
            let what = format!(
                "{} of {blocks} blocks, the first in row {row}, block {block} (scale byte {byte:#04x})",
                count.blocks
            );
            findings.push(Finding::in_packed(defect, packed, what));
        }
    }
    Ok(())
}

/// Counts the zero blocks whose original has a value other than zero.
fn lost_blocks<'env>(
    packed: &'env Packed<'env>,
    original: &Input<'env>,
    worker: &Worker<'_, 'env>,
) -> Result<Count> {
    let (format, storage, original) = (packed.format, packed.storage, original.clone());
    let (rows, cols) = matrix::size(&original.tensor, storage);
    let bands: Vec<_> = row_bands(rows, cols, None, bands::BAND).collect();
    let last = bands.len();
    let count = move |number: usize| {
        let rows = bands.get(number).cloned().unwrap_or_default();
        let blocks = packed.blocks_in(rows.start * cols..rows.end * cols);
        Matrix::with_rows(&original, storage, rows, |matrix| {
            let mut count = Count::default();
            with_values!(&matrix.values, slice => {
                let coded = blocks.scales.iter().zip(blocks.codes.chunks_exact(format.block_bytes()));
                for (i, ((scale, codes), values)) in coded.zip(slice.chunks(format.block())).enumerate() {
                    let lost = is_zeros(codes) && values.iter().any(|value| Element::to_f32(*value) != 0.0);
                    count.add(lost, blocks.first + i, *scale);
                }
            });
            count
        })
    };
    let mut lost = Count::default();
    worker.each_band(last, count, |of_band| {
        lost = lost.then(of_band);
        Ok(())
    })?;
    Ok(lost)
}

/// Returns whether 4-bit codes are all zero, positive or negative.
fn is_zeros(codes: &[u8]) -> bool {
    codes.iter().all(|byte| byte & 0x77 == 0)
}

fn count_defects(format: Format, blocks: &PackedBlocks<'_>) -> DefectCounts {
    let mut counts = DefectCounts::default();
    let coded = blocks.scales.iter().zip(blocks.codes.chunks_exact(format.block_bytes()));
    for (block, (scale, codes)) in (blocks.first..).zip(coded) {
        counts.add(format, *scale, codes, block);
    }
    counts
}

impl DefectCounts {
    fn add(&mut self, format: Format, scale: u8, codes: &[u8], block: usize) {
        // NaN scales count as NaN whatever their sign.
        let nan = format.is_nan_scale(scale);
        self.nan.add(nan, block, scale);
        self.signed.add(!format.is_scale(scale) && !nan, block, scale);
        if format.bits() == 4 {
            self.zeros.add(is_zeros(codes), block, scale);
            let largest = u16::from(scale) == format.facts().scale.largest();
            let cut = codes
                .iter()
                .map(|byte| u32::from(byte & 7 == 7) + u32::from(byte & 0x70 == 0x70))
                .sum::<u32>();
            let all = 2 * codes.len() as u32;
            self.saturated.add(cut == all || largest && 4 * cut >= all, block, scale);
        }
    }

    fn then(self, later: Self) -> Self {
        Self {
            nan: self.nan.then(later.nan),
            signed: self.signed.then(later.signed),
            zeros: self.zeros.then(later.zeros),
            saturated: self.saturated.then(later.saturated),
        }
    }
}
