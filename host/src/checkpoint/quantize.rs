//! Quantizing a checkpoint.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use super::convention::{FileConvention, Storage};
use super::description::Description;
use super::details::Details;
use super::error::{Error, Result};
use super::fused::Fused;
use super::gguf::FileType;
use super::global_scale::{Chooser, GlobalScales, Sources};
use super::ignored::ignored;
use super::importance::Importance;
use super::matrix::{self, Matrix};
use super::others::Skipped;
use super::read::{Checkpoint, Tensor};
use super::rewrite::{OnProgress, Rewrite, rewrite, unchanged};
use super::selection::{Reason, Selection};
use super::source::Stored;
use super::summary::{Outcome, Plain, Summary, TensorSummary, facts_to_json};
use super::values::with_values;
use super::workers::Busy;
use super::write::{Outline, Sink};
use crate::device::Device;
use crate::formats::nvfp4::Direction;
use crate::recipe::{Global, Scheme, Words};
use crate::{Format, QuantizedTensor, Recipe, Search, check_search, search_global};

/// What is to become of each tensor of a checkpoint.
pub struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    recipe: Recipe,
    storage: &'static Storage,
    global_scales: Option<GlobalScales>,
    importance: Option<Importance>,
    search_global: bool,
    check_search: bool,
    /// How many of its worst blocks are looked for in each tensor, if details are wanted.
    worst_blocks: Option<usize>,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<Planned<'a>>,
}

/// What is to become of one tensor.
#[derive(Clone, Debug)]
pub struct Planned<'a> {
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// Why it is copied; `None` if it is quantized.
    pub reason: Option<Reason>,
    /// Bytes of what takes its place.
    pub bytes_after: u64,
}

impl<'a> Plan<'a> {
    /// Decides about every tensor and makes sure that the output's names are free. Files are written by a convention of theirs,
    /// whatever the recipe's arithmetic.
    ///
    /// # Errors
    /// [`Error::AlreadyQuantized`], [`Error::NameTaken`], and those of [`FileConvention::check`].
    pub fn new(
        checkpoint: &'a Checkpoint,
        selection: &Selection,
        recipe: Recipe,
        convention: FileConvention,
    ) -> Result<Self> {
        checkpoint.check_container(convention)?;
        let storage = Storage::of(convention, &recipe)?;
        if let Some((method, config)) = Description::method(checkpoint) {
            return Err(Error::AlreadyQuantized { config, method });
        }
        let mut tensors = Vec::new();
        for tensor in checkpoint.tensors() {
            let reason = selection.reason_to_copy(&tensor, storage);
            let outlines = match reason {
                None => storage.outlines(tensor.name, tensor.shape),
                Some(_) => vec![unchanged(&tensor)],
            };
            let bytes_after = outlines.iter().map(Outline::bytes).sum();
            tensors.push(Planned { tensor, reason, bytes_after });
        }
        let plan = Self {
            checkpoint,
            recipe,
            storage,
            global_scales: None,
            importance: None,
            search_global: false,
            check_search: false,
            worst_blocks: None,
            tensors,
        };
        plan.check_names()?;
        Ok(plan)
    }

