//! NVFP4's global scales of a checkpoint: shared by layers that are fused, or read from a file.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::slice;
use std::sync::{Mutex, PoisonError};

use microscale::formats::nvfp4::{Arithmetic, Direction};
use microscale::{Device, Dtype, ErrorStats, Global, GlobalScale, Recipe, Scheme, Search, search_global};

use crate::convention::StoredGlobal;
use crate::error::{Error, Result};
use crate::fused::{Fused, fused};
use crate::matrix::{self, Matrix};
use crate::packed::global_scale;
use crate::plan::Plan;
use crate::read::{Checkpoint, Tensor};
use crate::source::Source;
use crate::treatment::Treatment;
use crate::values::float_dtype;
use crate::{compressed_tensors, modelopt};

/// What a global scale may be called after its tensor, which tells its direction.
const STORED: [StoredGlobal; 2] = [compressed_tensors::GLOBAL_SCALE, modelopt::GLOBAL_SCALE];

/// Global scales from a file, by the tensors that they are for.
#[derive(Clone, Debug)]
pub struct GlobalScales {
    /// The file or directory.
    pub path: PathBuf,
    /// Tensors of the file that are for no tensor that is quantized.
    pub unused: Vec<String>,
    /// Tensors whose global scale was of the other direction than the convention's. Its inverse is taken, rounded to f32.
    pub inverted: Vec<String>,
    /// Tensors that serving engines fuse with others and that have another global scale than those.
    pub unequal: Vec<String>,
    scales: HashMap<String, GlobalScale>,
}

