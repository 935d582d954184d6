//! The making of a plan from a request.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use microscale::{Format, Search, Words};

use crate::checkpoint_formats::hadamard::NotTransformed;
use crate::checkpoint_formats::not_converted::NotConverted;
use crate::error::given::GivenError;
use crate::error::output::OutputError;
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::gguf::scales::{Use, use_of};
use crate::names::fused::fused;
use crate::names::layers::Layers;
use crate::plan::global_scales::GlobalScales;
use crate::plan::hessians::{Gptq, Hessians};
use crate::plan::importance::Importance;
use crate::plan::input_scales::InputScales;
use crate::plan::request::Quantize;
use crate::plan::settings::check_search_global;
use crate::plan::sources::sources;
use crate::plan::tensor_recipe::{TensorRecipe, TensorRecipes};
use crate::plan::warning::{FileProblem, Warning};
use crate::plan::{CopyPlan, Plan, QuantizePlan, TensorPlan, fusions};
use crate::read::checkpoint::Checkpoint;
use crate::reason::Reason;
use crate::write::job::Job;
use crate::write::outline::{Outline, copied};

impl Quantize {
    /// Decides about every tensor of a checkpoint, without writing anything.
    ///
    /// # Errors
    /// - [`PlanError::AlreadyQuantized`] if a config declares quantized weights.
    /// - [`PlanError::FusedDiffer`] if parts of a fused layer are not quantized alike.
    /// - [`PlanError::SomeExperts`](crate::PlanError::SomeExperts) if a pattern or rule copies some
    ///   experts of a layer.
    /// - [`PlanError::NoGlobalSearch`] if global scales are both given and to be searched.
    /// - [`PlanError::NothingToCheck`] if [`check_search`](Self::check_search) is set without a
    ///   full search.
    /// - [`FormatError::Packed`](crate::FormatError::Packed) for codes that cannot be read.
    /// - [`OutputError::NameTaken`](crate::OutputError::NameTaken) if an output has the name of
    ///   another tensor.
    /// - [`RecipeError`](crate::RecipeError) for settings that conflict with each other or with the
    ///   checkpoint format.
    /// - [`GivenError`](crate::GivenError) for files of global scales, importance or input scales.
    pub fn plan<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Plan<'a>> {
        let mut plan = Plan::decide(self, checkpoint)?;
        if let Some(path) = &self.global_scales {
            plan.take_global_scales(path)?;
        }
        if let Some(path) = &self.importance {
            plan.take_importance(path)?;
        }
        if let Some(gptq) = &self.gptq {
            plan.take_hessians(gptq)?;
        }
        if let Some(given) = &self.input_scales {
            plan.take_input_scales(given)?;
        }
        plan.share_global_scales();
        if self.check_search && plan.recipes.iter().all(|used| used.recipe.search != Search::Full) {
            let search = plan.recipes[0].recipe.search;
            return Err(Error::Plan(PlanError::NothingToCheck { search }));
        }
        Ok(plan)
    }
}

