//! Unquantized tensors by reason, and files that were not copied.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use microscale_checkpoint::{Outcome, Summary, TensorSummary};

use super::rows::table;
use crate::markup::Markup;
use crate::text::table::{bytes, count, natural_order, shape};

/// Writes the unquantized tensors by reason, the most frequent reason first.
pub(super) fn write(m: &mut Markup, summary: &Summary) {
    let mut reasons: BTreeMap<String, Vec<&TensorSummary>> = BTreeMap::new();
    for tensor in &summary.tensors {
        if let Outcome::Copied(reason) = &tensor.outcome {
            reasons.entry(reason.to_string()).or_default().push(tensor);
        }
    }
    let mut reasons: Vec<_> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, tensors)| Reverse(tensors.len()));
    table(m, "Not quantized", &["tensor", "dtype", "shape", ">bytes"], |rows| {
        for (reason, mut tensors) in reasons {
            tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
            rows.body(|rows| {
                let sum = bytes(tensors.iter().map(|tensor| tensor.bytes_before).sum());
                let plural = if tensors.len() == 1 { "" } else { "s" };
                rows.group(&format!("{reason}: {} tensor{plural}, {sum}", count(tensors.len() as u64)));
                for tensor in tensors {
                    rows.row(|row| {
                        row.name(&tensor.name, true);
                        row.cell(tensor.dtype);
                        row.cell(shape(&tensor.shape));
                        row.cell(bytes(tensor.bytes_before));
                    });
                }
            });
        }
    });
}

/// Writes the files of the directory that were not copied.
pub(super) fn skipped(m: &mut Markup, summary: &Summary) {
    table(m, "Not copied to the output", &["file", "reason"], |rows| {
        rows.body(|rows| {
            for skipped in &summary.skipped {
                rows.row(|row| {
                    row.name(&skipped.path.display().to_string(), true);
                    row.cell(skipped.why);
                });
            }
        });
    });
}
