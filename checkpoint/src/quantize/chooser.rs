//! The global scale of each tensor of NVFP4 while a checkpoint is quantized: shared by layers that are fused.

use std::collections::HashMap;
use std::slice;
use std::sync::{Mutex, PoisonError};

use microscale::formats::nvfp4::Arithmetic;
use microscale::{Device, Dtype, ErrorStats, Global, GlobalScale, Recipe, Search, search_global};

use crate::error::{Error, Result};
use crate::names::fused::{Fused, fused};
use crate::plan::Plan;
use crate::plan::treatment::Treatment;
use crate::quantize::source::Source;
use crate::read::tensor::Tensor;

/// Chooses each tensor's global scale while a checkpoint is quantized.
pub(crate) struct Chooser<'a> {
    plan: &'a Plan<'a>,
    /// The tensors that are fused and quantized, by what they are fused into.
    layers: HashMap<Fused, Layer<'a>>,
}

/// The parts of a fused layer. Their global scale is found when the first of them is to be quantized, and
/// kept.
#[derive(Default)]
struct Layer<'a> {
    parts: Vec<Tensor<'a>>,
    /// Locked while it is being found.
    found: Mutex<Option<Found>>,
}

/// The tensors that a worker has on its device, by name.
pub(crate) type Sources<'s> = HashMap<&'s str, Source<'s>>;

/// A global scale that follows from an amax.
#[derive(Clone, Copy)]
struct Found {
    plain: GlobalScale,
    best: GlobalScale,
}

/// The recipe of a tensor.
pub(crate) struct Chosen {
    /// The recipe with its global scale put in, where that is known before.
    pub(crate) recipe: Recipe,
    /// The same without any search.
    pub(crate) plain: Recipe,
}

impl<'a> Chooser<'a> {
    /// Makes a chooser for all tensors that are quantized.
    pub(crate) fn new(plan: &'a Plan<'a>) -> Self {
        let mut layers: HashMap<_, Layer<'a>> = HashMap::new();
        for tensor in plan.to_quantize() {
            if let Some(layer) = fused(tensor.name) {
                layers.entry(layer).or_default().parts.push(tensor);
            }
        }
        // Layers with a single part need no pass of their own.
        layers.retain(|_, layer| layer.parts.len() > 1);
        Self { plan, layers }
    }

    /// The layer that a tensor shares its global scale with, if that follows from an amax.
    pub(crate) fn layer(&self, tensor: &Tensor<'_>) -> Option<Fused> {
        let recipe = &self.plan.of(tensor.name).recipe;
        let from_amax = recipe.scheme.global_from_amax().is_some();
        let given = self.plan.global_scales().is_some_and(|given| given.of(tensor.name).is_some());
        fused(tensor.name).filter(|layer| from_amax && !given && self.layers.contains_key(layer))
    }

    /// The recipe for one tensor, and the plain one. Where it takes its global scale from an amax that it
    /// shares, that is computed now, unless it is known already: of what is on the device there, and of other
    /// parts one at a time.
    ///
    /// # Errors
    /// [`Error::Tensor`], naming the tensor that is to blame: another than the one that is asked for, maybe.
    pub(crate) fn recipes_for(
        &self,
        tensor: &Tensor<'_>,
        sources: &Sources<'_>,
        device: &Device,
    ) -> Result<Chosen> {
        let Treatment { recipe, search_global, .. } = *self.plan.of(tensor.name);
        let given = |plain, best| {
            let [plain, recipe] = [plain, best].map(|scale| recipe.with_global(scale));
            Chosen { recipe, plain: Recipe { search: Search::None, ..plain } }
        };
        let Some(arithmetic) = recipe.scheme.global_from_amax() else {
            return Ok(Chosen { recipe, plain: Recipe { search: Search::None, ..recipe } });
        };
        if let Some(scale) = self.plan.global_scales().and_then(|given| given.of(tensor.name)) {
            return Ok(given(Global::Given(scale), Global::Given(scale)));
        }
        let found = match self.layer(tensor).and_then(|layer| self.layers.get(&layer)) {
            None if !search_global && !sources.get(tensor.name).is_some_and(Source::in_bands) => {
                return Ok(given(Global::FromAmax, Global::FromAmax));
            }
            None => self.find(slice::from_ref(tensor), &arithmetic, search_global, sources, device)?,
            Some(layer) => {
                let mut found = layer.found.lock().unwrap_or_else(PoisonError::into_inner);
                match *found {
                    Some(found) => found,
                    None => {
                        *found.insert(self.find(&layer.parts, &arithmetic, search_global, sources, device)?)
                    }
                }
            }
        };
        Ok(given(Global::Given(found.plain), Global::Given(found.best)))
    }

    /// The global scale of tensors that share one: the convention's, or if that is wanted the best of a few.
    /// Tensors that share one have one arithmetic, which the plan makes sure of.
    fn find(
        &self,
        parts: &[Tensor<'_>],
        arithmetic: &Arithmetic,
        searching: bool,
        sources: &Sources<'_>,
        device: &Device,
    ) -> Result<Found> {
        let mut most = 0.0f32;
        for part in parts {
            let Treatment { recipe, .. } = self.plan.of(part.name);
            most = most.max(self.with(part, sources, device, |source| source.amax(recipe))?);
        }
        // Parts of one layer have one dtype; were they not to, the first one's decides for all.
        let dtype = parts.first().and_then(Tensor::values_dtype).unwrap_or(Dtype::F32);
        let plain = arithmetic.global_scale(most, |x| microscale::narrow(dtype, x));
        if !searching {
            return Ok(Found { plain, best: plain });
        }
        let scales = search_global::global_scales(arithmetic, most, |x| microscale::narrow(dtype, x));
        let best = search_global::choose(&scales, |scale| {
            let mut errors = ErrorStats::default();
            for part in parts {
                let Treatment { recipe, .. } = self.plan.of(part.name);
                let recipe = recipe.with_global(Global::Given(scale));
                let importance = self.plan.importance_of(part);
                errors += self.with(part, sources, device, |source| {
                    Ok(source.store(&recipe, importance, |_, _| Ok(()))?.errors)
                })?;
            }
            Ok::<_, Error>(errors.relative_squared_error())
        })?;
        Ok(Found { plain, best })
    }

    /// Calls `what` with a part, which may have to be brought to the device for it.
    fn with<R>(
        &self,
        part: &Tensor<'_>,
        sources: &Sources<'_>,
        device: &Device,
        what: impl FnOnce(&Source<'_>) -> Result<R>,
    ) -> Result<R> {
        if let Some(source) = sources.get(part.name) {
            return what(source);
        }
        let (checkpoint, storage) = (self.plan.checkpoint(), self.plan.of(part.name).storage);
        let rows_each = self.plan.rows_each(part);
        let matrix = Source::matrix(part, storage, device, rows_each)?;
        let origin = checkpoint.origin(part);
        let source = Source::new(*part, storage, device, matrix.as_ref(), origin, rows_each)?;
        let done = what(&source);
        checkpoint.forget(part);
        done
    }
}
