//! The check of values against the checkpoint that was quantized. It finds what scales and codes alone cannot
//! show, such as nibbles in the wrong order.

use microscale::{Device, ErrorStats};

use super::finding::{Defect, Finding};
use crate::checkpoint_formats::packed::Packed;
use crate::error::Result;
use crate::read::tensor::Tensor;
use crate::read::values::Values;

/// The SQNR in dB that weights in four bits have at least. Plain rounding of weights gives 17 to 21; less
/// than this is no rounding.
const MIN_SQNR_DB: f64 = 10.0;

/// The margin, in dB, by which another order of nibbles must be better to be the right one.
const NIBBLE_MARGIN_DB: f64 = 3.0;

/// Looks at a quantized tensor beside its original.
///
/// # Errors
/// Those of dequantizing, but for scales that cannot be read, which others tell of.
pub(super) fn check_against_original(
    packed: &Packed<'_>,
    original: &Tensor<'_>,
    device: &Device,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let mut found = |defect, what| findings.push(Finding::in_packed(defect, packed, what));
    if original.values_dtype().is_none() || original.shape != packed.shape {
        let (shape, dtype, expected) = (original.shape, original.dtype, &packed.shape);
        let what = format!("the original is {dtype} of shape {shape:?}, this {expected:?}");
        found(Defect::OtherValues, what);
        return Ok(());
    }
    // The blocks of a scale that is no number say nothing about the others.
    let is_number = |scale: &u8| packed.format.is_scale(*scale) && !packed.format.is_nan_scale(*scale);
    if packed.each_blocks().any(|blocks| !blocks.scales.iter().all(is_number)) {
        return Ok(());
    }
    let as_stored = sqnr(packed, original, Nibbles::AsStored, device)?;
    if as_stored >= MIN_SQNR_DB {
        return Ok(());
    }
    let mut best = as_stored;
    if packed.format.bits() == 4 && packed.scales.is_some() {
        best = sqnr(packed, original, Nibbles::Swapped, device)?;
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

/// The order in which the halves of a byte are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Nibbles {
    AsStored,
    Swapped,
}

/// The closeness of a tensor's values to the original's, in dB.
fn sqnr(packed: &Packed<'_>, original: &Tensor<'_>, nibbles: Nibbles, device: &Device) -> Result<f64> {
    // A byte's values are neighbours where blocks run: along the rows that are stored.
    let apart = if packed.storage.transposed { packed.shape.last().copied().unwrap_or(1) } else { 1 };
    let mut errors = ErrorStats::default();
    for band in packed.bands()? {
        let mut values: Vec<f32> = packed.values_in(band.clone(), device)?;
        if nibbles == Nibbles::Swapped {
            for pair in values.chunks_exact_mut(2 * apart.max(1)) {
                let (low, high) = pair.split_at_mut(apart);
                low.swap_with_slice(high);
            }
        }
        if let Some(original) = original.values_in(band) {
            errors = original.errors_of(&Values::F32(values.into()), errors);
        }
    }
    Ok(errors.sqnr_db())
}
