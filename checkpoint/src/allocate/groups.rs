//! Tensors that get one format together: the parts of fused layers, and the experts of a layer.

use std::collections::HashMap;

use crate::names::fused::{Fused, fused};
use crate::names::weight::EXPERTS;

/// What tensors have in common that get one format together.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    /// The name before the number of an expert.
    Experts(&'a str),
    Fused(Fused),
    Single(&'a str),
}

/// Groups tensors, given by names and shapes. Returns the indices of each group's tensors, in the
/// order of the first ones.
pub(crate) fn groups<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Vec<Vec<usize>> {
    let (mut groups, mut known) = (Vec::<Vec<usize>>::new(), HashMap::new());
    for (number, (name, shape)) in tensors.enumerate() {
        let key = match (name.split_once(EXPERTS), fused(name, shape)) {
            (Some((parent, _)), _) => Key::Experts(parent),
            (None, Some(layer)) => Key::Fused(layer),
            (None, None) => Key::Single(name),
        };
        let group = *known.entry(key).or_insert(groups.len());
        if group == groups.len() {
            groups.push(Vec::new());
        }
        groups[group].push(number);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_layers_and_experts_of_a_layer_are_groups() {
        let names = [
            "layers.0.self_attn.q_proj.weight",
            "layers.0.self_attn.o_proj.weight",
            "layers.0.self_attn.k_proj.weight",
            "layers.1.self_attn.k_proj.weight",
            "layers.0.mlp.experts.0.up_proj.weight",
            "layers.0.mlp.experts.1.down_proj.weight",
            "layers.1.mlp.experts.0.up_proj.weight",
            "layers.0.mlp.shared_experts.up_proj.weight",
        ];
        let found = groups(names.iter().map(|name| (*name, &[8, 64][..])));
        assert_eq!(found, [vec![0, 2], vec![1], vec![3], vec![4, 5], vec![6], vec![7]]);
        // Keys of another width are not fused with queries.
        let shapes = [[8, 64], [8, 32]];
        let parts = ["a.q_proj.weight", "a.k_proj.weight"];
        assert_eq!(groups(parts.into_iter().zip(shapes.iter().map(|shape| &shape[..]))).len(), 2);
    }
}
