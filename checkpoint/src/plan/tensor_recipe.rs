//! Recipe and storage of a tensor, and the distinct recipes of a plan.

use microscale::{Format, Global, HadamardWidth, Recipe, Scheme, Words, search_global};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::hadamard;
use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::gguf::scales::{Use, use_of};
use crate::plan::used_recipe::Facts;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::write::outline::Outline;

/// How a tensor is quantized and stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorRecipe {
    pub(crate) recipe: Recipe,
    /// True if NVFP4's global scale is searched too.
    pub(crate) search_global: bool,
    /// The transform of the layer's inputs, and of the tensor.
    pub(crate) hadamard: Option<HadamardWidth>,
    pub(crate) storage: &'static Storage,
}

impl TensorRecipe {
    /// Creates a recipe with the storage of `checkpoint_format`.
    ///
    /// # Errors
    /// Errors of [`CheckpointFormat::check`].
    pub(crate) fn new(
        recipe: Recipe,
        search_global: bool,
        checkpoint_format: CheckpointFormat,
    ) -> Result<Self> {
        Ok(Self { recipe, search_global, hadamard: None, storage: Storage::of(checkpoint_format, &recipe)? })
    }

    /// Returns whether both recipes produce the same tensors.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.recipe, self.search_global, self.hadamard)
            == (other.recipe, other.search_global, other.hadamard)
    }

    /// Returns whether quantized tensors have a global scale.
    pub(crate) fn has_global(&self) -> bool {
        matches!(self.recipe.scheme, Scheme::Nvfp4(_, global) if global != Global::Absent)
    }

    /// Returns the outlines of the tensors that replace a tensor.
    pub(crate) fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        let mut outlines = self.storage.outlines(tensor.name, tensor.shape, self.has_global());
        outlines.extend(self.hadamard.map(|width| hadamard::outline(tensor.name, width)));
        outlines
    }

    /// Returns the reason to copy a tensor of a GGUF file if llama.cpp would ignore its global
    /// scale.
    pub(crate) fn unread_global(&self, checkpoint: &Checkpoint, tensor: &Tensor<'_>) -> Option<Reason> {
        let architecture = checkpoint.gguf_architecture().filter(|_| self.has_global())?;
        let read = use_of(architecture, tensor.name) == Use::Applied;
        (!read).then(|| Reason::NoGlobalScale(architecture.into()))
    }

    pub(crate) fn format(&self) -> Format {
        self.recipe.format()
    }

    /// Returns all facts that determine the output's bytes, beginning with the format.
    pub(crate) fn facts(&self) -> Facts {
        let mut facts = self.recipe.facts();
        if let Some(width) = self.hadamard {
            facts.push(("hadamard", width.word().into()));
        }
        if self.search_global {
            facts.push(("search_global", search_global::TRIED.map(|n| n.to_string()).join(", ")));
        }
        facts
    }
}

/// Recipes of an unfinished plan, each with the number of elements that use it.
#[derive(Debug, Default)]
pub(crate) struct TensorRecipes(Vec<(TensorRecipe, u64)>);

impl TensorRecipes {
    /// Adds elements that use a recipe, and returns the recipe's number.
    pub(crate) fn add(&mut self, recipe: TensorRecipe, elements: u64) -> usize {
        let known = self.0.iter().position(|(known, _)| known.is_same(&recipe));
        let number = known.unwrap_or(self.0.len());
        match self.0.get_mut(number) {
            Some((_, sum)) => *sum += elements,
            None => self.0.push((recipe, elements)),
        }
        number
    }

    /// Returns the recipes, the one with the most elements first, and the new place of each number.
    pub(crate) fn sorted(self) -> (Vec<TensorRecipe>, Vec<usize>) {
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.sort_by_key(|number| std::cmp::Reverse(self.0[*number].1));
        let mut places = vec![0; order.len()];
        for (place, number) in order.iter().enumerate() {
            places[*number] = place;
        }
        (order.iter().map(|number| self.0[*number].0).collect(), places)
    }
}
