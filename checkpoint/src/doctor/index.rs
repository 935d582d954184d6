//! Checks the index against the shards: tensors that loaders of whole shards take from elsewhere.

use super::finding::{Defect, Finding};
use crate::read::checkpoint::Checkpoint;
use crate::read::index_warnings::Disagreement;

/// Reports tensors that the index does not list, and copies that loaders take instead of its own.
pub(super) fn check_index(checkpoint: &Checkpoint, findings: &mut Vec<Finding>) {
    for Disagreement { unread, read } in checkpoint.disagreements() {
        let file = unread.file.display();
        let what = match read {
            None => format!("{file} has it, and the index does not list it"),
            Some(read) => {
                format!(
                    "the index names {}, and {file}, which loaders read later, has another",
                    read.file.display()
                )
            }
        };
        findings.push(Finding::of(Defect::Index, &unread, what));
    }
}
