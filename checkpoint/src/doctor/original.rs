//! Compares values with the checkpoint that was quantized. This finds defects that scales and codes
//! do not show by themselves, such as nibbles in the wrong order.

use std::collections::HashSet;

use microscale::formats::{E2m1, E4m3, Ties};
use microscale::{Element, ErrorStats, Format, hadamard_rows};

use super::contents::{Contents, weight_of};
use super::finding::{Defect, Finding};
use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::packed::bands::PackedBlocks;
use crate::error::Result;
use crate::pipeline::Worker;
use crate::read::bands::{BAND, band_for};
use crate::read::experts::is_of_all_experts;
use crate::read::input::Input;
use crate::read::tensor::Tensor;
use crate::read::values::{Values, with_values};

/// Smallest SQNR in dB that counts as quantized from the original. Rounding weights to four bits
/// gives 17 to 21 dB.
const MIN_SQNR_DB: f64 = 10.0;

/// Smallest SQNR in dB of an unquantized tensor that counts as the original's in another dtype.
/// BF16 gives 50 dB.
const MIN_COPY_SQNR_DB: f64 = 40.0;

/// Gain in dB from swapping nibbles above which their order is reported as wrong.
const NIBBLE_MARGIN_DB: f64 = 3.0;

/// Share of blocks whose best gain is off by more than [`MAX_GAIN`] that is not reported. The scale
/// of a block fits its own weights whatever chose it. Scales of other blocks do not.
const MAX_MISFIT_BLOCKS: f64 = 0.1;
const MAX_GAIN: f64 = 0.25;

/// Largest share of blocks with codes other than the nearest that is reported. With more of them
/// another rule chose the codes, such as GPTQ's.
const MAX_CHANGED_BLOCKS: f64 = 0.02;

/// How much farther than the nearest code a code must be, as a share of the value and in units of
/// the scale. Arithmetic in BF16 stays below.
const TOLERANCE: (f32, f32) = (0.02, 0.01);

/// Compares a quantized tensor with its original.
///
/// Tensors with scales that are not numbers are skipped: `check_blocks` reports them.
///
/// # Errors
/// The errors of dequantizing.
pub(super) fn check_against_original<'env>(
    packed: &'env Packed<'env>,
    input: &Input<'env>,
    worker: &Worker<'_, 'env>,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let mut found = |defect, what| findings.push(Finding::in_packed(defect, packed, what));
    let original = &input.tensor;
    if original.values_dtype().is_none() || original.shape != packed.shape {
        let (shape, dtype, expected) = (original.shape, original.dtype, &packed.shape);
        let what = format!("the original is {dtype} of shape {shape:?}, this {expected:?}");
        found(Defect::OtherValues, what);
        return Ok(());
    }
    // NaN and foreign scales would hide how close the other blocks are.
    let is_number = |scale: &u8| packed.format.is_scale(*scale) && !packed.format.is_nan_scale(*scale);
    if packed.each_blocks().any(|blocks| !blocks.scales.iter().all(is_number)) {
        return Ok(());
    }
    let as_stored = sqnr(packed, input, Nibbles::AsStored, worker)?;
    if as_stored < MIN_SQNR_DB {
        let mut best = as_stored;
        if packed.format.bits() == 4 && packed.scales.is_some() && packed.hadamard.is_none() {
            best = sqnr(packed, input, Nibbles::Swapped, worker)?;
        }
        if best >= as_stored + NIBBLE_MARGIN_DB {
            let what = format!(
                "SQNR {as_stored:.1} dB to the original as stored, {best:.1} dB with the halves of bytes swapped"
            );
            found(Defect::NibbleOrder, what);
        } else {
            found(Defect::OtherValues, format!("SQNR {as_stored:.1} dB to the original"));
        }
        return Ok(());
    }
    if packed.storage.transposed {
        return Ok(());
    }
    let blocks = compare_blocks(packed, input, worker)?;
    let share = |count: u64| count as f64 / packed.blocks().max(1) as f64;
    if share(blocks.misfit) > MAX_MISFIT_BLOCKS {
        let what = format!(
            "SQNR {as_stored:.1} dB to the original, and the scales of {} of {} blocks do not fit its weights: they are of other blocks",
            blocks.misfit,
            packed.blocks()
        );
        found(Defect::OtherValues, what);
    } else if let Some(first) = blocks.first.filter(|_| share(blocks.changed) <= MAX_CHANGED_BLOCKS) {
        let per_row = packed.storage.blocks_shape(&packed.shape).last().copied().unwrap_or(1).max(1);
        let what = format!(
            "{} of {} blocks have codes that are not the nearest to the original, the first in row {}, block {}",
            blocks.changed,
            packed.blocks(),
            first / per_row,
            first % per_row
        );
        found(Defect::OtherValues, what);
    }
    Ok(())
}

