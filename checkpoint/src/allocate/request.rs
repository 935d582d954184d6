//! The request for an allocation, and how it is carried out.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use microscale::{Device, Dtype, Format, Search, Words};

use crate::allocate::allocation::{Allocated, Allocation};
use crate::allocate::budget::Budget;
use crate::allocate::choice::{Choice, sorted};
use crate::allocate::groups::groups;
use crate::allocate::hull::Point;
use crate::allocate::measure::{Unit, measure};
use crate::allocate::weighted::Squares;
use crate::checkpoint_format::{CheckpointFormat, Written};
use crate::checkpoint_formats::storage::Storage;
use crate::error::plan::PlanError;
use crate::error::{Error, Result};
use crate::names::layers::Layers;
use crate::plan::Plan;
use crate::plan::build::open_given;
use crate::plan::importance::{Columns, Importance};
use crate::plan::recipes::Recipes;
use crate::plan::request::Quantize;
use crate::plan::selection::Selection;
use crate::plan::settings::Settings;
use crate::plan::warning::{FileProblem, Warning};
use crate::progress::OnProgress;
use crate::quantize::chooser::Chooser;
use crate::quantize::{Quantizer, matrix};
use crate::read::checkpoint::{Checkpoint, OpenOptions};
use crate::read::tensor::Tensor;
use crate::write::outline::unquantized;

/// Weights of the columns of each tensor; `None` if no importance is given.
type ColumnsOfEach = Vec<Option<Arc<Columns>>>;

/// Request for an allocation: which formats the tensors of a checkpoint get within a budget.
///
/// [`Self::open`] opens the checkpoint, and [`Self::run`] measures every tensor in every format and
/// chooses:
///
/// ```no_run
/// # use std::{ops::ControlFlow, path::Path};
/// # use microscale::{Device, DeviceChoice};
/// use microscale_checkpoint::{Allocate, Budget};
///
/// let allocate = Allocate::new(Budget::Bits(4.6));
/// let checkpoint = allocate.open(Path::new("model"))?;
/// let device = Device::choose(DeviceChoice::Auto)?;
/// let allocation = allocate.run(&checkpoint, &device, &mut |_| ControlFlow::Continue(()))?;
/// std::fs::write("recipe.toml", allocation.recipe("4.6 bits per weight"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Allocate {
    /// Options for opening the checkpoint.
    pub open: OpenOptions,
    /// The largest size.
    pub budget: Budget,
    /// What tensors may become; empty for all that the checkpoint format has.
    pub choices: Vec<Choice>,
    /// Tensors to allocate bits to. The others stay unquantized.
    pub selection: Selection,
    /// Search for block scales, in the formats that have one.
    pub search: Search,
    /// Checkpoint format to write. Defaults to the default of the container.
    pub format: Option<CheckpointFormat>,
    /// File of importance per column, as of [`Quantize::importance`]. It weights the loss and the
    /// search.
    pub importance: Option<PathBuf>,
}

impl Allocate {
    /// Creates a request with all formats, the default selection and no search.
    pub fn new(budget: Budget) -> Self {
        Self {
            open: OpenOptions::default(),
            budget,
            choices: Vec::new(),
            selection: Selection::default(),
            search: Search::None,
            format: None,
            importance: None,
        }
    }

    /// Opens a checkpoint as [`Quantize::open`] does.
    ///
    /// # Errors
    /// The errors of [`Quantize::open`].
    pub fn open(&self, path: &Path) -> Result<Checkpoint> {
        Quantize { open: self.open, ..Quantize::default() }.open(path)
    }