    /// Takes the global scales from a file instead of computing them. Formats that have none use none of the file.
    ///
    /// A scale is called `X_global_scale` (a divisor), `X_scale_2` (a multiplier) or X, like its tensor (the direction of the
    /// recipe's convention), and is one F32. One of the other direction is inverted, which rounds it.
    ///
    /// # Errors
    /// [`Error::NoGlobalScale`], [`Error::GlobalScaleTwice`], [`Error::Packed`], [`Error::Tensor`].
    pub fn take_global_scales(&mut self, file: &Checkpoint) -> Result<&GlobalScales> {
        let (names, direction) = match self.recipe.scheme {
            Scheme::Nvfp4(arithmetic, _) => (self.to_quantize().collect(), arithmetic.direction),
            _ => (Vec::new(), Direction::Divisor),
        };
        let names: Vec<_> = names.iter().map(|tensor: &Tensor<'_>| tensor.name).collect();
        let found = GlobalScales::find(file, &names, direction)?;
        self.recipe = self.recipe.with_global(Global::FromAmax);
        Ok(self.global_scales.insert(found))
    }

    /// Takes weights by column from a file, for the search of block scales. A vector is called `X.importance`, `X_importance` or X, like
    /// its tensor, and has a float for each of its columns. Tensors without one are searched unweighted.
    ///
    /// # Errors
    /// [`Error::ImportanceUnused`], [`Error::ImportanceTwice`], [`Error::ImportanceShape`], [`Error::ImportanceNumber`].
    pub fn take_importance(&mut self, file: &Checkpoint) -> Result<&Importance> {
        Importance::check(&self.recipe)?;
        let found = Importance::find(file, self.to_quantize(), self.storage)?;
        Ok(self.importance.insert(found))
    }

    /// Lets NVFP4's global scales be searched too, as [`search_global`] does: for each tensor, or all that share one, the best of a few.
    ///
    /// # Errors
    /// [`Error::NoGlobalSearch`] unless they follow from amax and the recipe has a search.
    pub fn search_global_scales(&mut self) -> Result<()> {
        let why = match self.recipe.scheme {
            Scheme::Nvfp4(_, Global::FromAmax) if self.global_scales.is_none() => match self.recipe.search {
                Search::None => "block scales are not searched".into(),
                _ => {
                    self.search_global = true;
                    return Ok(());
                }
            },
            Scheme::Nvfp4(_, Global::Absent) => "there is none (--global-scale none)".into(),
            Scheme::Nvfp4(..) => "it is given (--global-scale)".into(),
            _ => format!("the format is {}", self.recipe.format()),
        };
        Err(Error::NoGlobalSearch { why })
    }

    /// Lets [`check_search`] look at each tensor once its scales are chosen.
    ///
    /// # Errors
    /// [`Error::NothingToCheck`] unless the recipe has a full search.
    pub fn check_searches(&mut self) -> Result<()> {
        if self.recipe.search != Search::Full {
            return Err(Error::NothingToCheck { search: self.recipe.search });
        }
        self.check_search = true;
        Ok(())
    }

    /// Lets each tensor's [`Details`] be collected once it is quantized, with at most this many of its worst blocks of either kind.
    pub fn collect_details(&mut self, worst_blocks: usize) {
        self.worst_blocks = Some(worst_blocks);
    }

    /// Everything that decides the bytes, name by name.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let mut facts = self.recipe.facts();
        facts.push(("files", self.storage.convention.word().into()));
        for (_, fact) in facts.iter_mut().filter(|(name, _)| *name == "global_scale") {
            if let Some(scales) = &self.global_scales {
                *fact = format!("from {}", scales.path.display());
            }
        }
        if let Some(importance) = &self.importance {
            facts.push(("importance", format!("from {}", importance.path.display())));
        }
        if self.search_global {
            facts.push(("search_global", search_global::TRIED.map(|n| n.to_string()).join(", ")));
        }
        facts
    }

    /// The input.
    pub(super) fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// Adds what was given in files to a hash.
    pub(super) fn add_given(&self, hash: &mut Xxh3) {
        for tensor in self.to_quantize() {
            if let Some(scale) = self.global_scales.as_ref().and_then(|scales| scales.of(tensor.name)) {
                hash.update(&scale.value().to_le_bytes());
            }
            if let Some(weights) = self.importance.as_ref().and_then(|importance| importance.of(tensor.name))
            {
                hash.update(bytemuck::cast_slice(weights));
            }
        }
    }

    /// How tensors are to be quantized.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// How many tensors are to be quantized.
    pub fn quantized(&self) -> usize {
        self.to_quantize().count()
    }

    fn to_quantize(&self) -> impl Iterator<Item = Tensor<'a>> {
        self.tensors.iter().filter(|planned| planned.reason.is_none()).map(|planned| planned.tensor)
    }

    /// What is to become of each tensor, as JSON.
    pub fn to_json(&self) -> Value {
        let tensors = self.tensors.iter().map(|Planned { tensor, reason, bytes_after }| {
            json!({
                "name": tensor.name,
                "file": tensor.file.to_string_lossy(),
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "elements": tensor.elements(),
                "bytes_before": tensor.data.len(),
                "bytes_after": bytes_after,
                "copied": reason.as_ref().map(Reason::to_string),
            })
        });
        let mut json = facts_to_json(&self.facts());
        json.insert("tensors".into(), tensors.collect());
        json.into()
    }

    fn check_names(&self) -> Result<()> {
        let mut taken: HashSet<_> =
            self.tensors.iter().map(|planned| planned.tensor.name.to_string()).collect();
        for tensor in self.to_quantize() {
            for Outline { name, .. } in self.storage.outlines(tensor.name, tensor.shape) {
                if name != tensor.name && !taken.insert(name.clone()) {
                    let (file, tensor) = (tensor.file.into(), tensor.name.into());
                    return Err(Error::NameTaken { file, tensor, name });
                }
            }
        }
        Ok(())
    }

    /// The linear layers that the output's config must tell loaders to ignore.
    fn ignored(&self) -> Vec<String> {
        let copied = self.tensors.iter().filter(|planned| planned.reason.is_some());
        ignored(self.checkpoint, copied.map(|planned| planned.tensor))
    }
}

