//! Checks the scales of FP8 and INT8 weights for NaN and infinities.

use super::finding::{Defect, Finding};
use crate::read::tensor::Tensor;

/// Checks the scales of a tensor, if it has any.
pub(super) fn check_w8_scales(tensor: &Tensor<'_>, findings: &mut Vec<Finding>) {
    let Some(scaling) = &tensor.scaling else { return };
    let mut wrong = scaling.scales().enumerate().filter(|(_, scale)| !scale.is_finite());
    if let Some((first, scale)) = wrong.next() {
        let (count, of) = (1 + wrong.count(), scaling.scales().count());
        let what = format!("{count} of the {of} scales in {}, the first at {first} ({scale})", scaling.name);
        findings.push(Finding::of(Defect::NanScales, tensor, what));
    }
}