    /// Measures every tensor in every format, one tensor at a time, and chooses.
    ///
    /// # Errors
    /// - [`PlanError::Budget`](crate::PlanError::Budget) if no choice fits the budget.
    /// - [`PlanError::NoFormat`](crate::PlanError::NoFormat) if there is no format to choose.
    /// - [`PlanError::NothingToQuantize`](crate::PlanError::NothingToQuantize).
    /// - The errors of [`Quantize::plan`] and of quantizing.
    pub fn run(
        &self,
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut OnProgress<'_>,
    ) -> Result<Allocation> {
        let checkpoint_format = self.format.unwrap_or(checkpoint.own_format());
        let choices = match self.choices.is_empty() {
            true => [Choice::Unquantized]
                .into_iter()
                .chain(checkpoint_format.formats().map(Choice::Format))
                .collect(),
            false => self.choices.clone(),
        };
        let choices = sorted(choices);
        let plans = self.plans(checkpoint, checkpoint_format, &choices)?;
        let Some(first) = plans.first() else { return Err(PlanError::NoFormat.into()) };
        let is_quantized = |job: &usize| plans.iter().any(|plan| plan.jobs[*job].plan.quantize().is_some());
        let (jobs, others): (Vec<usize>, Vec<usize>) = (0..first.jobs.len()).partition(is_quantized);
        if jobs.is_empty() {
            // This fails, and the error has the reason.
            Quantizer::new(first)?;
        }
        let others = others.iter().map(|job| first.jobs[*job].bytes_after()).sum();
        let (columns, warnings) = self.columns(&plans, &jobs)?;
        let units: Vec<_> =
            jobs.iter().zip(columns).map(|(job, columns)| unit(first, *job, columns)).collect();
        let bytes = units.iter().map(|unit| first.jobs[unit.job].tensor).map(|tensor| {
            let dtype = tensor.values_dtype().unwrap_or(Dtype::F32);
            (tensor.elements() as usize).saturating_mul(dtype.bytes())
        });
        let devices = device.workers(bytes.max().unwrap_or(0)).map_err(Error::Device)?;
        let choosers: Vec<_> = plans.iter().map(Chooser::new).collect();
        let measured = measure(&plans, &choosers, &units, &devices, progress)?;
        let signal = measured.iter().filter_map(|squares| squares.iter().flatten().next());
        let mut allocation = Allocation {
            checkpoint_format,
            selection: self.selection.clone(),
            search: self.search,
            importance: self.importance.clone(),
            tensors: tensors(&plans, &choices, &units, &measured),
            choices,
            others,
            signal: signal.map(|squares| squares.signal).sum(),
            ..Allocation::default()
        };
        allocation.solve(self.budget)?;
        allocation.compare(&Layers::of(checkpoint.tensors().map(|tensor| tensor.name)));
        allocation.warnings = warnings_of(&plans, &allocation, warnings);
        allocation.held_by = CheckpointFormat::values()
            .filter(|format| format.written() == Written::Yes && checkpoint.check_container(*format).is_ok())
            .filter(|format| is_held(*format, first, &allocation))
            .collect();
        Ok(allocation)
    }

    /// Makes a plan for each format that quantizes all tensors to it.
    fn plans<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        checkpoint_format: CheckpointFormat,
        choices: &[Choice],
    ) -> Result<Vec<Plan<'a>>> {
        let formats = choices.iter().filter_map(|choice| choice.format());
        let plan = |format: Format| {
            let search = if format.is_searched() { self.search } else { Search::None };
            let settings = Settings { format: Some(format), search: Some(search), ..Settings::default() };
            let request = Quantize {
                open: self.open,
                recipes: Recipes::new(settings, self.selection.clone()),
                format: Some(checkpoint_format),
                importance: self.importance.clone().filter(|_| search != Search::None),
                ..Quantize::default()
            };
            request.plan(checkpoint)
        };
        formats.map(plan).collect()
    }

    /// Returns the weights of the columns of each tensor, if importance is given.
    ///
    /// Tensors without importance weigh as much as the others on average.
    fn columns(&self, plans: &[Plan<'_>], jobs: &[usize]) -> Result<(ColumnsOfEach, Vec<Warning>)> {
        let Some(path) = &self.importance else { return Ok((vec![None; jobs.len()], Vec::new())) };
        let file = open_given(path, "importance")?;
        let storages = jobs.iter().map(|job| storage(plans, *job));
        let tensors = jobs.iter().map(|job| plans[0].jobs[*job].tensor);
        let found = Importance::find(
            &file,
            tensors.clone().zip(storages.clone()).map(|(tensor, storage)| (tensor, storage, None)),
        )?;
        let known = found.columns.iter().flatten().flat_map(|columns| &columns.numbers);
        let (sum, numbers) = known.fold((0.0, 0u64), |(sum, n), number| (sum + f64::from(*number), n + 1));
        let mean = if numbers == 0 { 1.0 } else { (sum / numbers as f64) as f32 };
        let equal = |tensor: &Tensor<'_>, storage| Columns::equal(mean, matrix::size(tensor, storage).1);
        let columns =
            found.columns.into_iter().zip(tensors.zip(storages)).map(|(columns, (tensor, storage))| {
                Some(Arc::new(columns.unwrap_or_else(|| equal(&tensor, storage))))
            });
        let columns = columns.collect();
        let problems = [
            (found.unused, FileProblem::Unused),
            (found.unweighted, FileProblem::Averaged { of: jobs.len() }),
            (found.partial, FileProblem::Partial),
        ];
        let problems = problems.into_iter().filter(|(names, _)| !names.is_empty());
        let warning = |(names, problem)| Warning::File { file: path.clone(), names, problem };
        Ok((columns, problems.map(warning).collect()))
    }
}

