//! The global scale of each tensor of NVFP4 while a checkpoint is quantized. The parts of a fused
//! layer share one.

use std::sync::Mutex;

use microscale::formats::nvfp4::Arithmetic;
use microscale::{Dtype, ErrorStats, Global, GlobalScale, Recipe, Search, search_global};

use crate::error::{Error, Result};
use crate::pipeline::{Worker, lock};
use crate::plan::Plan;
use crate::quantize::source::Source;

/// Chooses each tensor's global scale while a checkpoint is quantized.
pub(crate) struct Chooser<'a> {
    plan: &'a Plan<'a>,
    /// The global scale of each fused layer, found when its first part is quantized. Locked while
    /// it is being found.
    layers: Vec<Mutex<Option<Found>>>,
}

/// A global scale that follows from an amax.
#[derive(Clone, Copy)]
struct Found {
    plain: GlobalScale,
    best: GlobalScale,
}

/// The recipe of a tensor.
pub(crate) struct Chosen {
    /// The recipe with its global scale, where that is known before.
    pub(crate) recipe: Recipe,
    /// The same without any search.
    pub(crate) plain: Recipe,
}

impl<'a> Chooser<'a> {
    pub(crate) fn new(plan: &'a Plan<'a>) -> Self {
        Self { plan, layers: plan.layers.iter().map(|_| Mutex::default()).collect() }
    }

    /// The recipe for a tensor, and the plain one. `sources` are the tensors of its unit. A global
    /// scale that follows from a shared amax is computed now, unless it is known already.
    ///
    /// # Errors
    /// [`Error::Tensor`], which names the tensor to blame: perhaps another part of the layer.
    pub(crate) fn recipes_for<'env>(
        &'env self,
        source: &Source<'_, 'env>,
        sources: &[Source<'_, 'env>],
        worker: &Worker<'_, 'env>,
    ) -> Result<Chosen> {
        let plan = source.plan;
        let used = self.plan.recipe_of(plan);
        let recipe = used.recipe;
        let given = |plain, best| {
            let [plain, recipe] = [plain, best].map(|scale| recipe.with_global(scale));
            Chosen { recipe, plain: Recipe { search: Search::None, ..plain } }
        };
        let Some(arithmetic) = recipe.scheme.global_from_amax() else {
            return Ok(Chosen { recipe, plain: Recipe { search: Search::None, ..recipe } });
        };
        if let Some(scale) = plan.global_scale {
            return Ok(given(Global::Given(scale), Global::Given(scale)));
        }
        let searching = used.search_global;
        let found = match plan.layer {
            None => {
                if !searching && !source.in_bands() {
                    return Ok(given(Global::FromAmax, Global::FromAmax));
                }
                self.find(&[source.job], &arithmetic, searching, sources, worker)?
            }
            Some(layer) => {
                let mut found = lock(&self.layers[layer]);
                match *found {
                    Some(found) => found,
                    None => {
                        let parts = &self.plan.layers[layer];
                        *found.insert(self.find(parts, &arithmetic, searching, sources, worker)?)
                    }
                }
            }
        };
        Ok(given(Global::Given(found.plain), Global::Given(found.best)))
    }

    /// The global scale of tensors that share one: by the numerics, or if `searching` the best of a
    /// few. The plan made sure that they have the same numerics.
    fn find<'env>(
        &'env self,
        parts: &[usize],
        arithmetic: &Arithmetic,
        searching: bool,
        sources: &[Source<'_, 'env>],
        worker: &Worker<'_, 'env>,
    ) -> Result<Found> {
        let (mut most, mut first) = (0.0f32, None);
        for part in parts {
            let (amax, dtype) = self.with_source(*part, sources, worker, |source, recipe| {
                Ok((source.amax(recipe, worker)?, source.dtype()))
            })?;
            most = most.max(amax);
            // The parts of a layer have one dtype; if not, the first part's decides for all.
            first = first.or(dtype);
        }
        let dtype = first.unwrap_or(Dtype::F32);
        let plain = arithmetic.global_scale(most, |x| microscale::narrow(dtype, x));
        if !searching {
            return Ok(Found { plain, best: plain });
        }
        let scales = search_global::global_scales(arithmetic, most, |x| microscale::narrow(dtype, x));
        let best = search_global::choose(&scales, |scale| {
            let mut errors = ErrorStats::default();
            for part in parts {
                errors += self.with_source(*part, sources, worker, |source, recipe| {
                    let recipe = recipe.with_global(Global::Given(scale));
                    Ok(source.store(recipe, true, worker, |_, _| Ok(()), Ok)?.errors)
                })?;
            }
            Ok::<_, Error>(errors.relative_squared_error())
        })?;
        Ok(Found { plain, best })
    }

    /// Calls `work` with a part and its recipe. A part of another unit is brought to the device.
    fn with_source<'env, R>(
        &'env self,
        part: usize,
        sources: &[Source<'_, 'env>],
        worker: &Worker<'_, 'env>,
        work: impl FnOnce(&Source<'_, 'env>, Recipe) -> Result<R>,
    ) -> Result<R> {
        if let Some(source) = sources.iter().find(|source| source.job == part) {
            return work(source, self.plan.recipe_of(source.plan).recipe);
        }
        let job = &self.plan.jobs[part];
        let Some(plan) = job.plan.quantize() else { unreachable!("layers have tensors to quantize") };
        let matrix = Source::matrix(self.plan, plan, part, worker.device)?;
        let source = Source::new(self.plan, plan, part, worker.device, matrix.as_ref())?;
        let done = work(&source, self.plan.recipe_of(plan).recipe);
        self.plan.checkpoint().forget(&job.tensor);
        done
    }
}
