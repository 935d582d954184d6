//! Checks which tensors are quantized: loaders and engines take only some of them quantized.

use std::collections::BTreeMap;

use super::contents::Contents;
use super::finding::{Defect, Finding};
use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::packed::Packed;
use crate::names::architectures::Experts;
use crate::names::role::Role;
use crate::names::weight::{EXPERTS, is_expert};
use crate::plan::fusions::is_expert_weight;
use crate::plan::loaders::UNQUANTIZED_EXPERTS;
use crate::read::checkpoint::Checkpoint;
use crate::read::experts::is_of_all_experts;

/// Checks the choice of quantized tensors in formats that store a matrix for each linear layer.
pub(super) fn check_selection(contents: &Contents<'_>, findings: &mut Vec<Finding>) {
    let checkpoint = contents.checkpoint;
    let of_layers = |packed: &&Packed<'_>| {
        [CheckpointFormat::CompressedTensors, CheckpointFormat::Modelopt]
            .contains(&packed.checkpoint_format())
    };
    let packed: Vec<_> = contents.packed.iter().filter(of_layers).collect();
    let mut layers: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
    for packed in &packed {
        if let Some(what) = unexpected(checkpoint, packed) {
            findings.push(Finding::in_packed(Defect::Selection, packed, what.into()));
        }
        if let Some((parent, _)) = packed.name.split_once(EXPERTS).filter(|_| is_expert(packed.name)) {
            layers.entry(parent).or_default()[0].get_or_insert(packed.name);
        }
    }
    let by_modules =
        packed.iter().any(|packed| packed.checkpoint_format() == CheckpointFormat::CompressedTensors);
    let plain = || contents.plain.iter().filter(|tensor| tensor.scaling.is_none());
    for tensor in plain().filter(|tensor| is_expert_weight(tensor)) {
        if let Some((parent, _)) = tensor.name.split_once(EXPERTS).filter(|_| is_expert(tensor.name)) {
            layers.entry(parent).or_default()[1].get_or_insert(tensor.name);
        }
    }
    for names in layers.into_values() {
        let [quantized, Some(unquantized)] = names else { continue };
        let Some(tensor) = plain().find(|tensor| tensor.name == unquantized) else { continue };
        if let Some(quantized) = quantized {
            let what = format!("the expert is unquantized, and {quantized} of the same layer is quantized");
            findings.push(Finding::of(Defect::Selection, tensor, what));
        } else if by_modules {
            findings.push(Finding::of(Defect::Loading, tensor, UNQUANTIZED_EXPERTS.into()));
        }
    }
    if checkpoint.naming.experts() == Experts::ApartIfQuantized && !packed.is_empty() {
        for tensor in plain().filter(|tensor| is_of_all_experts(tensor.name)) {
            let what = "the experts of the layer are one tensor, and loaders of quantized files look for one per expert";
            findings.push(Finding::of(Defect::Selection, tensor, what.into()));
        }
    }
}

/// Returns why loaders do not take a tensor quantized.
fn unexpected(checkpoint: &Checkpoint, packed: &Packed<'_>) -> Option<&'static str> {
    let role = checkpoint.naming.unquantized_role(packed.name, &packed.shape);
    // Convolutions are findings of the config.
    if packed.shape.len() > 2 && role != Some(Role::Convolution) {
        return Some("it has more than two dimensions, and loaders take only matrices quantized");
    }
    match role? {
        Role::Router => Some("it is a router, which engines build unquantized"),
        Role::SparseAttention => Some(
            "it is part of the indexer or compressor of sparse attention, which engines build unquantized",
        ),
        Role::NextToken => {
            Some("it is the input projection of multi-token prediction, which engines build unquantized")
        }
        Role::Converted => {
            Some("transformers converts the weight while loading, and only if it is unquantized")
        }
        _ => None,
    }
}
