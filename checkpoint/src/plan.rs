//! The plan of quantizing a checkpoint: the fate of each tensor, decided before anything is written.
//!
//! | file | what it knows |
//! |---|---|
//! | `selection` | which tensors are quantized, and why the others are not |
//! | `sources` | the tensors of the input, as their values are read |
//! | `recipes`, `settings` | recipe files and presets; settings key by key |
//! | `treatment`, `used_recipe` | the treatment of one tensor; the recipes of a plan, and the use of each |
//! | `fusions` | whether layers that engines fuse can be one layer |
//! | `loaders` | what loaders are known to do with the output that they should not |
//! | `global_scales`, `importance` | given in files: NVFP4's global scales, importance by column |
//! | `kept_as` | how tensors are stored that stay out of four bits |
//! | `input_scales` | given: the global scales that layers' inputs are quantized with |

pub(crate) mod fusions;
pub(crate) mod global_scales;
pub(crate) mod importance;
pub(crate) mod input_scales;
pub(crate) mod kept_as;
pub(crate) mod loaders;
pub(crate) mod recipes;
pub(crate) mod selection;
pub(crate) mod settings;
pub(crate) mod sources;
pub(crate) mod treatment;
pub(crate) mod used_recipe;

use std::collections::{HashMap, HashSet};
use std::fmt;

use microscale::{Format, GlobalScale, NonFinite, Recipe, Search, Words};
use serde_json::{Value, json};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint_format::CheckpointFormat;
use crate::checkpoint_formats::group::Group;
use crate::checkpoint_formats::ignored::ignored;
use crate::error::given::GivenError;
use crate::error::output::OutputError;
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::gguf::blocks::Blocks;
use crate::gguf::metadata::FileType;
use crate::names::layers::Layers;
use crate::plan::global_scales::GlobalScales;
use crate::plan::importance::{Columns, Importance};
use crate::plan::kept_as::KeptAs;
use crate::plan::recipes::Recipes;
use crate::plan::selection::{Selection, Wish};
use crate::plan::settings::check_search_global;
use crate::plan::sources::sources;
use crate::plan::treatment::{Treatment, Treatments};
use crate::plan::used_recipe::{Facts, UsedRecipe, by_format, common, recipes_to_json};
use crate::read::checkpoint::Checkpoint;
use crate::read::description::Description;
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::sums::Sums;
use crate::write::outline::{Outline, kept};

/// The fate of each tensor of a checkpoint.
pub struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    convention: CheckpointFormat,
    /// The treatments of tensors, by the number of elements that each is for, the largest first. There is one
    /// at least.
    treatments: Vec<Treatment>,
    /// Each tensor's, and its place in the list of all.
    places: HashMap<&'a str, usize>,
    global_scales: Option<GlobalScales>,
    importance: Option<Importance>,
    /// The scales of layers' inputs by the names of their weights, and where they are from.
    input_scales: Option<(HashMap<String, GlobalScale>, String)>,
    pub(crate) check_search: bool,
    /// The number of worst blocks to look for in each tensor, if details are wanted.
    pub(crate) worst_blocks: Option<usize>,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<Planned<'a>>,
}

/// Shows the checkpoint, the checkpoint format, the recipes and the number of tensors.
impl fmt::Debug for Plan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipes: Vec<_> = self.treatments.iter().map(|treatment| treatment.recipe).collect();
        let mut plan = f.debug_struct("Plan");
        plan.field("checkpoint", self.checkpoint).field("convention", &self.convention);
        plan.field("recipes", &recipes).field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

/// The fate of one tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Planned<'a> {
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// The reason why it is copied; `None` if it is quantized.
    pub reason: Option<Reason>,
    /// Bytes of what takes its place.
    pub bytes_after: u64,
    /// The index in [`Plan::recipes`] of the recipe it is quantized by, if it is.
    pub recipe: usize,
    /// What its recipe does about values that are not finite, also if it is not quantized.
    pub(crate) non_finite: NonFinite,
}