/// Returns the storage of a tensor in the first format that quantizes it.
fn storage(plans: &[Plan<'_>], job: usize) -> &'static Storage {
    let quantizing = plans.iter().find_map(|plan| Some((plan, plan.jobs[job].plan.quantize()?)));
    let Some((plan, of_tensor)) = quantizing else { unreachable!("some format quantizes the tensor") };
    plan.recipe_of(of_tensor).storage
}

/// Makes a unit of a job.
fn unit<'a>(plan: &'a Plan<'_>, job: usize, columns: Option<Arc<Columns>>) -> Unit<'a> {
    let tensor = &plan.jobs[job].tensor;
    let (bytes, elements) = (tensor.data.len() as u64, tensor.elements());
    Unit { job, name: tensor.name, bytes, elements, columns }
}

/// Returns the bytes and the loss of each tensor as each choice. A tensor that a format cannot
/// hold stays unquantized in it.
fn tensors(
    plans: &[Plan<'_>],
    choices: &[Choice],
    units: &[Unit<'_>],
    measured: &[Vec<Option<Squares>>],
) -> Vec<Allocated> {
    let named = units.iter().map(|unit| (unit.name, plans[0].jobs[unit.job].tensor.shape));
    let mut group_of = vec![0; units.len()];
    for (number, group) in groups(named).into_iter().enumerate() {
        group.into_iter().for_each(|tensor| group_of[tensor] = number);
    }
    let each = units.iter().zip(measured).zip(group_of).map(|((unit, measured), group)| {
        let unquantized = Point { bytes: unquantized(&plans[0].jobs[unit.job].tensor).bytes(), loss: 0.0 };
        let mut in_plans = plans.iter().zip(measured);
        let mut points = Vec::new();
        let mut quantized = Vec::new();
        for choice in choices {
            let found = choice.format().and_then(|_| in_plans.next());
            let point = found.map(|(plan, squares)| {
                let loss = squares.map_or(0.0, |squares| squares.noise);
                Point { bytes: plan.jobs[unit.job].bytes_after(), loss }
            });
            quantized.push(found.is_some_and(|(_, squares)| squares.is_some()));
            points.push(point.unwrap_or(unquantized));
        }
        Allocated {
            name: unit.name.into(),
            elements: unit.elements,
            group,
            choice: 0,
            unquantized,
            points,
            quantized,
        }
    });
    each.collect()
}

/// Adds the warnings of the plans of formats that the allocation has, each once.
fn warnings_of(plans: &[Plan<'_>], allocation: &Allocation, mut warnings: Vec<Warning>) -> Vec<Warning> {
    let formats: Vec<_> = allocation.choices.iter().filter_map(|choice| choice.format()).collect();
    let uses = |format: &Format| {
        allocation.tensors.iter().any(|tensor| allocation.format_of(tensor) == Some(*format))
    };
    let used = plans.iter().zip(&formats).filter(|(_, format)| uses(format));
    for warning in used.flat_map(|(plan, _)| &plan.warnings) {
        // Files of importance were checked for all formats together.
        if !matches!(warning, Warning::File { .. }) && !warnings.contains(warning) {
            warnings.push(warning.clone());
        }
    }
    warnings
}

/// Returns whether a checkpoint format can hold every tensor as the allocation has it.
fn is_held(checkpoint_format: CheckpointFormat, plan: &Plan<'_>, allocation: &Allocation) -> bool {
    let shapes: HashMap<_, _> = plan.jobs.iter().map(|job| (job.tensor.name, job.tensor.shape)).collect();
    allocation.tensors.iter().all(|tensor| {
        let Some(format) = allocation.format_of(tensor) else { return true };
        let storage = Storage::of_format(checkpoint_format, format);
        let shape = shapes.get(tensor.name.as_str());
        storage.is_ok_and(|storage| {
            shape.is_some_and(|shape| storage.cannot_hold(&tensor.name, shape).is_none())
        })
    })
}
