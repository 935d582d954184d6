//! The recipes of a plan, with totals over their tensors.

use microscale::{Format, Recipe};
use serde_json::{Map, Value};

use crate::sums::Sums;

/// A recipe of a plan, with totals over its tensors.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UsedRecipe {
    /// The recipe.
    pub recipe: Recipe,
    /// All facts that determine the output's bytes, by name.
    pub facts: Facts,
    /// Sums over the tensors that use the recipe.
    pub sums: Sums,
}

/// Facts that determine the output's bytes, by name.
pub type Facts = Vec<(&'static str, String)>;

/// Returns the facts that all recipes have in common.
pub(crate) fn common(recipes: &[UsedRecipe]) -> Facts {
    let Some((first, others)) = recipes.split_first() else { return Facts::new() };
    let shared = first.facts.iter().filter(|fact| others.iter().all(|other| other.facts.contains(fact)));
    shared.cloned().collect()
}

/// Returns the formats of recipes, the one with the most elements first, with sums for each.
pub(crate) fn by_format(recipes: &[UsedRecipe]) -> Vec<(Format, Sums)> {
    let mut formats: Vec<(Format, Sums)> = Vec::new();
    for used in recipes {
        let format = used.recipe.format();
        match formats.iter_mut().find(|(known, _)| *known == format) {
            Some((_, sums)) => *sums = sums.with(used.sums),
            None => formats.push((format, used.sums)),
        }
    }
    formats.sort_by_key(|(_, sums)| std::cmp::Reverse(sums.elements));
    formats
}

/// Returns the common facts of recipes as JSON members. If there are several recipes, lists each
/// one, too.
pub(crate) fn recipes_to_json(recipes: &[UsedRecipe]) -> Map<String, Value> {
    let object = |facts: &Facts| -> Map<String, Value> {
        facts.iter().map(|(name, fact)| (name.to_string(), fact.as_str().into())).collect()
    };
    let mut json = object(&common(recipes));
    if recipes.len() > 1 {
        let each = recipes.iter().map(|used| {
            let mut json = object(&used.facts);
            json.insert("used_for".into(), used.sums.to_json());
            Value::Object(json)
        });
        json.insert("recipes".into(), each.collect());
    }
    json
}
