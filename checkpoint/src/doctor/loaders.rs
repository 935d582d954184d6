//! Checks for correct tensors that known loaders misread or refuse.

use super::contents::Contents;
use super::finding::{Defect, Finding};
use crate::checkpoint_format::CheckpointFormat;
use crate::gguf::format::{SPLIT_COUNT, SPLIT_TENSORS};
use crate::gguf::scales::{Use, use_of};
use crate::names::weight::is_expert;
use crate::read::checkpoint::Checkpoint;

/// Checks all quantized tensors and the headers of GGUF files.
pub(super) fn check_loaders(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let Contents { checkpoint, packed, .. } = contents;
    let architecture = checkpoint.gguf_architecture().unwrap_or_default();
    for packed in packed {
        let Some((stored, scale)) = packed.global_scale else { continue };
        let (name, is_one) = (stored.name, scale.value() == 1.0);
        match packed.checkpoint_format() {
            CheckpointFormat::CompressedTensors if is_expert(packed.name) && !is_one => {
                let what = format!("transformers 5.24 leaves out {name}, {}", scale.value());
                findings.push(Finding::in_packed(Defect::ExpertGlobalScale, packed, what));
            }
            CheckpointFormat::Gguf => {
                let what = match use_of(architecture, packed.name) {
                    Use::Applied => continue,
                    Use::LoadedOnly if is_one => continue,
                    Use::LoadedOnly => {
                        format!("llama.cpp's {architecture} does not multiply with {name}, {}", scale.value())
                    }
                    Use::Unknown => format!(
                        "llama.cpp's {architecture} has no {name}, and refuses files with more tensors than it asks for"
                    ),
                };
                findings.push(Finding::in_packed(Defect::UnreadGlobalScale, packed, what));
            }
            _ => {}
        }
    }
    check_split_count(checkpoint, findings);
    let first =
        packed.iter().find(|packed| packed.checkpoint_format() == CheckpointFormat::CompressedTensors);
    if let Some((what, config)) = checkpoint.naming.loading().problem().zip(checkpoint.config.as_ref())
        && first.is_some()
    {
        let (file, what) = (config.file.clone(), what.into());
        findings.push(Finding { defect: Defect::Loading, tensor: None, file, what });
    }
}

/// Checks the tensor count that the files of a split GGUF model state.
fn check_split_count(checkpoint: &Checkpoint, findings: &mut Vec<Finding>) {
    let files = checkpoint.gguf_headers().count() as u64;
    let tensors = checkpoint.tensors().count() as u64;
    for (shard, header) in checkpoint.gguf_headers() {
        let Some(stated) = header.number(SPLIT_TENSORS).filter(|stated| *stated != tensors) else { continue };
        if header.number(SPLIT_COUNT) == Some(files) {
            let what = format!("{SPLIT_TENSORS} is {stated}, but the {files} files have {tensors} tensors");
            findings.push(Finding { defect: Defect::Config, tensor: None, file: shard.path.clone(), what });
        }
    }
}
