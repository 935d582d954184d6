//! Checks scale bytes and codes block by block: NaN, signed scales, zero blocks, saturated and
//! enormous blocks.

use microscale::formats::nvfp4;
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

/// How many codes ±6 saturated blocks have at least for each ±4. Blocks of uniformly distributed
/// weights have the largest scale too, and fewer of these codes.
const MIN_CUT_SHARE: f64 = 1.25;

/// Least number of blocks whose scales are reported if they are all the same.
const MIN_EQUAL_SCALES: u64 = 64;

/// Counts of the defects, with the first block of each.
#[derive(Clone, Copy, Default)]
struct DefectCounts {
    nan: Count,
    signed: Count,
    zeros: Count,
    /// Blocks with nothing but ±6.
    full: Count,
    /// Blocks with the largest scale and at least a quarter ±6.
    cut: Count,
    enormous: Count,
    /// Blocks with NaN among their codes.
    nan_codes: Count,
    /// Codes ±6 and ±4 in blocks with the largest scale.
    cut_codes: u64,
    next_codes: u64,
    scales: Scales,
}

/// The scales of blocks with values.
#[derive(Clone, Copy, Default)]
struct Scales {
    blocks: u64,
    /// The first scale.
    first: Option<u8>,
    differ: bool,
    /// True if a block has a code other than 0 and the largest.
    graded: bool,
}

impl Scales {
    /// The sum of both.
    fn then(self, later: Self) -> Self {
        let differ = self.first.zip(later.first).is_some_and(|(first, later)| first != later);
        Self {
            blocks: self.blocks + later.blocks,
            first: self.first.or(later.first),
            differ: self.differ || later.differ || differ,
            graded: self.graded || later.graded,
        }
    }
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
        (Defect::SaturatedBlocks, counts.saturated(), MAX_SATURATED_BLOCKS),
        (Defect::EnormousBlocks, counts.enormous, 0.0),
        (Defect::NonFinite, counts.nan_codes, 0.0),
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
    // Powers of two may be the same for all blocks, and so may the scales of ternary weights.
    let scales = counts.scales;
    if packed.format.has_global_scale()
        && scales.blocks >= MIN_EQUAL_SCALES
        && !scales.differ
        && scales.graded
    {
        let what =
            format!("all {} blocks have the scale byte {:#04x}", scales.blocks, scales.first.unwrap_or(0));
        findings.push(Finding::in_packed(Defect::EqualScales, packed, what));
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
            let matrix = matrix.transformed(packed.hadamard);
            let mut count = Count::default();
            with_values!(&matrix.values, slice => {
                let coded = blocks.scales.iter().zip(blocks.codes.chunks_exact(format.block_bytes()));
                for (i, ((scale, codes), values)) in coded.zip(slice.chunks(format.block())).enumerate() {
                    let lost = is_zeros(format, *scale, codes) && values.iter().any(|value| Element::to_f32(*value) != 0.0);
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

/// Returns whether all values of a block are zeros, by its codes or its scale.
///
/// The smallest scale of MX formats is 2^-127, which only blocks of zeros have.
fn is_zeros(format: Format, scale: u8, codes: &[u8]) -> bool {
    let zero_scale = if format.has_global_scale() { scale & 0x7F == 0 } else { scale == 0 };
    let magnitude = if format.bits() == 4 { 0x77 } else { 0x7F };
    zero_scale || codes.iter().all(|byte| byte & magnitude == 0)
}

/// Counts the 4-bit codes of a magnitude, of either sign.
fn count_of(codes: &[u8], magnitude: u8) -> u64 {
    let is = |nibble: u8| u64::from(nibble & 7 == magnitude);
    codes.iter().map(|byte| is(*byte) + is(byte >> 4)).sum()
}

fn count_defects(format: Format, blocks: &PackedBlocks<'_>) -> DefectCounts {
    let mut counts = DefectCounts::default();
    let coded = blocks.scales.iter().zip(blocks.codes.chunks_exact(format.block_bytes()));
    let element = format.facts().element;
    let nan_codes =
        (format.bits() == 8).then(|| std::array::from_fn(|code| element.decode(code as u8).is_nan()));
    for (block, (scale, codes)) in (blocks.first..).zip(coded) {
        counts.add(format, *scale, codes, block, nan_codes.as_ref());
    }
    counts
}

impl DefectCounts {
    /// `nan_codes` tells which 8-bit codes are NaN.
    fn add(
        &mut self,
        format: Format,
        scale: u8,
        codes: &[u8],
        block: usize,
        nan_codes: Option<&[bool; 256]>,
    ) {
        // NaN scales count as NaN whatever their sign.
        let nan = format.is_nan_scale(scale);
        self.nan.add(nan, block, scale);
        self.signed.add(!format.is_scale(scale) && !nan, block, scale);
        let zeros = is_zeros(format, scale, codes);
        self.zeros.add(zeros, block, scale);
        // The scales of NVFP4 say nothing without the global scale, which has a check of its own.
        let enormous =
            !format.has_global_scale() && format.facts().scale.value(scale.into()) > nvfp4::LARGEST;
        self.enormous.add(enormous && !zeros, block, scale);
        let all = 2 * codes.len() as u64;
        let cut = if let Some(nan) = nan_codes {
            self.nan_codes.add(codes.iter().any(|code| nan[usize::from(*code)]), block, scale);
            let element = format.facts().element;
            2 * codes.iter().filter(|code| element.decode(**code).abs() == element.largest()).count() as u64
        } else {
            let cut = count_of(codes, 7);
            if u16::from(scale) == format.facts().scale.largest() {
                self.cut.add(4 * cut >= all && cut < all, block, scale);
                (self.cut_codes, self.next_codes) =
                    (self.cut_codes + cut, self.next_codes + count_of(codes, 6));
            }
            cut
        };
        self.full.add(cut == all, block, scale);
        if !zeros {
            let graded = format.bits() == 8 || cut + count_of(codes, 0) < all;
            self.scales = self.scales.then(Scales { blocks: 1, first: Some(scale), differ: false, graded });
        }
    }

    /// The blocks that were probably clipped.
    fn saturated(&self) -> Count {
        let is_cut = self.cut_codes as f64 >= MIN_CUT_SHARE * self.next_codes as f64;
        let (full, cut) = (self.full, if is_cut { self.cut } else { Count::default() });
        let first = full.first.into_iter().chain(cut.first).min();
        Count { blocks: full.blocks + cut.blocks, first }
    }

    fn then(self, later: Self) -> Self {
        Self {
            nan: self.nan.then(later.nan),
            signed: self.signed.then(later.signed),
            zeros: self.zeros.then(later.zeros),
            full: self.full.then(later.full),
            cut: self.cut.then(later.cut),
            cut_codes: self.cut_codes + later.cut_codes,
            next_codes: self.next_codes + later.next_codes,
            scales: self.scales.then(later.scales),
            enormous: self.enormous.then(later.enormous),
            nan_codes: self.nan_codes.then(later.nan_codes),
        }
    }
}
