//! The tensors of a checkpoint, for checks of several tensors together.

use std::collections::BTreeMap;

use crate::checkpoint_formats::packed::Packed;
use crate::names::layers::layer_part;
use crate::names::weight::{EXPERTS, WEIGHT, module};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;

/// The rows of a tensor that are zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Zeros {
    pub(super) rows: usize,
    pub(super) zero: usize,
}

/// The tensors of a checkpoint.
pub(super) struct Contents<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) packed: Vec<Packed<'a>>,
    /// Unquantized tensors, and FP8 and INT8 weights.
    pub(super) plain: Vec<Tensor<'a>>,
    /// Tensors that cannot be read.
    pub(super) unreadable: Vec<Tensor<'a>>,
    /// Tensors with zeros, by name.
    pub(super) zeros: BTreeMap<&'a str, Zeros>,
}

/// A tensor by the name that the model knows.
#[derive(Clone, Copy)]
pub(super) struct Entry<'c> {
    pub(super) name: &'c str,
    /// The shape of the model's parameter; empty if it cannot be read.
    pub(super) shape: &'c [usize],
    /// The stored tensor.
    pub(super) stored: &'c Tensor<'c>,
}

impl Contents<'_> {
    /// Returns all tensors.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let packed = self.packed.iter();
        let packed =
            packed.map(|packed| Entry { name: packed.name, shape: &packed.shape, stored: &packed.codes });
        let plain = self.plain.iter().map(|tensor| (tensor, tensor.shape));
        let unreadable = self.unreadable.iter().map(|tensor| (tensor, &[][..]));
        let others = plain.chain(unreadable);
        packed.chain(others.map(|(stored, shape)| Entry { name: stored.name, shape, stored }))
    }

    /// Returns the quantized layers, FP8 and INT8 included, by their weights' names.
    pub(super) fn quantized(&self) -> impl Iterator<Item = &str> {
        let w8 = self.plain.iter().filter(|tensor| tensor.scaling.is_some());
        self.packed.iter().map(|packed| packed.name).chain(w8.map(|tensor| tensor.name))
    }

    /// Returns the stacks of layers, such as `model.layers`, by name.
    ///
    /// Sequences of other modules are no stacks, such as convolutions with activations in between.
    pub(super) fn stacks(&self) -> BTreeMap<&str, Stack<'_>> {
        let mut stacks: BTreeMap<&str, Stack<'_>> = BTreeMap::new();
        for entry in self.entries() {
            let Some((stack, layer, rest)) = numbered(entry.name) else { continue };
            stacks.entry(stack).or_default().entry(layer).or_default().insert(rest, entry);
        }
        stacks
    }

    /// Returns whether all files of the model are here: not one file of several.
    pub(super) fn is_whole(&self) -> bool {
        let file = self.checkpoint.path().file_stem().unwrap_or_default().to_string_lossy();
        self.checkpoint.directory || !file.contains("-of-")
    }
}

/// The layers of a stack by number, each with its tensors by the rest of their names.
pub(super) type Stack<'c> = BTreeMap<u64, BTreeMap<&'c str, Entry<'c>>>;

/// Last name components of stacks.
const STACKS: [&str; 6] = ["layers", "layer", "h", "blocks", "block", "blk"];

/// Splits a name at its layer number, if it is in a stack: `model.layers`, 3, `mlp.up_proj.weight`.
pub(super) fn numbered(name: &str) -> Option<(&str, u64, &str)> {
    let parts: Vec<&str> = name.split('.').collect();
    let at = layer_part(&parts).filter(|at| *at > 0 && STACKS.contains(&parts[at - 1]))?;
    let stack = parts[..at].iter().map(|part| part.len()).sum::<usize>() + at - 1;
    let rest = stack + 2 + parts[at].len();
    Some((&name[..stack], parts[at].parse().ok()?, name.get(rest..)?))
}

/// The name of the weight that a part of a quantized tensor belongs to, by its name.
pub(super) fn weight_of(part: &str) -> &str {
    let ends = ["_packed", "_blocks", "_scale", "_scales", "_global_scale", "_scale_2", "_scale_inv"];
    let weight = ends.iter().filter_map(|end| part.strip_suffix(end)).min_by_key(|weight| weight.len());
    weight.filter(|weight| weight.ends_with(WEIGHT) || part.contains(EXPERTS)).unwrap_or(part)
}

/// The last component of the name of a tensor's module.
pub(super) fn last_part(name: &str) -> &str {
    let module = module(name);
    module.rsplit('.').next().unwrap_or(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_number_of_a_layer_in_a_stack() {
        assert_eq!(
            numbered("model.layers.11.mlp.experts.3.up_proj.weight"),
            Some(("model.layers", 11, "mlp.experts.3.up_proj.weight"))
        );
        assert_eq!(numbered("h.0.ln_1.weight"), Some(("h", 0, "ln_1.weight")));
        for name in ["model.conv.0.weight", "0.weight", "lm_head.weight", "layers.0", "layers.x.0.y"] {
            assert_eq!(numbered(name), None, "{name}");
        }
    }

    #[test]
    fn parts_of_quantized_tensors_belong_to_a_weight() {
        for (part, weight) in [
            ("a.weight_packed", "a.weight"),
            ("a.weight_scale", "a.weight"),
            ("a.weight_global_scale", "a.weight"),
            ("a.weight_scale_2", "a.weight"),
            ("a.weight_scale_inv", "a.weight"),
            ("mlp.experts.down_proj_blocks", "mlp.experts.down_proj"),
            ("mlp.experts.down_proj_scales", "mlp.experts.down_proj"),
            ("a.weight", "a.weight"),
            ("logit_scale", "logit_scale"),
            ("attn.k_scale", "attn.k_scale"),
            ("model.layer_scales", "model.layer_scales"),
        ] {
            assert_eq!(weight_of(part), weight);
        }
    }
}
