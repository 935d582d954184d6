//! Checks for transforms that a loader leaves out.

use super::finding::{Defect, Finding};
use crate::checkpoint_formats::transforms::transforms;
use crate::read::checkpoint::Checkpoint;

/// Locations of activations that engines must transform before or after they multiply. Without
/// them, the transform of the weights is not undone. Transforms of queries and keys cancel each
/// other, so a loader may leave out both.
const ACTIVATIONS: [&str; 2] = ["input", "output"];

/// Checks whether transformers computes with the transforms that the config declares.
///
/// Transforms of weights are part of the stored values, so they need no loader.
pub(super) fn check_transforms(checkpoint: &Checkpoint, findings: &mut Vec<Finding>) {
    let Some(transforms) = transforms(checkpoint) else { return };
    let mut groups: Vec<_> =
        transforms.locations().filter(|(_, location)| ACTIVATIONS.contains(location)).collect();
    groups.sort_unstable();
    groups.dedup();
    for (group, location) in groups {
        let what = format!("the transform {group} has the location {location}");
        let file = transforms.file.clone();
        findings.push(Finding { defect: Defect::Transform, tensor: None, file, what });
    }
}