impl<'a> Plan<'a> {
    /// Decides the job of every tensor, without the optional input files.
    fn decide(request: &Quantize, checkpoint: &'a Checkpoint) -> Result<Self> {
        let recipes = &request.recipes;
        let own = checkpoint.own_format();
        let format = request.format.or(recipes.to).unwrap_or(own);
        checkpoint.check_container(format)?;
        recipes.check(format)?;
        let layers = Layers::of(checkpoint.tensors().map(|tensor| tensor.name));
        let exempt = NotConverted::of(checkpoint);
        let mut decided = Vec::new();
        for (position, tensor) in sources(checkpoint, request.requantize)? {
            let recipe = recipes.recipe_of(tensor.name, format)?;
            let rule = recipes.override_of(tensor.name, &layers);
            let selection = recipes.selection();
            let reason =
                selection.reason_to_copy(&tensor, checkpoint.naming, &exempt, rule, Some(recipe.storage));
            let reason = reason.or_else(|| recipe.unread_global(checkpoint, &tensor));
            decided.push((position, tensor, recipe, reason));
        }
        fusions::unite_experts(decided.iter_mut().map(|(_, tensor, _, reason)| (*tensor, reason)))?;
        let (mut jobs, mut used) = (Vec::new(), TensorRecipes::default());
        let mut untransformed: BTreeMap<NotTransformed, Vec<String>> = BTreeMap::new();
        for (position, tensor, mut recipe, reason) in decided {
            let reason = match (reason, tensor.scaling) {
                (Some(reason), Some(_)) => Some(Reason::Dequantized(reason.into())),
                (reason, _) => reason.map(|reason| recipes.kept.applied(&tensor, reason)),
            };
            let (outputs, plan) = match reason {
                None => {
                    let why =
                        recipe.hadamard.and_then(|width| NotTransformed::of(checkpoint, &tensor, width));
                    if let Some(why) = why {
                        recipe.hadamard = None;
                        untransformed.entry(why).or_default().push(tensor.name.into());
                    }
                    let recipe_number = used.add(recipe, tensor.elements());
                    let plan = QuantizePlan {
                        recipe: recipe_number,
                        importance: None,
                        hessians: None,
                        global_scale: None,
                        input_scale: None,
                        layer: None,
                    };
                    (recipe.outlines(&tensor), TensorPlan::Quantize(plan))
                }
                Some(reason) => {
                    let non_finite = recipe.recipe.non_finite;
                    (vec![copied(&tensor, &reason)], TensorPlan::Copy(CopyPlan { reason, non_finite }))
                }
            };
            jobs.push(Job { tensor, plan, position, outputs });
        }
        let (mut used, order) = used.sorted();
        for job in &mut jobs {
            if let TensorPlan::Quantize(plan) = &mut job.plan {
                plan.recipe = order[plan.recipe];
            }
        }
        if used.is_empty() {
            // Nothing is quantized. Reports show the recipe of a tensor that matches no rule.
            used.push(recipes.recipe_of("", format)?);
        }
        let mut plan = Self {
            checkpoint,
            format,
            recipes: used,
            layers: Vec::new(),
            global_scales: None,
            importance: None,
            input_scales: None,
            hessians: None,
            check_search: request.check_search,
            worst_blocks: request.worst_blocks,
            part: request.part,
            jobs,
            warnings: Vec::new(),
        };
        plan.check_names()?;
        fusions::check(plan.quantized().map(|(job, plan_of)| (job.tensor, plan.recipe_of(plan_of))))?;
        plan.warn_of(request);
        plan.warn_of_untransformed(untransformed)?;
        Ok(plan)
    }

    /// Collects the warnings that do not depend on optional input files.
    fn warn_of(&mut self, request: &Quantize) {
        let recipes = &request.recipes;
        let copied = self.jobs.iter().filter(|job| job.plan.quantize().is_none());
        let copied: Vec<_> = copied.map(|job| job.tensor.name).collect();
        let quantized: Vec<_> = self.quantized().map(|(job, _)| job.tensor.name).collect();
        let unmatched = recipes.unmatched(self.checkpoint).into_iter().map(Warning::Recipe);
        let unknown = self.checkpoint.unknown_architecture();
        let unknown = unknown.map(|model_type| Warning::UnknownArchitecture(model_type.into()));
        let idle = recipes.idle(&quantized, &copied).into_iter().map(Warning::Recipe);
        let loaders = self.misread_by().into_iter().map(Warning::Loaders);
        self.warnings = unmatched.chain(unknown).chain(idle).chain(loaders).collect();
    }

    /// Warns about tensors without the transform that their recipe has.
    ///
    /// # Errors
    /// [`PlanError::NotTransformed`] if no tensor has it.
    fn warn_of_untransformed(&mut self, untransformed: BTreeMap<NotTransformed, Vec<String>>) -> Result<()> {
        let all = self.recipes.iter().all(|used| used.hadamard.is_none());
        for (why, mut names) in untransformed {
            let count = names.len();
            let tensor = names.swap_remove(0);
            if all {
                return Err(Error::Plan(PlanError::NotTransformed { tensor, why: why.word() }));
            }
            self.warnings.push(Warning::Untransformed { tensor, count, why: why.word() });
        }
        Ok(())
    }

