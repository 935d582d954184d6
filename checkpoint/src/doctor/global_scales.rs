//! Checks NVFP4's global scales: their direction, and their equality within fused layers.

use std::collections::HashMap;

use microscale::Words;
use microscale::formats::{E4m3, e2m1, nvfp4};

use super::finding::{Defect, Finding};
use crate::checkpoint_formats::packed::Packed;
use crate::names::fused::{Fused, fused};

/// Checks the global scales of all quantized tensors.
pub(super) fn check_global_scales(tensors: &[Packed<'_>], findings: &mut Vec<Finding>) {
    let mut layers: HashMap<Fused, &Packed<'_>> = HashMap::new();
    for packed in tensors {
        let Some((_, scale)) = packed.global_scale else { continue };
        if let Some(what) = inverted(packed) {
            findings.push(Finding::in_packed(Defect::InvertedGlobalScale, packed, what));
        }
        let Some(layer) = fused(packed.name, &packed.shape) else { continue };
        let first = *layers.entry(layer).or_insert(packed);
        if let Some((_, other)) = first.global_scale.filter(|(_, other)| other.value() != scale.value()) {
            let (value, name, other) = (scale.value(), first.name, other.value());
            let what = format!("its global scale is {value}, and {name} has {other}");
            findings.push(Finding::in_packed(Defect::UnequalGlobalScales, packed, what));
        }
    }
}

/// Returns the reason, in words, if a global scale is probably inverted.
///
/// The correct global scale puts the largest block scale near 448, so both together imply the
/// tensor's amax `a`. An inverted one implies about 2688² / a instead. One of the two is above 2688
/// and the other below, and no model has weights above 2688.
fn inverted(packed: &Packed<'_>) -> Option<String> {
    let (_, scale) = packed.global_scale?;
    let largest = packed.each_blocks().fold(0.0, |largest, blocks| {
        let scales = blocks.scales.iter().map(|byte| E4m3::from_bits(byte & 0x7F).to_f32());
        scales.filter(|scale| scale.is_finite()).fold(largest, f32::max)
    });
    let implied = |factor: f32| f64::from(largest) * f64::from(e2m1::MAX) * f64::from(factor);
    let as_stored = scale.factor(E4m3::from_f32(1.0));
    let (stored, other) = (implied(as_stored), implied(1.0 / as_stored));
    let limit = f64::from(nvfp4::LARGEST);
    (stored > limit && other < limit).then(|| {
        format!(
            "as a {} its global scale {} means weights up to {stored:.3e}; the other way up, up to {other:.3e}",
            scale.direction().word(),
            scale.value()
        )
    })
}