impl<'a> Plan<'a> {
    /// Quantizes all tensors of a selection by one recipe. Files are written by a convention of theirs,
    /// whatever the recipe's arithmetic.
    ///
    /// # Errors
    /// [`PlanError::AlreadyQuantized`](crate::PlanError::AlreadyQuantized),
    /// [`FormatError::Packed`](crate::FormatError::Packed) for codes that are not understood,
    /// [`OutputError::NameTaken`](crate::OutputError::NameTaken), and those of [`CheckpointFormat::check`].
    pub fn new(
        checkpoint: &'a Checkpoint,
        selection: &Selection,
        recipe: Recipe,
        convention: CheckpointFormat,
    ) -> Result<Self> {
        checkpoint.check_container(convention)?;
        let treatment = Treatment::new(recipe, false, convention)?;
        let nothing = |_: &str| Wish::Nothing;
        let kept_as = KeptAs::Unchanged;
        Self::decide(checkpoint, selection, convention, kept_as, nothing, |_| Ok(treatment))
    }

    /// Quantizes tensors as [`Recipes`] say, which may have several. Files are written by one convention of
    /// theirs, whatever that of the recipes.
    ///
    /// # Errors
    /// Those of [`Self::new`]; [`RecipeError::File`](crate::RecipeError::File) and
    /// [`RecipeError::Settings`](crate::RecipeError::Settings) for settings that do not go together, or not
    /// with the convention; [`PlanError::FusedDiffer`](crate::PlanError::FusedDiffer).
    pub fn by_recipes(
        checkpoint: &'a Checkpoint,
        recipes: &Recipes,
        convention: CheckpointFormat,
    ) -> Result<Self> {
        checkpoint.check_container(convention)?;
        recipes.check(convention)?;
        let layers = Layers::of(checkpoint.tensors().map(|tensor| tensor.name));
        let wish = |tensor: &str| recipes.wish(tensor, &layers);
        let treatment = |tensor: &str| recipes.treatment_of(tensor, convention);
        Self::decide(checkpoint, recipes.selection(), convention, recipes.kept, wish, treatment)
    }

    /// Decides about every tensor and makes sure that the output's names are free.
    fn decide(
        checkpoint: &'a Checkpoint,
        selection: &Selection,
        convention: CheckpointFormat,
        kept_as: KeptAs,
        wish: impl Fn(&str) -> Wish,
        treatment_of: impl Fn(&str) -> Result<Treatment>,
    ) -> Result<Self> {
        let (mut tensors, mut treatments) = (Vec::new(), Treatments::default());
        let mut places = HashMap::new();
        for (stored, tensor) in sources(checkpoint)? {
            // Codes may be stored under another name than the model's.
            places.extend([(tensor.name, tensors.len()), (stored, tensors.len())]);
            let treatment = treatment_of(tensor.name)?;
            let reason = selection.reason_to_copy(
                &tensor,
                checkpoint.naming,
                wish(tensor.name),
                Some(treatment.storage),
            );
            let reason = reason.or_else(|| treatment.unread_global(checkpoint, &tensor));
            let reason = match (reason, tensor.scaling) {
                (Some(reason), Some(_)) => Some(Reason::Dequantized(reason.into())),
                (reason, _) => reason.map(|reason| kept_as.applied(&tensor, reason)),
            };
            let outlines = match &reason {
                None => treatment.outlines(&tensor),
                Some(reason) => vec![kept(&tensor, reason)],
            };
            let recipe = match reason {
                None => treatments.add(treatment, tensor.elements()),
                Some(_) => 0,
            };
            let bytes_after = outlines.iter().map(Outline::bytes).sum();
            let non_finite = treatment.recipe.non_finite;
            tensors.push(Planned { tensor, reason, bytes_after, recipe, non_finite });
        }
        let (treatments, order) = treatments.sorted();
        for planned in tensors.iter_mut().filter(|planned| planned.reason.is_none()) {
            planned.recipe = order[planned.recipe];
        }
        // Nothing is quantized, and what is said about it is that of any name.
        let treatments = if treatments.is_empty() { vec![treatment_of("")?] } else { treatments };
        let plan = Self {
            checkpoint,
            convention,
            treatments,
            places,
            global_scales: None,
            importance: None,
            input_scales: None,
            check_search: false,
            worst_blocks: None,
            tensors,
        };
        plan.check_names()?;
        fusions::check(plan.to_quantize().map(|tensor| (tensor, plan.of(tensor.name))))?;
        Ok(plan)
    }

