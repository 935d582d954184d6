//! Recipes for a checkpoint: which tensors to quantize, and how.
//!
//! A recipe has settings for all tensors, patterns, and rules for some tensors. docs/recipes.md
//! describes recipes for users.
//!
//! The treatment of a tensor follows from these, weakest first: names and shapes ([`Selection`]),
//! `include` patterns, the first and last layers to keep, rules in order, `exclude` patterns. If
//! several rules set a key, the last one wins.

mod file;
pub(crate) mod presets;
mod rule;

use microscale::Recipe;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::ignored::tied_heads;
use crate::error::recipe::RecipeError;
use crate::error::{Error, Result};
use crate::names::layers::Layers;
use crate::names::weight::WEIGHT;
use crate::plan::kept_as::KeptAs;
use crate::plan::recipes::rule::{Lines, Rule};
use crate::plan::selection::{Override, Selection};
use crate::plan::settings::{HADAMARD, Settings};
use crate::plan::tensor_recipe::TensorRecipe;
use crate::read::checkpoint::Checkpoint;
use crate::reason::Reason;

/// Which tensors to quantize, and their settings.
///
/// The default uses the defaults of [`Settings`] and [`Selection`]. [`Recipes::named`] loads files
/// and presets.
#[derive(Clone, Debug, Default)]
pub struct Recipes {
    settings: Settings,
    /// Checkpoint format to write, if the recipe has one.
    pub to: Option<CheckpointFormat>,
    /// Storage of unquantized tensors.
    pub kept: KeptAs,
    selection: Selection,
    keep_first_layers: usize,
    keep_last_layers: usize,
    rules: Vec<Rule>,
    /// True for a preset.
    preset: bool,
    /// Name of the file in errors; `None` without a file.
    source: Option<String>,
    /// Lines of the settings in the file. Settings from the command line have no line.
    lines: Lines,
}

impl Recipes {
    /// Uses the same settings for all selected tensors.
    pub fn new(settings: Settings, selection: Selection) -> Self {
        Self { settings, selection, ..Self::default() }
    }

    /// Overrides the settings for all tensors. Rules keep their settings.
    pub fn set(&mut self, settings: Settings) {
        for key in settings.given() {
            self.lines.remove(key);
        }
        self.settings = settings.or(self.settings);
    }

    /// Adds include and exclude patterns.
    ///
    /// # Errors
    /// [`RecipeError::Glob`](crate::RecipeError::Glob) if a pattern is invalid.
    pub fn select(&mut self, include: &[String], exclude: &[String]) -> Result<()> {
        self.selection.add(include, exclude)
    }

    /// Checks that the settings for all tensors are consistent.
    ///
    /// # Errors
    /// [`RecipeError::Settings`](crate::RecipeError::Settings) if settings from the command line
    /// conflict, [`RecipeError::File`](crate::RecipeError::File) if settings from a file do.
    pub fn check_settings(&self) -> Result<()> {
        self.recipe(self.settings, &[]).map(|_| ())
    }

    /// Checks that the settings for all tensors are consistent and fit a checkpoint format.
    ///
    /// # Errors
    /// [`RecipeError::Settings`](crate::RecipeError::Settings) if settings from the command line
    /// conflict, [`RecipeError::File`](crate::RecipeError::File) if settings from a file do.
    pub fn check(&self, checkpoint_format: CheckpointFormat) -> Result<()> {
        self.kept.check(checkpoint_format)?;
        self.tensor_recipe(self.settings, &[], checkpoint_format).map(|_| ())
    }

    /// Lists probable mistakes: patterns without a match, and layers to keep without numbered
    /// layers.
    pub fn unmatched(&self, checkpoint: &Checkpoint) -> Vec<String> {
        let names: Vec<_> = checkpoint.tensors().map(|tensor| tensor.name).collect();
        let mut unmatched: Vec<_> = self
            .selection
            .unmatched(&names)
            .iter()
            .map(|pattern| {
                let tied =
                    tied_heads(checkpoint).into_iter().find(|head| *pattern == format!("{head}{WEIGHT}"));
                let tied = tied
                    .map(|head| format!(": {head} is tied to the embedding, and has no weight of its own"));
                format!("no tensor is called {pattern:?}{}", tied.unwrap_or_default())
            })
            .collect();
        for rule in &self.rules {
            let source = self.source.as_deref().unwrap_or_default();
            // Presets also have patterns for the names of other checkpoints.
            if self.preset && names.iter().any(|name| rule.matches(name)) {
                continue;
            }
            for pattern in
                rule.patterns.iter().filter(|pattern| !names.iter().any(|name| pattern.is_match(name)))
            {
                unmatched.push(format!(
                    "{source}:{}: no tensor is called {:?}",
                    rule.line,
                    pattern.glob().glob()
                ));
            }
        }
        let keeps = self.keep_first_layers + self.keep_last_layers > 0;
        if keeps && Layers::of(names.into_iter()).is_empty() {
            unmatched.push("no tensor is of a layer with a number, so no first or last layer is kept".into());
        }
        unmatched
    }