/// Carries out a plan: writes the quantized checkpoint to `out`, a file or a directory like the input.
///
/// A few tensors are in memory at a time. Output is written under a temporary name next to `out` and renamed at the end, so that a failure or
/// an interruption leaves nothing behind. The same bytes come from every device, or several.
///
/// # Errors
/// [`Error::NothingToQuantize`], [`Error::Tensor`] (among them non-finite values, if the recipe refuses them), and
/// everything about writing.
pub fn quantize(
    plan: &Plan<'_>,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Summary> {
    let start = Instant::now();
    let work = Quantizer::new(plan)?;
    let (tensors, skipped) = rewrite(plan.checkpoint, out, &work, device, progress)?;
    Ok(work.summary(device, tensors, skipped, start))
}

/// What carries out a plan, tensor by tensor.
pub(super) struct Quantizer<'a> {
    plan: &'a Plan<'a>,
    planned: HashMap<&'a str, &'a Planned<'a>>,
    chooser: Chooser<'a>,
}

/// What became of a tensor.
pub(super) struct Done {
    pub(super) summary: TensorSummary,
    /// Blocks whose scales were compared with all others.
    checked_blocks: u64,
    /// From when to when it was quantized, if it was.
    busy: Option<Busy>,
}

impl<'a> Quantizer<'a> {
    /// # Errors
    /// [`Error::NothingToQuantize`].
    pub(super) fn new(plan: &'a Plan<'a>) -> Result<Self> {
        if plan.quantized() == 0 {
            return Err(Error::NothingToQuantize { path: plan.checkpoint.path.clone() });
        }
        let planned = plan.tensors.iter().map(|planned| (planned.tensor.name, planned)).collect();
        let mut chooser = Chooser::new(
            plan.checkpoint,
            plan.recipe,
            plan.storage,
            plan.global_scales.as_ref(),
            plan.to_quantize(),
        );
        if plan.search_global {
            chooser = chooser.searching(plan.importance.as_ref());
        }
        Ok(Self { plan, planned, chooser })
    }

    /// What has happened since `start`.
    pub(super) fn summary(
        &self,
        device: &Device,
        done: Vec<Done>,
        skipped: Vec<Skipped>,
        start: Instant,
    ) -> Summary {
        let checked_blocks = done.iter().map(|done| done.checked_blocks).sum();
        let quantize_seconds = Busy::seconds(done.iter().filter_map(|done| done.busy));
        Summary {
            recipe: self.plan.recipe,
            facts: self.plan.facts(),
            device: device.to_string(),
            tensors: done.into_iter().map(|done| done.summary).collect(),
            skipped,
            seconds: start.elapsed().as_secs_f64(),
            quantize_seconds,
            checked_blocks: self.plan.check_search.then_some(checked_blocks),
        }
    }

    fn reason(&self, tensor: &Tensor<'_>) -> Option<&Reason> {
        self.planned.get(tensor.name).and_then(|planned| planned.reason.as_ref())
    }

    fn copy(tensor: &Tensor<'_>, reason: &Reason, sink: &Sink<'_>) -> Result<Done> {
        sink.write(tensor.name, tensor.data)?;
        let outcome = Outcome::Copied(reason.clone());
        let summary = TensorSummary::new(tensor, tensor.data.len() as u64, outcome);
        Ok(Done { summary, checked_blocks: 0, busy: None })
    }