    /// Takes the global scales from a file instead of computing them. Formats that have none use none of the
    /// file, and recipes that give one keep it.
    ///
    /// A scale is called `X_global_scale` (a divisor), `X_scale_2` (a multiplier) or X, like its tensor (the
    /// direction of the recipe's convention), and is one F32. One of the other direction is inverted, which
    /// rounds it.
    ///
    /// # Errors
    /// [`GivenError::NoGlobalScale`](crate::GivenError::NoGlobalScale),
    /// [`GivenError::GlobalScaleTwice`](crate::GivenError::GlobalScaleTwice),
    /// [`FormatError::Packed`](crate::FormatError::Packed), [`Error::Tensor`];
    /// [`PlanError::NoGlobalSearch`](crate::PlanError::NoGlobalSearch) if they are to be searched.
    pub fn take_global_scales(&mut self, file: &Checkpoint) -> Result<&GlobalScales> {
        for treatment in self.treatments.iter().filter(|treatment| treatment.search_global) {
            check_search_global(&treatment.recipe, true)?;
        }
        let names = self.to_quantize().filter_map(|tensor| {
            let arithmetic = self.of(tensor.name).recipe.scheme.global_from_amax()?;
            Some((tensor.name, arithmetic.direction))
        });
        let found = GlobalScales::find(file, names)?;
        Ok(self.global_scales.insert(found))
    }

    /// Takes importance by column from a file, for the search of block scales. A vector is called
    /// `X.importance`, `X_importance` or X, like its tensor, and has a float for each of its columns, or one row of them for
    /// each expert. Importance matrices of llama.cpp (imatrix, GGUF or `.dat`) are such files too. Tensors without one are
    /// searched unweighted.
    ///
    /// # Errors
    /// [`GivenError::ImportanceUnused`](crate::GivenError::ImportanceUnused) if no recipe has a search,
    /// [`GivenError::ImportanceTwice`](crate::GivenError::ImportanceTwice),
    /// [`GivenError::ImportanceShape`](crate::GivenError::ImportanceShape),
    /// [`GivenError::ImportanceNumber`](crate::GivenError::ImportanceNumber),
    /// [`GivenError::Imatrix`](crate::GivenError::Imatrix),
    /// [`GivenError::ImatrixOfOthers`](crate::GivenError::ImatrixOfOthers).
    pub fn take_importance(&mut self, file: &Checkpoint) -> Result<&Importance> {
        if self.treatments.iter().all(|treatment| treatment.recipe.search == Search::None) {
            return Err(Error::Given(GivenError::ImportanceUnused));
        }
        let treated = self.to_quantize().map(|tensor| (tensor, self.of(tensor.name)));
        let searched = treated.filter(|(_, treatment)| treatment.recipe.search != Search::None);
        let found = Importance::find(file, searched.map(|(tensor, treatment)| (tensor, treatment.storage)))?;
        Ok(self.importance.insert(found))
    }

    /// Lets NVFP4's global scales be searched too, as [`search_global`](microscale::search_global) does: for
    /// each tensor, or all that share one, the best of a few. Of several recipes this is about those that
    /// can.
    ///
    /// # Errors
    /// [`PlanError::NoGlobalSearch`](crate::PlanError::NoGlobalSearch) unless they follow from amax and a
    /// recipe has a search.
    pub fn search_global_scales(&mut self) -> Result<()> {
        let in_file = self.global_scales.is_some();
        let can = |treatment: &Treatment| check_search_global(&treatment.recipe, in_file);
        if let Some(Err(error)) = self.treatments.first().map(can)
            && self.treatments.iter().all(|treatment| can(treatment).is_err())
        {
            return Err(error);
        }
        let able = self.treatments.iter_mut().filter(|treatment| can(treatment).is_ok());
        able.for_each(|treatment| treatment.search_global = true);
        Ok(())
    }

