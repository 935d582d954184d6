//! Plan for quantizing a checkpoint: a job for each tensor, decided before anything is written.
//!
//! | file | contents |
//! |---|---|
//! | `request` | everything that determines the output's bytes |
//! | `part` | the number of a part of a checkpoint |
//! | `build` | making a plan from a request |
//! | `selection` | which tensors are quantized, and why the others are copied |
//! | `sources` | the input's tensors, with the scales that their values need |
//! | `recipes`, `settings` | recipe files and presets; settings by key |
//! | `tensor_recipe` | recipe and storage of one tensor |
//! | `used_recipe` | the recipes of a plan, with totals for each |
//! | `fusions` | the check that the parts of a fused layer fit together |
//! | `loaders` | known bugs of loaders that affect the output |
//! | `warning` | warnings and their texts |
//! | `global_scales`, `importance`, `hessians`, `input_scales` | optional input files |
//! | `kept_as` | storage of unquantized tensors |

pub(crate) mod build;
pub(crate) mod fusions;
pub(crate) mod global_scales;
pub(crate) mod hessians;
pub(crate) mod importance;
pub(crate) mod input_scales;
pub(crate) mod kept_as;
pub(crate) mod loaders;
pub(crate) mod part;
pub(crate) mod recipes;
pub(crate) mod request;
pub(crate) mod selection;
pub(crate) mod settings;
pub(crate) mod sources;
pub(crate) mod tensor_recipe;
pub(crate) mod used_recipe;
pub(crate) mod warning;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use microscale::{Format, GlobalScale, NonFinite, Search, Words};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::hadamard::transform_config;
use crate::checkpoint_formats::ignored::ignored;
use crate::gguf::blocks::Blocks;
use crate::gguf::metadata::FileType;
use crate::names::weight::WEIGHT;
use crate::plan::hessians::{Hessians, TensorHessians};
use crate::plan::importance::Columns;
use crate::plan::part::Part;
use crate::plan::tensor_recipe::TensorRecipe;
use crate::plan::used_recipe::{Facts, UsedRecipe, by_format, common, recipes_to_json};
use crate::plan::warning::Warning;
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::reason::Reason;
use crate::sums::Sums;
use crate::write::job::Job;

/// Plan for quantizing a checkpoint, made by [`Quantize::plan`](crate::Quantize::plan).
pub struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    format: CheckpointFormat,
    /// Recipes, the one with the most elements first. Never empty.
    recipes: Vec<TensorRecipe>,
    /// Indices into `jobs` of each group of tensors that share a global scale.
    pub(crate) layers: Vec<Vec<usize>>,
    /// Files of global scales and importance, and the source of input scales, for reports.
    global_scales: Option<PathBuf>,
    importance: Option<PathBuf>,
    input_scales: Option<String>,
    /// Hessians for GPTQ.
    pub(crate) hessians: Option<Hessians>,
    pub(crate) check_search: bool,
    /// Number of worst blocks to find in each tensor; `None` collects no details.
    pub(crate) worst_blocks: Option<usize>,
    pub(crate) part: Option<Part>,
    /// One job per tensor, in file order. Scales belong to the job of their codes.
    pub jobs: Vec<Job<'a, TensorPlan>>,
    /// Warnings to show before the output is written.
    pub warnings: Vec<Warning>,
}

/// Decision for one tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TensorPlan {
    /// The tensor is quantized.
    Quantize(QuantizePlan),
    /// The tensor is copied. FP8 and INT8 weights are written as values instead.
    Copy(CopyPlan),
}

/// Parameters for quantizing a tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QuantizePlan {
    /// Index of the tensor's recipe in [`Plan::recipes`].
    pub recipe: usize,
    /// Importance of the tensor's columns, if it is given and the recipe searches scales.
    pub(crate) importance: Option<Arc<Columns>>,
    /// Hessians of the tensor's inputs, if it is quantized by GPTQ.
    pub(crate) hessians: Option<Arc<TensorHessians>>,
    /// Global scale of the tensor, if a file gives it.
    pub(crate) global_scale: Option<GlobalScale>,
    /// Global scale of the layer's inputs, if it is given.
    pub(crate) input_scale: Option<GlobalScale>,
    /// Number of the group in [`Plan::layers`] whose amax determines the global scale. `None` if
    /// the tensor shares no global scale.
    pub(crate) layer: Option<usize>,
}

/// Reason for copying a tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopyPlan {
    /// The reason.
    pub reason: Reason,
    /// Policy of the tensor's recipe for NaN and infinities.
    pub(crate) non_finite: NonFinite,
}

impl TensorPlan {
    /// Returns the parameters for quantizing, if the tensor is quantized.
    pub fn quantize(&self) -> Option<&QuantizePlan> {
        match self {
            Self::Quantize(plan) => Some(plan),
            Self::Copy(_) => None,
        }
    }

    /// Returns the reason for copying, if the tensor is copied.
    pub fn copied(&self) -> Option<&Reason> {
        match self {
            Self::Quantize(_) => None,
            Self::Copy(plan) => Some(&plan.reason),
        }
    }
}

/// Shows the checkpoint, the checkpoint format, the recipes and the number of tensors.
impl fmt::Debug for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipes: Vec<_> = self.recipes.iter().map(|used| used.recipe).collect();
        let mut plan = f.debug_struct("Plan");
        plan.field("checkpoint", self.checkpoint).field("format", &self.format);
        plan.field("recipes", &recipes).field("tensors", &self.jobs.len()).finish_non_exhaustive()
    }
}

