//! The treatment of a tensor, how it is quantized and stored, and the treatments of a checkpoint.

use microscale::{Format, Global, Recipe, Scheme, search_global};

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::storage::Storage;
use crate::error::Result;
use crate::gguf::scales::{Use, use_of};
use crate::plan::used_recipe::Facts;
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::write::outline::Outline;

/// The treatment of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Treatment {
    pub(crate) recipe: Recipe,
    /// True if NVFP4's global scale is searched too.
    pub(crate) search_global: bool,
    pub(crate) storage: &'static Storage,
}

impl Treatment {
    /// # Errors
    /// Those of [`CheckpointFormat::check`].
    pub(crate) fn new(recipe: Recipe, search_global: bool, convention: CheckpointFormat) -> Result<Self> {
        Ok(Self { recipe, search_global, storage: Storage::of(convention, &recipe)? })
    }

    /// Returns whether both treatments give the same tensors.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.recipe, self.search_global) == (other.recipe, other.search_global)
    }

    /// Returns whether tensors have a global scale.
    pub(crate) fn has_global(&self) -> bool {
        matches!(self.recipe.scheme, Scheme::Nvfp4(_, global) if global != Global::Absent)
    }

    /// The tensors that take a tensor's place.
    pub(crate) fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        self.storage.outlines(tensor.name, tensor.shape, self.has_global())
    }

    /// The reason to copy a tensor of a GGUF file whose global scale llama.cpp would not multiply with.
    pub(crate) fn unread_global(&self, checkpoint: &Checkpoint, tensor: &Tensor<'_>) -> Option<Reason> {
        let architecture = checkpoint.gguf_architecture().filter(|_| self.has_global())?;
        let read = use_of(architecture, tensor.name) == Use::Applied;
        (!read).then(|| Reason::NoGlobalScale(architecture.into()))
    }

    pub(crate) fn format(&self) -> Format {
        self.recipe.format()
    }

    /// Everything about it that decides the bytes, beginning with the format.
    pub(crate) fn facts(&self) -> Facts {
        let mut facts = self.recipe.facts();
        if self.search_global {
            facts.push(("search_global", search_global::TRIED.map(|n| n.to_string()).join(", ")));
        }
        facts
    }
}

/// The treatments of a plan while it is made, each with the elements that it is used for.
#[derive(Debug, Default)]
pub(crate) struct Treatments(Vec<(Treatment, u64)>);

impl Treatments {
    /// Uses a treatment for some elements, and returns its number.
    pub(crate) fn add(&mut self, treatment: Treatment, elements: u64) -> usize {
        let known = self.0.iter().position(|(known, _)| known.is_same(&treatment));
        let number = known.unwrap_or(self.0.len());
        match self.0.get_mut(number) {
            Some((_, sum)) => *sum += elements,
            None => self.0.push((treatment, elements)),
        }
        number
    }

    /// All of them, the one for the most elements first, and the place of each by its number.
    pub(crate) fn sorted(self) -> (Vec<Treatment>, Vec<usize>) {
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.sort_by_key(|number| std::cmp::Reverse(self.0[*number].1));
        let mut places = vec![0; order.len()];
        for (place, number) in order.iter().enumerate() {
            places[*number] = place;
        }
        (order.iter().map(|number| self.0[*number].0).collect(), places)
    }
}