    /// Lets [`check_search`](microscale::check_search()) look at each tensor once its scales are chosen, if
    /// its recipe has a full search.
    ///
    /// # Errors
    /// [`PlanError::NothingToCheck`](crate::PlanError::NothingToCheck) unless a recipe has a full search.
    pub fn check_searches(&mut self) -> Result<()> {
        if self.treatments.iter().all(|treatment| treatment.recipe.search != Search::Full) {
            return Err(Error::Plan(PlanError::NothingToCheck { search: self.treatments[0].recipe.search }));
        }
        self.check_search = true;
        Ok(())
    }

    /// Lets each tensor's details be collected once it is quantized, with at most this
    /// many of its worst blocks of either kind.
    pub fn collect_details(&mut self, worst_blocks: usize) {
        self.worst_blocks = Some(worst_blocks);
    }

    /// The recipes, each with everything about it that decides the bytes: by the elements that they are used
    /// for, the most first.
    pub fn recipes(&self) -> Vec<UsedRecipe> {
        let used = self.treatments.iter().enumerate().map(|(i, treatment)| {
            let mut sums = Sums::default();
            for Planned { tensor, bytes_after, .. } in self.quantized_by(i) {
                sums.add(tensor.elements(), tensor.bytes() as u64, *bytes_after);
            }
            UsedRecipe { recipe: treatment.recipe, facts: self.facts_of(treatment), sums }
        });
        used.collect()
    }

    /// The formats, the one for the most elements first, each with the sums over its tensors.
    pub fn formats(&self) -> Vec<(Format, Sums)> {
        by_format(&self.recipes())
    }

    /// Everything that decides the bytes, name by name, and is the same for all tensors.
    pub fn facts(&self) -> Facts {
        common(&self.recipes())
    }

    /// Likely mistakes in the recipes that a plan was made by: rules that change nothing.
    pub fn idle_rules(&self, recipes: &Recipes) -> Vec<String> {
        let copied = self.tensors.iter().filter(|planned| planned.reason.is_some());
        let copied: Vec<_> = copied.map(|planned| planned.tensor.name).collect();
        let quantized: Vec<_> = self.to_quantize().map(|tensor| tensor.name).collect();
        recipes.idle(&quantized, &copied)
    }

    fn facts_of(&self, treatment: &Treatment) -> Facts {
        let mut facts = treatment.facts();
        facts.push(("files", self.convention.word().into()));
        if let Some((_, from)) = self.input_scales.as_ref().filter(|_| treatment.format() == Format::Nvfp4) {
            facts.push(("input_scale", from.clone()));
        }
        let from_amax = treatment.recipe.scheme.global_from_amax().is_some();
        if let Some(scales) = self.global_scales.as_ref().filter(|_| from_amax) {
            for (_, fact) in facts.iter_mut().filter(|(name, _)| *name == "global_scale") {
                *fact = format!("from {}", scales.path.display());
            }
        }
        if let Some(importance) = self.importance.as_ref().filter(|_| treatment.recipe.search != Search::None)
        {
            facts.push(("importance", format!("from {}", importance.path.display())));
        }
        facts
    }