    /// Adds a warning that lists `names` of a file, unless there are none.
    fn warn_of_names(&mut self, file: &Path, names: Vec<String>, problem: FileProblem) {
        if !names.is_empty() {
            self.warnings.push(Warning::File { file: file.into(), names, problem });
        }
    }

    /// Takes the global scales from a file instead of computing them.
    fn take_global_scales(&mut self, path: &Path) -> Result<()> {
        for used in self.recipes.iter().filter(|used| used.search_global) {
            check_search_global(&used.recipe, true)?;
        }
        let from_amax = |plan: &QuantizePlan| self.recipe_of(plan).recipe.scheme.global_from_amax();
        let tensors =
            self.quantized().filter_map(|(job, plan)| Some((job.tensor, from_amax(plan)?.direction)));
        let found = GlobalScales::find(&open_given(path, "global scales")?, tensors)?;
        let mut scales = found.scales.into_iter();
        let recipes = &self.recipes;
        for plan in self.jobs.iter_mut().filter_map(quantize_plan) {
            if recipes[plan.recipe].recipe.scheme.global_from_amax().is_some() {
                plan.global_scale = scales.next();
            }
        }
        self.global_scales = Some(path.into());
        self.warn_of_names(path, found.unused, FileProblem::Unused);
        self.warn_of_names(path, found.inverted, FileProblem::Inverted);
        self.warn_of_names(path, found.unequal, FileProblem::Unequal);
        Ok(())
    }

    /// Takes importance per column from a file.
    fn take_importance(&mut self, path: &Path) -> Result<()> {
        if self.recipes.iter().all(|used| used.recipe.search == Search::None) {
            return Err(Error::Given(GivenError::ImportanceUnused));
        }
        let of = self.quantized().count();
        let is_searched = |recipe: &TensorRecipe| recipe.recipe.search != Search::None;
        let searched = self.quantized().map(|(job, plan)| (job.tensor, self.recipe_of(plan)));
        let searched = searched.filter(|(_, recipe)| is_searched(recipe));
        let searched = searched.map(|(tensor, recipe)| (tensor, recipe.storage, recipe.hadamard));
        let file = open_given(path, "importance")?;
        let found = Importance::find(&file, searched)?;
        let mut columns = found.columns.into_iter();
        let recipes = &self.recipes;
        for plan in self.jobs.iter_mut().filter_map(quantize_plan) {
            if is_searched(&recipes[plan.recipe]) {
                plan.importance = columns.next().flatten().map(Arc::new);
            }
        }
        self.importance = Some(path.into());
        self.warn_of_names(path, found.unused, FileProblem::Unused);
        self.warn_of_names(path, found.unweighted, FileProblem::Unweighted { of });
        self.warn_of_names(path, found.partial, FileProblem::Partial);
        Ok(())
    }

    /// Takes Hessians from a calibration.
    fn take_hessians(&mut self, gptq: &Gptq) -> Result<()> {
        let hessians = Hessians::open(gptq)?;
        let (recipes, mut without) = (&self.recipes, Vec::new());
        let of = self.jobs.iter().filter(|job| job.plan.quantize().is_some()).count();
        for job in &mut self.jobs {
            let tensor = job.tensor;
            let Some(plan) = quantize_plan(job) else { continue };
            let recipe = &recipes[plan.recipe];
            if !recipe.storage.format.is_searched() {
                continue;
            }
            plan.hessians = hessians.find(&tensor, recipe)?.map(Arc::new);
            if plan.hessians.is_none() {
                without.push(tensor.name.to_string());
            }
        }
        if without.len() == of {
            let (directory, tensor) = (gptq.statistics.clone(), without.swap_remove(0));
            return Err(Error::Given(GivenError::HessiansOfOthers { directory, tensor }));
        }
        self.warn_of_names(&gptq.statistics, without, FileProblem::WithoutHessian { of });
        self.hessians = Some(hessians);
        Ok(())
    }

