//! The recipes of a plan, and the use of each.

use microscale::{Format, Recipe};
use serde_json::{Map, Value};

use crate::sums::Sums;

/// A recipe of a plan, and the tensors that use it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UsedRecipe {
    /// The recipe.
    pub recipe: Recipe,
    /// Everything that decides the bytes, name by name.
    pub facts: Facts,
    /// Sums over the tensors that it is used for.
    pub sums: Sums,
}

/// The facts that decide the bytes, by name.
pub type Facts = Vec<(&'static str, String)>;

/// The facts that several recipes have in common.
pub(crate) fn common(recipes: &[UsedRecipe]) -> Facts {
    let Some((first, others)) = recipes.split_first() else { return Facts::new() };
    let shared = first.facts.iter().filter(|fact| others.iter().all(|other| other.facts.contains(fact)));
    shared.cloned().collect()
}

/// The formats of recipes, the one for the most elements first, each with the sums over its
/// tensors.
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

/// The facts that recipes have in common as the first entries of a JSON object, and if there are
/// several recipes each of them.
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
