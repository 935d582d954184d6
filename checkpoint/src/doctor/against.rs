//! The check of values against the checkpoint that was quantized. It finds what scales and codes alone cannot
//! show, such as nibbles in the wrong order.

use microscale::Device;

use super::finding::{Defect, Finding};
use crate::conventions::packed::Packed;
use crate::error::Result;
use crate::read::tensor::Tensor;
use crate::read::values::Values;

/// The SQNR in dB that weights in four bits have at least. Plain rounding of weights gives 17 to 21; less
/// than this is no rounding.
const LEAST: f64 = 10.0;

/// The margin, in dB, by which another order of nibbles must be better to be the right one.
const BETTER: f64 = 3.0;

/// Looks at a quantized tensor beside its original.
///
/// # Errors
/// Those of dequantizing, but for scales that cannot be read, which others tell of.
pub(super) fn look(
    packed: &Packed<'_>,
    original: &Tensor<'_>,
    device: &Device,
    findings: &mut Vec<Finding>,
) -> Result<()> {
    let mut found = |defect, what| findings.push(Finding::in_packed(defect, packed, what));
    let Some(values) = original.values().filter(|_| original.shape == packed.shape) else {
        let (shape, dtype, expected) = (original.shape, original.dtype, &packed.shape);
        let what = format!("the original is {dtype} of shape {shape:?}, this {expected:?}");
        found(Defect::OtherValues, what);
        return Ok(());
    };
    let Ok(tensor) = packed.read() else { return Ok(()) };
    // The blocks of a NaN scale say nothing about the others.
    if tensor.scales().iter().any(|scale| tensor.format().is_nan_scale(*scale)) {
        return Ok(());
    }
    let as_stored = sqnr(packed, &values, device)?;
    if as_stored >= LEAST {
        return Ok(());
    }
    let mut best = as_stored;
    if packed.format.bits() == 4 && packed.scales.is_some() {
        let swapped: Vec<u8> = packed.codes.data.iter().map(|byte| byte.rotate_left(4)).collect();
        let codes = Tensor { data: &swapped, ..packed.codes };
        best = sqnr(&Packed { codes, ..packed.clone() }, &values, device)?;
    }
    if best >= as_stored + BETTER {
        let what = format!(
            "SQNR {as_stored:.1} dB to the original as stored, {best:.1} dB with the halves of bytes swapped"
        );
        found(Defect::NibbleOrder, what);
    } else {
        found(Defect::OtherValues, format!("SQNR {as_stored:.1} dB to the original"));
    }
    Ok(())
}

/// The closeness of a tensor's values to the original's, in dB.
fn sqnr(packed: &Packed<'_>, original: &Values<'_>, device: &Device) -> Result<f64> {
    let values = Values::F32(packed.values(device)?.into());
    Ok(original.errors_of(&values).sqnr_db())
}
