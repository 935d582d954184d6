//! Makes sure that layers which serving engines fuse are quantized alike.

use std::collections::{BTreeMap, HashMap};

use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::names::fused::fused;
use crate::names::weight::{EXPERTS, WEIGHT, is_expert};
use crate::plan::tensor_recipe::TensorRecipe;
use crate::plan::used_recipe::Facts;
use crate::read::tensor::Tensor;
use crate::reason::Reason;

/// Checks that the parts of each fused layer have the same format.
///
/// The transforms of their inputs must be the same. If the format has a global scale, its numerics
/// and the way to choose it must be the same, too.
/// Engines store the experts of a layer in one tensor, so they must have the same format.
///
/// # Errors
/// [`PlanError::FusedDiffer`](crate::PlanError::FusedDiffer) if two parts or experts differ.
pub(crate) fn check<'a>(quantized: impl Iterator<Item = (Tensor<'a>, &'a TensorRecipe)>) -> Result<()> {
    let (mut layers, mut experts) = (HashMap::new(), HashMap::new());
    for (tensor, recipe) in quantized {
        if let Some(layer) = fused(tensor.name, tensor.shape) {
            let pattern = layer.pattern();
            let (first, as_first) = *layers.entry(layer).or_insert((tensor, recipe));
            if !share_a_layer(as_first, recipe) {
                return Err(differ(first, as_first, tensor, recipe, pattern));
            }
        }
        if let Some((parent, _)) = tensor.name.split_once(EXPERTS) {
            let (first, as_first) = *experts.entry(parent).or_insert((tensor, recipe));
            if as_first.format() != recipe.format() {
                return Err(differ(first, as_first, tensor, recipe, format!("{parent}{EXPERTS}*")));
            }
        }
    }
    Ok(())
}

/// Decides alike about the experts of each layer, where they are stored one by one.
///
/// Engines load them into one tensor. If an expert cannot be quantized, the others of its layer are
/// copied, too. Each tensor comes with the reason to copy it; without one it is quantized.
///
/// # Errors
/// [`PlanError::SomeExperts`](crate::PlanError::SomeExperts) if a pattern or rule copies some of
/// them.
pub(crate) fn unite_experts<'a, 'r>(
    tensors: impl Iterator<Item = (Tensor<'a>, &'r mut Option<Reason>)>,
) -> Result<()> {
    let mut layers: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for (tensor, reason) in tensors.filter(|(tensor, _)| is_expert_weight(tensor)) {
        let (parent, _) = tensor.name.split_once(EXPERTS).unwrap_or_default();
        layers.entry(parent).or_default().push((tensor, reason));
    }
    for (parent, experts) in layers {
        let copied = experts.iter().find_map(|(tensor, reason)| Some((*tensor, Option::clone(reason)?)));
        let Some((copied, why)) = copied else { continue };
        let by_user = matches!(why, Reason::Excluded(_) | Reason::KeptByRule(_));
        for (tensor, reason) in experts {
            if reason.is_some() {
                continue;
            }
            if by_user {
                return Err(Error::Plan(PlanError::SomeExperts {
                    file: copied.file.into(),
                    copied: copied.name.into(),
                    why: why.to_string(),
                    quantized: tensor.name.into(),
                    pattern: format!("{parent}{EXPERTS}*"),
                }));
            }
            *reason = Some(Reason::OtherExpert(Box::new(why.clone())));
        }
    }
    Ok(())
}

/// Returns whether a tensor is the matrix of a single expert.
pub(crate) fn is_expert_weight(tensor: &Tensor<'_>) -> bool {
    is_expert(tensor.name) && tensor.name.ends_with(WEIGHT) && tensor.shape.len() == 2
}

fn share_a_layer(a: &TensorRecipe, b: &TensorRecipe) -> bool {
    let same_global = (a.recipe.scheme, a.search_global) == (b.recipe.scheme, b.search_global);
    a.format() == b.format() && a.hadamard == b.hadamard && (a.storage.global_scale.is_none() || same_global)
}

fn differ(
    first: Tensor<'_>,
    as_first: &TensorRecipe,
    second: Tensor<'_>,
    as_second: &TensorRecipe,
    pattern: String,
) -> Error {
    let (first_facts, second_facts) = (as_first.facts(), as_second.facts());
    // The format if the formats differ, or else the other facts that differ.
    let said = |facts: &Facts, others: &Facts| match as_first.format() == as_second.format() {
        false => facts[0].1.clone(),
        true => {
            let differing = facts.iter().filter(|fact| !others.contains(fact));
            let differing: Vec<_> =
                differing.map(|(name, fact)| format!("{} {fact}", name.replace('_', " "))).collect();
            if differing.is_empty() { "without".into() } else { differing.join(", ") }
        }
    };
    Error::Plan(PlanError::FusedDiffer {
        file: second.file.into(),
        first: first.name.into(),
        second: second.name.into(),
        recipes: Box::new([said(&first_facts, &second_facts), said(&second_facts, &first_facts)]),
        pattern,
    })
}