impl GlobalScales {
    /// Finds the global scale of each tensor, for the direction that its convention has: `X_global_scale`, a divisor,
    /// `X_scale_2`, a multiplier, or X itself, which has the convention's direction.
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`], [`Error::GlobalScaleTwice`], [`Error::Packed`] unless it is one F32, and [`Error::Tensor`]
    /// for a number that cannot be a global scale.
    pub(crate) fn find<'a>(
        file: &Checkpoint,
        tensors: impl Iterator<Item = (&'a str, Direction)>,
    ) -> Result<Self> {
        let mut found = Self {
            path: file.path.clone(),
            unused: Vec::new(),
            inverted: Vec::new(),
            unequal: Vec::new(),
            scales: HashMap::new(),
        };
        let mut used = HashSet::new();
        let mut fused_scales = HashMap::new();
        for (name, direction) in tensors {
            let (stored, stored_direction) = candidate(file, name, direction)?;
            let mut scale = global_scale(&stored, stored_direction)?;
            if stored_direction != direction {
                found.inverted.push(name.to_string());
                scale = toward(direction, scale, &stored)?;
            }
            if let Some(layer) = fused(name)
                && *fused_scales.entry(layer).or_insert(scale) != scale
            {
                found.unequal.push(name.to_string());
            }
            used.insert(stored.name);
            found.scales.insert(name.to_string(), scale);
        }
        let unused = file.tensors().map(|tensor| tensor.name).filter(|name| !used.contains(name));
        found.unused = unused.map(Into::into).collect();
        Ok(found)
    }

    /// That of a tensor.
    pub(crate) fn of(&self, tensor: &str) -> Option<GlobalScale> {
        self.scales.get(tensor).copied()
    }
}

/// The stored global scale of a tensor, and its direction.
fn candidate<'a>(file: &'a Checkpoint, name: &str, direction: Direction) -> Result<(Tensor<'a>, Direction)> {
    let [first, second] = STORED.map(|StoredGlobal { suffix, direction, .. }| {
        file.tensor(&format!("{name}{suffix}")).map(|found| (found, direction))
    });
    let path = || file.path.clone();
    match (first, second) {
        (Some((first, _)), Some((second, _))) => {
            let [first, second] = [first, second].map(|found| found.name.into());
            Err(Error::GlobalScaleTwice { file: path(), tensor: name.into(), first, second })
        }
        // A quantized checkpoint may hold codes under the plain name, so that the suffixes come first.
        (Some(found), None) | (None, Some(found)) => Ok(found),
        (None, None) => file
            .tensor(name)
            .map(|found| (found, direction))
            .ok_or_else(|| Error::NoGlobalScale { file: path(), tensor: name.into() }),
    }
}

/// The same scale in another direction, rounded.
fn toward(direction: Direction, scale: GlobalScale, stored: &Tensor<'_>) -> Result<GlobalScale> {
    let inverse = scale.toward(direction);
    let error = || Error::tensor(stored.file, stored.name, microscale::Error::GlobalScale { given: inverse });
    if inverse.in_range() { Ok(inverse) } else { Err(error()) }
}

/// Chooses each tensor's global scale while a checkpoint is quantized.
pub(crate) struct Chooser<'a> {
    plan: &'a Plan<'a>,
    /// The tensors that are fused and quantized, by what they are fused into.
    layers: HashMap<Fused, Layer<'a>>,
}

/// The parts of a fused layer. Their global scale is found when the first of them is to be quantized, and kept.
#[derive(Default)]
struct Layer<'a> {
    parts: Vec<Tensor<'a>>,
    /// Locked while it is being found.
    found: Mutex<Option<Found>>,
}

/// The tensors that a worker has on its device, by name.
pub(crate) type Sources<'s> = HashMap<&'s str, Box<dyn Source + 's>>;

/// A global scale that follows from an amax.
#[derive(Clone, Copy)]
struct Found {
    plain: GlobalScale,
    best: GlobalScale,
}

/// How a tensor is quantized.
pub(crate) struct Chosen {
    /// With its global scale put in, where that is known before.
    pub(crate) recipe: Recipe,
    /// The same without any search.
    pub(crate) plain: Recipe,
}

impl<'a> Chooser<'a> {
    /// For the tensors that are quantized, all of them.
    pub(crate) fn new(plan: &'a Plan<'a>) -> Self {
        let mut layers: HashMap<_, Layer<'a>> = HashMap::new();
        for tensor in plan.to_quantize() {
            if let Some(layer) = fused(tensor.name) {
                layers.entry(layer).or_default().parts.push(tensor);
            }
        }
        // What is left alone needs no pass of its own.
        layers.retain(|_, layer| layer.parts.len() > 1);
        Self { plan, layers }
    }

    /// The layer that a tensor shares its global scale with, if that follows from an amax.
    pub(crate) fn layer(&self, tensor: &Tensor<'_>) -> Option<Fused> {
        let recipe = &self.plan.of(tensor.name).recipe;
        let from_amax = matches!(recipe.scheme, Scheme::Nvfp4(_, Global::FromAmax));
        let given = self.plan.global_scales().is_some_and(|given| given.of(tensor.name).is_some());
        fused(tensor.name).filter(|layer| from_amax && !given && self.layers.contains_key(layer))
    }

    /// The recipe for one tensor, and the plain one. Where it takes its global scale from an amax that it shares, that
    /// is computed now, unless it is known already: of what is on the device there, and of other parts one at a time.
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
        let Scheme::Nvfp4(arithmetic, global @ Global::FromAmax) = recipe.scheme else {
            return Ok(Chosen { recipe, plain: Recipe { search: Search::None, ..recipe } });
        };
        if let Some(scale) = self.plan.global_scales().and_then(|given| given.of(tensor.name)) {
            return Ok(given(Global::Given(scale), Global::Given(scale)));
        }
        let found = match self.layer(tensor).and_then(|layer| self.layers.get(&layer)) {
            None if !search_global => return Ok(given(global, global)),
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

    /// The global scale of tensors that share one: the convention's, or if that is wanted the best of a few. Tensors
    /// that share one have one arithmetic, which the plan makes sure of.
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
        let dtype = parts.first().and_then(|part| float_dtype(part.dtype)).unwrap_or(Dtype::F32);
        let plain = arithmetic.global_scale(most, |x| dtype.narrow(x));
        if !searching {
            return Ok(Found { plain, best: plain });
        }
        let scales = search_global::global_scales(arithmetic, most, |x| dtype.narrow(x));
        let best = search_global::choose(&scales, |scale| {
            let mut errors = ErrorStats::default();
            for part in parts {
                let Treatment { recipe, storage, .. } = self.plan.of(part.name);
                let recipe = recipe.with_global(Global::Given(scale));
                let weights = self.plan.weights_of(part.name);
                errors += self.with(part, sources, device, |source| {
                    Ok(source.store(storage, &recipe, weights)?.errors)
                })?;
            }
            Ok(errors)
        })?;
        Ok(Found { plain, best })
    }

    /// Does something with a part, which may have to be brought to the device for it.
    fn with<R>(
        &self,
        part: &Tensor<'_>,
        sources: &Sources<'_>,
        device: &Device,
        what: impl FnOnce(&dyn Source) -> microscale::Result<R>,
    ) -> Result<R> {
        let storage = self.plan.of(part.name).storage;
        let done = match sources.get(part.name) {
            Some(source) => what(&**source),
            None => {
                let checkpoint = self.plan.checkpoint();
                let matrix = Matrix::of(part, storage)?;
                let done = matrix.load(device, checkpoint.origin(part)).and_then(|source| what(&*source));
                checkpoint.forget(part);
                done
            }
        };
        done.map_err(|error| matrix::error(part, storage, error))
    }
}
