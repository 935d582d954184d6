//! The check that layers which serving engines fuse are quantized so that one layer can hold them.

use std::collections::HashMap;

use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::names::fused::fused;
use crate::names::weight::EXPERTS;
use crate::plan::treatment::Treatment;
use crate::plan::used_recipe::Facts;
use crate::read::tensor::Tensor;

/// Makes sure that what engines make one layer of is quantized so that one layer can hold it: one format, and
/// where it has a global scale the same arithmetic and the same way to that scale. Experts of one layer,
/// which are one tensor to engines, must have one format.
///
/// # Errors
/// [`PlanError::FusedDiffer`](crate::PlanError::FusedDiffer).
pub(crate) fn check<'a>(treated: impl Iterator<Item = (Tensor<'a>, &'a Treatment)>) -> Result<()> {
    let (mut layers, mut experts) = (HashMap::new(), HashMap::new());
    for (tensor, treatment) in treated {
        if let Some(layer) = fused(tensor.name) {
            let pattern = layer.pattern();
            let (first, as_first) = *layers.entry(layer).or_insert((tensor, treatment));
            if !share_a_layer(as_first, treatment) {
                return Err(differ(first, as_first, tensor, treatment, pattern));
            }
        }
        if let Some((parent, _)) = tensor.name.split_once(EXPERTS) {
            let (first, as_first) = *experts.entry(parent).or_insert((tensor, treatment));
            if as_first.format() != treatment.format() {
                return Err(differ(first, as_first, tensor, treatment, format!("{parent}{EXPERTS}*")));
            }
        }
    }
    Ok(())
}

fn share_a_layer(a: &Treatment, b: &Treatment) -> bool {
    let same_global = (a.recipe.scheme, a.search_global) == (b.recipe.scheme, b.search_global);
    a.format() == b.format() && (a.storage.global_scale.is_none() || same_global)
}

fn differ(
    first: Tensor<'_>,
    as_first: &Treatment,
    second: Tensor<'_>,
    as_second: &Treatment,
    pattern: String,
) -> Error {
    let (first_facts, second_facts) = (as_first.facts(), as_second.facts());
    // Their formats, or else what else is not the same.
    let said = |facts: &Facts, others: &Facts| match as_first.format() == as_second.format() {
        false => facts[0].1.clone(),
        true => {
            let differing = facts.iter().filter(|fact| !others.contains(fact));
            differing
                .map(|(name, fact)| format!("{} {fact}", name.replace('_', " ")))
                .collect::<Vec<_>>()
                .join(", ")
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