/// How an unquantized tensor and its original differ.
#[derive(Clone, Debug, Default)]
pub(super) struct PlainDifference {
    /// The first element with other bytes, if both have the same dtype.
    pub(super) first: Option<usize>,
    /// The errors of the values, if the dtypes differ.
    pub(super) errors: Option<ErrorStats>,
}

/// Returns whether two unquantized tensors are compared by their bytes.
pub(super) fn has_same_bytes(this: &Tensor<'_>, original: &Tensor<'_>) -> bool {
    let is_stored = |tensor: &Tensor<'_>| tensor.scaling.is_none() && tensor.columns.is_none();
    this.dtype == original.dtype && is_stored(this) && is_stored(original)
}

/// Reports an unquantized tensor that differs from its original by more than a cast.
pub(super) fn report_plain(
    this: &Tensor<'_>,
    original: &Tensor<'_>,
    difference: &PlainDifference,
    findings: &mut Vec<Finding>,
) {
    let least = if this.scaling.is_some() { MIN_SQNR_DB } else { MIN_COPY_SQNR_DB };
    let what = if this.shape != original.shape {
        format!("the original has shape {:?}, this {:?}", original.shape, this.shape)
    } else if let Some(first) = difference.first {
        let cols = this.matrix().1.max(1);
        format!("its values are not the original's, from row {}, column {} on", first / cols, first % cols)
    } else if let Some(sqnr) = difference.errors.map(|errors| errors.sqnr_db()).filter(|sqnr| *sqnr < least) {
        format!("SQNR {sqnr:.1} dB to the original")
    } else {
        return;
    };
    findings.push(Finding::of(Defect::OtherValues, this, what));
}

/// Finds tensors of the original that the checkpoint lacks, if most names of both are the same.
///
/// `left` are the original's tensors that none of the checkpoint's has the name of.
pub(super) fn check_left(contents: &Contents<'_>, left: &[&str], of: usize, findings: &mut Vec<Finding>) {
    let names: HashSet<&str> = contents.entries().map(|entry| weight_of(entry.name)).collect();
    // Other names are another layout of the same model, not missing tensors.
    if 10 * left.len() > of {
        return;
    }
    let buffers = ["inv_freq", "masked_bias", "position_ids", "num_batches_tracked"];
    for name in left {
        let is_optional = contents.checkpoint.naming.is_head(name)
            || is_of_all_experts(name)
            || names.contains(name)
            || buffers.iter().any(|buffer| name.ends_with(buffer));
        if !is_optional {
            findings.push(Finding {
                defect: Defect::Missing,
                tensor: Some((*name).into()),
                file: contents.checkpoint.path().into(),
                what: "the original has it".into(),
            });
        }
    }
}

/// The order of the two nibbles of a byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Nibbles {
    AsStored,
    Swapped,
}

