//! Compares values with the checkpoint that was quantized. This finds defects that scales and codes
//! do not show by themselves, such as nibbles in the wrong order.

use microscale::ErrorStats;

use super::finding::{Defect, Finding};
use crate::checkpoint_formats::packed::Packed;
use crate::error::Result;
use crate::pipeline::Worker;
use crate::read::bands::band_for;
use crate::read::input::Input;
use crate::read::values::Values;

/// Smallest SQNR in dB that counts as quantized from the original. Rounding weights to four bits
/// gives 17 to 21 dB.
const MIN_SQNR_DB: f64 = 10.0;

/// Gain in dB from swapping nibbles above which their order is reported as wrong.
const NIBBLE_MARGIN_DB: f64 = 3.0;

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
    if as_stored >= MIN_SQNR_DB {
        return Ok(());
    }
    let mut best = as_stored;
    if packed.format.bits() == 4 && packed.scales.is_some() {
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
    Ok(())
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