impl<'a> Plan<'a> {
    /// Returns the recipes, the one with the most elements first.
    ///
    /// Each comes with totals and with all facts that determine the output's bytes.
    pub fn recipes(&self) -> Vec<UsedRecipe> {
        let mut sums = vec![Sums::default(); self.recipes.len()];
        for (job, plan) in self.quantized() {
            sums[plan.recipe].add(job.tensor.elements(), job.tensor.bytes() as u64, job.bytes_after());
        }
        let used = self.recipes.iter().zip(sums);
        used.map(|(used, sums)| UsedRecipe { recipe: used.recipe, facts: self.facts_of(used), sums })
            .collect()
    }

    /// Returns the formats, the one with the most elements first, with totals for each.
    pub fn formats(&self) -> Vec<(Format, Sums)> {
        by_format(&self.recipes())
    }

    /// Returns the facts about the output's bytes that all recipes have in common.
    pub fn facts(&self) -> Facts {
        common(&self.recipes())
    }

    fn facts_of(&self, used: &TensorRecipe) -> Facts {
        let mut facts = used.facts();
        facts.push(("files", self.format.word().into()));
        if let Some(source) = self.input_scales.as_ref().filter(|_| used.format() == Format::Nvfp4) {
            facts.push(("input_scale", source.clone()));
        }
        let from_amax = used.recipe.scheme.global_from_amax().is_some();
        if let Some(path) = self.global_scales.as_ref().filter(|_| from_amax) {
            for (_, fact) in facts.iter_mut().filter(|(name, _)| *name == "global_scale") {
                *fact = format!("from {}", path.display());
            }
        }
        if let Some(path) = self.importance.as_ref().filter(|_| used.recipe.search != Search::None) {
            facts.push(("importance", format!("from {}", path.display())));
        }
        if let Some(hessians) = &self.hessians {
            facts.push(("gptq", hessians.gptq.in_words()));
        }
        facts
    }

    /// Returns the input checkpoint.
    pub(crate) fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Returns the recipe of a quantized tensor.
    pub(crate) fn recipe_of(&self, plan: &QuantizePlan) -> &TensorRecipe {
        &self.recipes[plan.recipe]
    }

    /// Returns the number of a tensor's recipe, if there are several recipes.
    pub(crate) fn number_of(&self, plan: &QuantizePlan) -> Option<usize> {
        (self.recipes.len() > 1).then_some(plan.recipe)
    }

    /// Adds all given scales and importance to a hash.
    pub(crate) fn add_given(&self, hash: &mut Xxh3) {
        if let Some(hessians) = &self.hessians {
            hash.update(hessians.gptq.in_words().as_bytes());
            hash.update(hessians.gptq.statistics.as_os_str().as_encoded_bytes());
        }
        for (_, plan) in self.quantized() {
            for scale in [plan.global_scale, plan.input_scale].into_iter().flatten() {
                hash.update(&scale.value().to_le_bytes());
            }
            if let Some(importance) = &plan.importance {
                hash.update(bytemuck::cast_slice(&importance.numbers));
            }
        }
    }

    /// Iterates over the jobs that quantize a tensor.
    pub(crate) fn quantized(&self) -> impl Iterator<Item = (&Job<'a, TensorPlan>, &QuantizePlan)> {
        self.jobs.iter().filter_map(|job| Some((job, job.plan.quantize()?)))
    }

    /// Returns the number of tensors to quantize.
    pub fn count_quantized(&self) -> usize {
        self.quantized().count()
    }

    /// Returns the job of each tensor as JSON.
    pub fn to_json(&self) -> Value {
        let recipes = self.recipes();
        let tensors = self.jobs.iter().map(|job| {
            let tensor = &job.tensor;
            let mut json = json!({
                "name": tensor.name,
                "file": tensor.file.to_string_lossy(),
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "elements": tensor.elements(),
                "bytes_before": tensor.bytes(),
                "bytes_after": job.bytes_after(),
                "copied": job.plan.copied().map(Reason::to_string),
            });
            if let Some(plan) = job.plan.quantize() {
                json["format"] = recipes[plan.recipe].recipe.format().word().into();
                if recipes.len() > 1 {
                    json["recipe"] = plan.recipe.into();
                }
            }
            json
        });
        let mut json = recipes_to_json(&recipes);
        json.insert("tensors".into(), tensors.collect());
        json.into()
    }

    /// Groups the layers by storage, the group with the most elements first.
    fn groups(&self) -> Vec<Group> {
        let weights = self
            .quantized()
            .map(|(Job { tensor, .. }, plan)| (tensor.name, self.recipe_of(plan).storage, tensor.elements()));
        Group::of(weights, self.checkpoint.naming)
    }

    /// Describes in the output's config how its layers are stored.
    pub(crate) fn describe(&self, description: &mut Description) {
        if Description::method(self.checkpoint).is_some() {
            // Removing the old description must keep the entry about the KV cache.
            description.take_cache();
            description.remove();
        }
        description.activations = self.input_scales.is_some();
        let copied = self.jobs.iter().filter(|job| job.plan.quantize().is_none());
        let ignore = ignored(self.checkpoint, copied.map(|job| job.tensor));
        let weights = self.jobs.iter().map(|job| {
            let recipe = job.plan.quantize().map(|plan| self.recipe_of(plan));
            (job.tensor.name, recipe.and_then(|recipe| recipe.hadamard))
        });
        let weights = weights.filter(|(name, _)| name.ends_with(WEIGHT));
        description.transforms = transform_config(weights, self.checkpoint.naming);
        self.format.describe(&self.groups(), &ignore, description);
    }

    /// Returns ggml's file type for the format of most weights.
    pub(crate) fn file_type(&self) -> FileType {
        let blocks = self.groups().first().and_then(|group| group.storage.blocks);
        blocks.unwrap_or(Blocks::Mxfp4).file_type()
    }
}