    /// Stores the global scale of a layer's inputs next to each of its NVFP4 weights.
    fn take_input_scales(&mut self, given: &InputScales) -> Result<()> {
        let mut tensors = Vec::new();
        for (job, plan) in self.quantized() {
            let (tensor, recipe) = (job.tensor, self.recipe_of(plan));
            let storage = recipe.storage;
            if storage.format != Format::Nvfp4 {
                continue;
            }
            // llama.cpp loads the input scales of layers whose global scales it loads.
            let architecture = self.checkpoint.gguf_architecture();
            let loaded = architecture.is_none_or(|name| use_of(name, tensor.name) != Use::Unknown);
            let stored = storage.stored_input(tensor.name).filter(|_| loaded);
            let unheld = || GivenError::InputScaleUnheld { tensor: tensor.name.into() };
            tensors.push((tensor, stored.ok_or_else(unheld)?, recipe.hadamard));
        }
        if tensors.is_empty() {
            let tensor = "no tensor, as none becomes NVFP4,".into();
            return Err(GivenError::InputScaleUnheld { tensor }.into());
        }
        let found = given.find(tensors.iter().copied())?;
        let mut scales = found.scales.into_iter();
        let recipes = &self.recipes;
        for job in &mut self.jobs {
            let Job { tensor, plan: TensorPlan::Quantize(plan), outputs, .. } = job else { continue };
            let storage = recipes[plan.recipe].storage;
            if storage.format == Format::Nvfp4 {
                plan.input_scale = scales.next();
                let stored = storage.stored_input(tensor.name);
                outputs.extend(stored.and_then(|stored| stored.outline(tensor.name, tensor.shape)));
            }
        }
        self.input_scales = Some(given.described());
        if let Some(file) = given.file() {
            self.warn_of_names(file, found.unused, FileProblem::UnusedInput);
            self.warn_of_names(file, found.without_tokens, FileProblem::WithoutTokens);
        }
        self.check_names()
    }

    /// Groups the tensors whose global scale follows from a shared amax.
    fn share_global_scales(&mut self) {
        let mut layers: HashMap<_, Vec<usize>> = HashMap::new();
        for (number, job) in self.jobs.iter().enumerate() {
            let shares = |plan: &&QuantizePlan| {
                plan.global_scale.is_none() && self.recipe_of(plan).recipe.scheme.global_from_amax().is_some()
            };
            if job.plan.quantize().filter(shares).is_some()
                && let Some(layer) = fused(job.tensor.name, job.tensor.shape)
            {
                layers.entry(layer).or_default().push(number);
            }
        }
        let mut layers: Vec<_> = layers.into_values().filter(|parts| parts.len() > 1).collect();
        layers.sort_unstable();
        for (number, parts) in layers.iter().enumerate() {
            for part in parts {
                if let Some(plan) = quantize_plan(&mut self.jobs[*part]) {
                    plan.layer = Some(number);
                }
            }
        }
        self.layers = layers;
    }

    /// Checks that no output has the name of another tensor or output.
    fn check_names(&self) -> Result<()> {
        let mut taken: HashSet<_> = self.jobs.iter().map(|job| job.tensor.name).collect();
        for (job, _) in self.quantized() {
            for Outline { name, .. } in &job.outputs {
                if name != job.tensor.name && !taken.insert(name) {
                    let (file, tensor) = (job.tensor.file.into(), job.tensor.name.into());
                    return Err(Error::Output(OutputError::NameTaken { file, tensor, name: name.clone() }));
                }
            }
        }
        Ok(())
    }
}

/// Opens an optional input file. Errors call it `what`.
pub(crate) fn open_given(file: &Path, what: &'static str) -> Result<Checkpoint> {
    Checkpoint::open(file)
        .map_err(|source| GivenError::Open { what, file: file.into(), source: source.into() }.into())
}

/// Returns a job's parameters for quantizing, if it quantizes its tensor.
fn quantize_plan<'j>(job: &'j mut Job<'_, TensorPlan>) -> Option<&'j mut QuantizePlan> {
    match &mut job.plan {
        TensorPlan::Quantize(plan) => Some(plan),
        TensorPlan::Copy(_) => None,
    }
}