    /// Quantizes a tensor to what a file holds, measures the loss of that, and of plain scales if others were searched, and writes it.
    fn quantize(
        &self,
        tensor: &Tensor<'_>,
        sources: &Sources<'_>,
        device: &Device,
        sink: &Sink<'_>,
    ) -> Result<Done> {
        let plan = self.plan;
        let weights = plan.importance.as_ref().and_then(|importance| importance.of(tensor.name));
        let from = Instant::now();
        let chosen = self.chooser.recipes_for(tensor, sources, device)?;
        let store = |recipe: &Recipe, weights: Option<&[f32]>| match sources.get(tensor.name) {
            Some(source) => source
                .store(plan.storage, recipe, weights)
                .map_err(|error| matrix::error(tensor, plan.storage, error)),
            None => unreachable!("every tensor to quantize is on the device"),
        };
        let stored = store(&chosen.recipe, weights)?;
        let Stored { tensor: quantized, report, errors, global_scale, quantized: until } = stored;
        let checked_blocks = match plan.check_search {
            true => self.check(tensor, &chosen.recipe, &quantized)?,
            false => 0,
        };
        let plain = match plan.recipe.search {
            Search::None => None,
            _ => Some(store(&chosen.plain, None)?),
        };
        let plain = plain.map(|Stored { errors, global_scale, .. }| Plain { errors, global_scale });
        let details = match plan.worst_blocks {
            None => None,
            Some(most) => Some(Box::new(Details::of(tensor, plan.storage, &quantized, most)?)),
        };
        let seconds = until.duration_since(from).as_secs_f64();
        let outcome = Outcome::Quantized { report, errors, global_scale, seconds, plain, details };
        plan.storage.check_scales(tensor, quantized.scales())?;
        let bytes = quantized.bytes() as u64;
        for (outline, data) in self.outlines(tensor).iter().zip(plan.storage.parts(quantized, tensor.shape)) {
            sink.write(&outline.name, &data)?;
        }
        let (summary, busy) = (TensorSummary::new(tensor, bytes, outcome), Some(Busy { from, until }));
        Ok(Done { summary, checked_blocks, busy })
    }

    /// Compares the scales that were chosen with all others.
    fn check(&self, tensor: &Tensor<'_>, recipe: &Recipe, quantized: &QuantizedTensor) -> Result<u64> {
        let weights = self.plan.importance.as_ref().and_then(|importance| importance.of(tensor.name));
        let Matrix { values, shape } = Matrix::of(tensor, self.plan.storage)?;
        let checked = with_values!(&values, slice => {
            check_search(slice, shape, recipe, weights, quantized)
        });
        checked.map_err(|source| matrix::error(tensor, self.plan.storage, source))
    }
}

impl Rewrite for Quantizer<'_> {
    type Done = Done;

    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        match self.reason(tensor) {
            None => self.plan.storage.outlines(tensor.name, tensor.shape),
            Some(_) => vec![unchanged(tensor)],
        }
    }

    fn layer(&self, tensor: &Tensor<'_>) -> Option<Fused> {
        self.chooser.layer(tensor).filter(|_| self.reason(tensor).is_none())
    }

    fn write(&self, tensors: &[Tensor<'_>], device: &Device, sink: &Sink<'_>) -> Result<Vec<Done>> {
        let storage = self.plan.storage;
        let quantized = tensors.iter().filter(|tensor| self.reason(tensor).is_none());
        let matrices = quantized.map(|tensor| Ok((tensor, Matrix::of(tensor, storage)?)));
        let matrices = matrices.collect::<Result<Vec<_>>>()?;
        let sources = matrices.iter().map(|(tensor, matrix)| {
            let source = matrix.load(device).map_err(|error| matrix::error(tensor, storage, error))?;
            if device.has_memory() {
                // It is there now.
                self.plan.checkpoint.forget(tensor);
            }
            Ok((tensor.name, source))
        });
        let sources = sources.collect::<Result<Sources<'_>>>()?;
        let done = tensors.iter().map(|tensor| match self.reason(tensor) {
            Some(reason) => Self::copy(tensor, reason, sink),
            None => self.quantize(tensor, &sources, device, sink),
        });
        done.collect()
    }

    fn file_type(&self) -> Option<FileType> {
        Some(match self.plan.recipe.format() {
            Format::Nvfp4 => FileType::Nvfp4,
            _ => FileType::Mxfp4,
        })
    }

    fn describe(&self, description: &mut Description) {
        self.plan.storage.describe(description, &self.plan.ignored());
    }
}