/// SQNR in dB of a tensor's values against the original's.
fn sqnr<'env>(
    packed: &'env Packed<'env>,
    original: &Input<'env>,
    nibbles: Nibbles,
    worker: &Worker<'_, 'env>,
) -> Result<f64> {
    // The two codes of a byte are neighbors along the stored rows, which hold the blocks.
    let apart = if packed.storage.transposed { packed.shape.last().copied().unwrap_or(1) } else { 1 };
    let (bands, device, original) = (packed.bands(band_for(worker.device))?, worker.device, original.clone());
    let last = bands.len();
    let compare = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        let mut values: Vec<f32> = packed.values_in(band.clone(), device)?;
        if nibbles == Nibbles::Swapped {
            for pair in values.chunks_exact_mut(2 * apart.max(1)) {
                let (low, high) = pair.split_at_mut(apart);
                low.swap_with_slice(high);
            }
        }
        original.with_values(band, |original| original.error_parts(&Values::F32(values.into())))
    };
    let mut errors = ErrorStats::default();
    worker.each_band(last, compare, |parts| {
        errors = errors.and_parts(&parts);
        Ok(())
    })?;
    Ok(errors.sqnr_db())
}

/// Blocks that do not fit the original.
#[derive(Clone, Copy, Default)]
struct BlockCounts {
    /// Blocks whose values are off by a factor.
    misfit: u64,
    /// Blocks with codes that are not the nearest.
    changed: u64,
    /// The first of these.
    first: Option<usize>,
}

/// Compares the blocks of a tensor with the original's values.
fn compare_blocks<'env>(
    packed: &'env Packed<'env>,
    original: &Input<'env>,
    worker: &Worker<'_, 'env>,
) -> Result<BlockCounts> {
    let (bands, original) = (packed.bands(BAND)?, original.clone());
    let last = bands.len();
    let compare = move |number: usize| {
        let band = bands.get(number).cloned().unwrap_or_default();
        let blocks = packed.blocks_in(band.clone());
        original.with_values(band, |values| match packed.hadamard {
            None => with_values!(&values, slice => in_blocks(packed, &blocks, slice)),
            Some(width) => {
                let mut wide: Vec<f32> =
                    with_values!(&values, slice => slice.iter().map(|value| value.to_f32()).collect());
                hadamard_rows(&mut wide, width);
                in_blocks(packed, &blocks, &wide)
            }
        })
    };
    let mut counts = BlockCounts::default();
    worker.each_band(last, compare, |of_band| {
        counts.misfit += of_band.misfit;
        counts.changed += of_band.changed;
        counts.first = counts.first.or(of_band.first);
        Ok(())
    })?;
    Ok(counts)
}

fn in_blocks<T: Element>(packed: &Packed<'_>, blocks: &PackedBlocks<'_>, values: &[T]) -> BlockCounts {
    let format = packed.format;
    let (block, element) = (format.block(), format.facts().element);
    let decoded: [f32; 256] = std::array::from_fn(|code| element.decode(code as u8));
    let coded = blocks.scales.iter().zip(blocks.codes.chunks_exact(format.block_bytes()));
    let mut counts = BlockCounts::default();
    for (i, ((scale, codes), values)) in coded.zip(values.chunks(block)).enumerate() {
        let scale = match packed.global_scale {
            Some((_, global)) => global.factor(E4m3::from_bits(*scale)),
            None => format.facts().scale.value((*scale).into()),
        };
        let (mut product, mut square, mut changed) = (0.0, 0.0, false);
        for (at, value) in values.iter().enumerate() {
            let code = match format.bits() {
                4 => codes[at / 2] >> (4 * (at % 2)) & 0xF,
                _ => codes[at],
            };
            let (value, code) = (value.to_f32() / scale, decoded[usize::from(code)]);
            product += f64::from(value) * f64::from(code);
            square += f64::from(code) * f64::from(code);
            let slack = TOLERANCE.0 * value.abs() + TOLERANCE.1;
            changed |= (value - code).abs() > (value - nearest(format, value)).abs() + slack;
        }
        counts.misfit += u64::from(square > 0.0 && (product / square - 1.0).abs() > MAX_GAIN);
        if changed && scale > 0.0 {
            counts.changed += 1;
            counts.first.get_or_insert(blocks.first + i);
        }
    }
    counts
}

/// The value nearest to `value` that a code has.
fn nearest(format: Format, value: f32) -> f32 {
    match format.bits() {
        4 => E2m1::from_f32(value, Ties::Even).to_f32(),
        _ => E4m3::from_f32(value.clamp(-E4m3::MAX, E4m3::MAX)).to_f32(),
    }
}