    /// The input.
    pub(crate) fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// The fate of a tensor; `None` for scales, which are read with their codes.
    pub(crate) fn planned(&self, tensor: &str) -> Option<&Planned<'a>> {
        self.places.get(tensor).map(|place| &self.tensors[*place])
    }

    /// The number of a tensor in the list of all.
    pub(crate) fn place_of(&self, tensor: &str) -> usize {
        self.places.get(tensor).copied().unwrap_or(self.tensors.len())
    }

    /// The treatment of a tensor, if it is quantized.
    pub(crate) fn of(&self, tensor: &str) -> &Treatment {
        &self.treatments[self.planned(tensor).map_or(0, |planned| planned.recipe)]
    }

    /// The number of the recipe that a tensor is quantized by, if there are several.
    pub(crate) fn number_of(&self, tensor: &str) -> Option<usize> {
        let planned = self.planned(tensor).filter(|_| self.treatments.len() > 1)?;
        Some(planned.recipe)
    }

    /// The importance of a tensor's columns, if there is any.
    pub(crate) fn importance_of(&self, tensor: &Tensor<'_>) -> Option<Columns<'_>> {
        let shape = self.of(tensor.name).storage.stored_shape(tensor.shape);
        self.importance.as_ref().and_then(|importance| importance.of(tensor.name, &shape))
    }

    /// The rows that errors are weighted alike in, if each expert of a tensor has importance of its own.
    pub(crate) fn rows_each(&self, tensor: &Tensor<'_>) -> Option<usize> {
        self.importance_of(tensor)?.rows_each()
    }

    /// Global scales from a file, if they are taken from one.
    pub(crate) fn global_scales(&self) -> Option<&GlobalScales> {
        self.global_scales.as_ref()
    }

    /// Adds what was given in files to a hash.
    pub(crate) fn add_given(&self, hash: &mut Xxh3) {
        for tensor in self.to_quantize() {
            if let Some(scale) = self.global_scales.as_ref().and_then(|scales| scales.of(tensor.name)) {
                hash.update(&scale.value().to_le_bytes());
            }
            if let Some(scale) = self.input_scale_of(tensor.name) {
                hash.update(&scale.value().to_le_bytes());
            }
            if let Some(importance) = self.importance_of(&tensor) {
                hash.update(bytemuck::cast_slice(importance.numbers));
            }
        }
    }

    /// The number of tensors to be quantized.
    pub fn quantized(&self) -> usize {
        self.to_quantize().count()
    }

    pub(crate) fn to_quantize(&self) -> impl Iterator<Item = Tensor<'a>> {
        self.tensors.iter().filter(|planned| planned.reason.is_none()).map(|planned| planned.tensor)
    }

    /// The tensors that one of the recipes is used for.
    fn quantized_by(&self, recipe: usize) -> impl Iterator<Item = &Planned<'a>> {
        self.tensors.iter().filter(move |planned| planned.reason.is_none() && planned.recipe == recipe)
    }

    /// The fate of each tensor, as JSON.
    pub fn to_json(&self) -> Value {
        let recipes = self.recipes();
        let tensors = self.tensors.iter().map(|planned| {
            let Planned { tensor, reason, bytes_after, recipe, .. } = planned;
            let mut json = json!({
                "name": tensor.name,
                "file": tensor.file.to_string_lossy(),
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "elements": tensor.elements(),
                "bytes_before": tensor.bytes(),
                "bytes_after": bytes_after,
                "copied": reason.as_ref().map(Reason::to_string),
            });
            if reason.is_none() {
                json["format"] = recipes[*recipe].recipe.format().word().into();
                if recipes.len() > 1 {
                    json["recipe"] = (*recipe).into();
                }
            }
            json
        });
        let mut json = recipes_to_json(&recipes);
        json.insert("tensors".into(), tensors.collect());
        json.into()
    }

    fn check_names(&self) -> Result<()> {
        let mut taken: HashSet<_> =
            self.tensors.iter().map(|planned| planned.tensor.name.to_string()).collect();
        for tensor in self.to_quantize() {
            let outlines = self.of(tensor.name).outlines(&tensor);
            for Outline { name, .. } in outlines.into_iter().chain(self.input_outline(&tensor)) {
                if name != tensor.name && !taken.insert(name.clone()) {
                    let (file, tensor) = (tensor.file.into(), tensor.name.into());
                    return Err(Error::Output(OutputError::NameTaken { file, tensor, name }));
                }
            }
        }
        Ok(())
    }

    /// The ways in which layers are stored, the one for the most elements first.
    fn groups(&self) -> Vec<Group> {
        let weights =
            self.to_quantize().map(|tensor| (tensor.name, self.of(tensor.name).storage, tensor.elements()));
        Group::of(weights, self.checkpoint.naming)
    }

    /// Says in the output's config how its layers are stored.
    pub(crate) fn describe(&self, description: &mut Description) {
        if Description::method(self.checkpoint).is_some() {
            // The entry about the cache of keys and values stays.
            description.take_cache();
            description.remove();
        }
        description.activations = self.input_scales.is_some();
        let copied = self.tensors.iter().filter(|planned| planned.reason.is_some());
        let ignore = ignored(self.checkpoint, copied.map(|planned| planned.tensor));
        self.convention.describe(&self.groups(), &ignore, description);
    }

    /// ggml's type of the format that most weights become.
    pub(crate) fn file_type(&self) -> FileType {
        let blocks = self.groups().first().and_then(|group| group.storage.blocks);
        blocks.unwrap_or(Blocks::Mxfp4).file_type()
    }
}