    /// Lists rules without effect: every tensor that they match is copied anyway.
    pub(crate) fn idle(&self, quantized: &[&str], copied: &[&str]) -> Vec<String> {
        let source = self.source.as_deref().unwrap_or_default();
        let rules = self.rules.iter().filter(|rule| rule.keep != Some(true));
        let idle = rules.filter(|rule| {
            copied.iter().any(|name| rule.matches(name)) && !quantized.iter().any(|name| rule.matches(name))
        });
        let text = |rule: &Rule| {
            let hint = if rule.keep.is_none() { "; keep = false quantizes those that can be" } else { "" };
            format!("{source}:{}: all tensors called {} are copied{hint}", rule.line, rule.text())
        };
        idle.map(text).collect()
    }

    /// Returns the selection by names and shapes.
    pub(crate) fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Returns how the rules override the selection of a tensor, given the checkpoint's layers.
    pub(crate) fn override_of(&self, tensor: &str, layers: &Layers) -> Override {
        let last = self.rules.iter().rev().find(|rule| rule.keep.is_some() && rule.matches(tensor));
        match last {
            Some(rule) if rule.keep == Some(true) => Override::Copy(Reason::KeptByRule(rule.text())),
            Some(_) => Override::Quantize,
            None if layers.is_first(tensor, self.keep_first_layers) => {
                Override::CopyLayer(Reason::FirstLayers(self.keep_first_layers))
            }
            None if layers.is_last(tensor, self.keep_last_layers) => {
                Override::CopyLayer(Reason::LastLayers(self.keep_last_layers))
            }
            None => Override::None,
        }
    }

    /// Returns the recipe that a tensor gets if it is quantized.
    pub(crate) fn recipe_of(
        &self,
        tensor: &str,
        checkpoint_format: CheckpointFormat,
    ) -> Result<TensorRecipe> {
        let rules: Vec<_> = self.rules.iter().filter(|rule| rule.matches(tensor)).collect();
        let settings = rules.iter().fold(self.settings, |those, rule| rule.settings.or(those));
        self.tensor_recipe(settings, &rules, checkpoint_format)
    }

    fn tensor_recipe(
        &self,
        settings: Settings,
        rules: &[&Rule],
        checkpoint_format: CheckpointFormat,
    ) -> Result<TensorRecipe> {
        let (recipe, search_global) = self.recipe(settings, rules)?;
        let refused = |key: &str, why: String| match self.place_of(key, rules) {
            Some(place) => Error::Recipe(RecipeError::File { place, why: format!("{key}: {why}") }),
            None => Error::Recipe(RecipeError::Settings { why }),
        };
        let tensor_recipe = TensorRecipe::new(recipe, search_global, checkpoint_format);
        let tensor_recipe = tensor_recipe.map_err(|error| refused("format", error.to_string()))?;
        let hadamard = settings.hadamard();
        if hadamard.is_some() && checkpoint_format != CheckpointFormat::CompressedTensors {
            let why = format!(
                "{checkpoint_format} has no transforms of layers' inputs; leave out the Hadamard transform, or write \
                 compressed-tensors"
            );
            return Err(refused(HADAMARD, why));
        }
        Ok(TensorRecipe { hadamard, ..tensor_recipe })
    }

    /// Makes a recipe from settings. `rules` are the rules that contributed to them.
    fn recipe(&self, settings: Settings, rules: &[&Rule]) -> Result<(Recipe, bool)> {
        settings.recipe().map_err(|misfit| match self.place_of(misfit.key, rules) {
            Some(place) => Error::Recipe(RecipeError::File { place, why: misfit.of_key() }),
            None => Error::Recipe(RecipeError::Settings { why: misfit.of_option() }),
        })
    }

    /// Returns where a key was set: in the last rule that sets it, or at the top of the file.
    ///
    /// Returns `None` if it was set on the command line.
    fn place_of(&self, key: &str, rules: &[&Rule]) -> Option<String> {
        let line = rules.iter().rev().find_map(|rule| rule.lines.get(key)).or_else(|| self.lines.get(key))?;
        Some(format!("{}:{line}", self.source.as_deref()?))
    }
}
