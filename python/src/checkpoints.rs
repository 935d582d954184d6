//! Operations on checkpoints. Their results go to Python as JSON.

use std::ffi::CString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::formats::{ScaleRule, Ties};
use microscale::{Device, DeviceChoice, Dtype, Format, NonFinite, Numerics, Recipe, Search};
use microscale_checkpoint::{
    self as checkpoint, Checkpoint, Convert, Dequantize, GlobalSetting, InputScales, Inspected, KeptAs,
    OnProgress, OpenOptions, Part, Places, Progress, Quantize, Recipes, Selection, Settings,
};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use serde_json::Value;

use crate::errors::{error, of_checkpoints, of_tensors};
use crate::recipe::{GivenGlobal, optional, word};
use crate::workers::work;

/// Settings of a recipe as keyword arguments, and patterns of tensors.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Arguments {
    recipe: Option<String>,
    format: Option<String>,
    numerics: Option<String>,
    scale_rule: Option<String>,
    ties: Option<String>,
    search: Option<String>,
    search_global: bool,
    global_scale: Option<GivenGlobal>,
    non_finite: Option<String>,
    include: Vec<String>,
    exclude: Vec<String>,
    to: Option<String>,
    kept: Option<String>,
    requantize: bool,
    split_experts: bool,
    skip_others: bool,
    global_scales: Option<PathBuf>,
    importance: Option<PathBuf>,
    input_scale: Option<GivenInput>,
}

/// The scale of layers' inputs: their amax, or a file.
#[derive(FromPyObject)]
enum GivenInput {
    Amax(f64),
    File(PathBuf),
}

impl Arguments {
    fn recipes(&self, py: Python<'_>) -> PyResult<Recipes> {
        let of_checkpoints = |error| of_checkpoints(py, error);
        let mut recipes = match &self.recipe {
            None => Recipes::default(),
            Some(named) => Recipes::named(named).map_err(of_checkpoints)?,
        };
        recipes.set(Settings {
            format: optional::<Format>(py, self.format.as_deref())?,
            numerics: optional::<Numerics>(py, self.numerics.as_deref())?,
            scale_rule: optional::<ScaleRule>(py, self.scale_rule.as_deref())?,
            ties: optional::<Ties>(py, self.ties.as_deref())?,
            global_scale: match &self.global_scale {
                None => None,
                Some(GivenGlobal::Number(number)) => Some(GlobalSetting::Value(*number as f32)),
                Some(GivenGlobal::Word(word)) if word == "none" => Some(GlobalSetting::Absent),
                Some(GivenGlobal::Word(word)) => {
                    return Err(error(
                        py,
                        format!("global_scale is {word:?}; pass a number, \"none\", or leave it out"),
                    ));
                }
            },
            search: optional::<Search>(py, self.search.as_deref())?,
            search_global: self.search_global.then_some(true),
            non_finite: optional::<NonFinite>(py, self.non_finite.as_deref())?,
        });
        recipes.kept = optional::<KeptAs>(py, self.kept.as_deref())?.unwrap_or(recipes.kept);
        recipes.select(&self.include, &self.exclude).map_err(of_checkpoints)?;
        recipes.check_settings().map_err(of_checkpoints)?;
        Ok(recipes)
    }

    /// The request that the arguments make.
    fn request(&self, py: Python<'_>, part: Option<Part>) -> PyResult<Quantize> {
        let input_scales = match &self.input_scale {
            None => None,
            Some(GivenInput::Amax(amax)) => Some(InputScales::from_amax(*amax as f32)),
            Some(GivenInput::File(path)) => {
                Some(InputScales::read(path).map_err(|error| of_checkpoints(py, error))?)
            }
        };
        let (skip_other_weights, split_experts) = (self.skip_others, self.split_experts);
        Ok(Quantize {
            open: OpenOptions { skip_other_weights, split_experts },
            recipes: self.recipes(py)?,
            format: optional(py, self.to.as_deref())?,
            requantize: self.requantize,
            global_scales: self.global_scales.clone(),
            importance: self.importance.clone(),
            input_scales,
            part,
            ..Quantize::default()
        })
    }

    /// The files that are read in addition to the checkpoint.
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let inputs = match &self.input_scale {
            Some(GivenInput::File(path)) => Some(path),
            _ => None,
        };
        self.global_scales.iter().chain(&self.importance).chain(inputs)
    }
}

/// A part as two numbers: which, counted from 1, and of how many.
fn part(py: Python<'_>, part: Option<(usize, usize)>) -> PyResult<Option<Part>> {
    part.map(|(index, of)| word(py, &format!("{index}/{of}"))).transpose()
}

/// Opens a checkpoint, and warns where its index and its files disagree.
fn open(py: Python<'_>, path: &Path, options: OpenOptions) -> PyResult<Checkpoint> {
    let checkpoint = py.detach(|| Checkpoint::open_with(path, options));
    warned(py, checkpoint.map_err(|error| of_checkpoints(py, error))?)
}

/// Passes the warnings about a checkpoint to Python, at the line that called the package.
fn warned(py: Python<'_>, checkpoint: Checkpoint) -> PyResult<Checkpoint> {
    for warning in checkpoint.warnings() {
        PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(warning.replace('\0', "\\0"))?, 2)?;
    }
    Ok(checkpoint)
}

/// Quantizes a checkpoint, or a part of it. Without an output it says what would be done. Returns
/// JSON, and warnings.
#[pyfunction]
#[pyo3(signature = (path, out, arguments, device, part, progress))]
pub(crate) fn quantize_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    out: Option<PathBuf>,
    arguments: Arguments,
    device: &str,
    part: Option<(usize, usize)>,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Vec<String>)> {
    let of_checkpoints = |error| of_checkpoints(py, error);
    let quantize = arguments.request(py, self::part(py, part)?)?;
    let device = ready(py, device)?;
    let input = warned(py, work(py, || quantize.open(&path))?.map_err(of_checkpoints)?)?;
    let plan = py.detach(|| quantize.plan(&input)).map_err(of_checkpoints)?;
    let warnings = plan.warnings.iter().map(ToString::to_string).collect();
    let with_notes = |mut facts: Value, warnings| {
        facts["notes"] = plan.refused_by().into();
        Ok((facts.to_string(), warnings))
    };
    let Some(out) = out else { return with_notes(plan.to_json(), warnings) };
    let parts = quantize.part.map(|_| checkpoint::parts_directory(&out)).transpose();
    let parts = parts.map_err(of_checkpoints)?;
    let outputs: Vec<_> = std::iter::once(&out).chain(&parts).collect();
    check_places(&input, arguments.files(), &outputs).map_err(of_checkpoints)?;
    match quantize.part {
        None => drop(checkpoint::remove_unfinished_output(&out)),
        Some(part) => drop(checkpoint::remove_unfinished_part(&out, part)),
    }
    let done = operate(py, progress, |progress| Ok(plan.run(&out, &device, progress)?.to_json()))?;
    with_notes(done, warnings)
}

/// Puts the parts of a checkpoint together. Returns JSON.
#[pyfunction]
#[pyo3(signature = (path, out, skip_others, split_experts, progress))]
pub(crate) fn merge_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    skip_others: bool,
    split_experts: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let of_checkpoints = |error| of_checkpoints(py, error);
    let request = Quantize {
        open: OpenOptions { skip_other_weights: skip_others, split_experts },
        ..Quantize::default()
    };
    let input = py.detach(|| request.open(&path)).map_err(of_checkpoints)?;
    let parts = checkpoint::parts_directory(&out).map_err(of_checkpoints)?;
    check_places(&input, [], &[&out, &parts]).map_err(of_checkpoints)?;
    checkpoint::remove_unfinished_output(&out);
    let done = operate(py, progress, |progress| checkpoint::merge(&input, &out, progress))?;
    Ok(done.to_json().to_string())
}

/// Writes a quantized checkpoint in another checkpoint format. Returns JSON, and warnings.
#[pyfunction]
#[pyo3(signature = (path, out, to, format, requantize, skip_others, device, progress))]
#[expect(clippy::too_many_arguments, reason = "each is one of Python's")]
pub(crate) fn convert_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    to: &str,
    format: Option<&str>,
    requantize: bool,
    skip_others: bool,
    device: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Vec<String>)> {
    let of_checkpoints = |error| of_checkpoints(py, error);
    let (to, format, device) =
        (word(py, to)?, optional::<Format>(py, format)?, ready_to_dequantize(py, device)?);
    let options = OpenOptions { skip_other_weights: skip_others, ..OpenOptions::default() };
    let input = open(py, &path, options)?;
    let convert = Convert { to, format, requantize };
    check_places(&input, [], &[&out]).map_err(of_checkpoints)?;
    checkpoint::remove_unfinished_output(&out);
    let done = operate(py, progress, |progress| convert.run(&input, &out, &device, progress))?;
    Ok((done.to_json().to_string(), done.misread_by))
}

/// Looks for defects of a quantized checkpoint. Returns JSON.
#[pyfunction]
#[pyo3(signature = (path, against, device, progress))]
pub(crate) fn diagnose_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    against: Option<PathBuf>,
    device: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let device = ready_to_dequantize(py, device)?;
    let open = |path: &Path| open(py, path, OpenOptions::default());
    let (input, against) = (open(&path)?, against.as_deref().map(open).transpose()?);
    let diagnosis = operate(py, progress, |progress| {
        checkpoint::diagnose(&input, against.as_ref(), &device, progress)?.of_quantized(&input)
    })?;
    Ok(diagnosis.to_json().to_string())
}

/// Lists the tensors of a checkpoint. Returns JSON.
#[pyfunction]
pub(crate) fn inspect_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let input = open(py, &path, OpenOptions::default())?;
    let look = || checkpoint::inspect(&input).iter().map(Inspected::to_json).collect::<Value>();
    Ok(work(py, look)?.to_string())
}

/// Writes a checkpoint with its quantized tensors as values. Returns JSON.
#[pyfunction]
#[pyo3(signature = (path, out, dtype, non_finite, skip_others, device, progress))]
#[expect(clippy::too_many_arguments, reason = "each is one of Python's")]
pub(crate) fn dequantize_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    dtype: Option<&str>,
    non_finite: Option<&str>,
    skip_others: bool,
    device: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let of_checkpoints = |error| of_checkpoints(py, error);
    let dequantize = Dequantize {
        dtype: optional::<Dtype>(py, dtype)?,
        non_finite: optional::<NonFinite>(py, non_finite)?.unwrap_or(NonFinite::Error),
    };
    let device = ready_to_dequantize(py, device)?;
    let options = OpenOptions { skip_other_weights: skip_others, ..OpenOptions::default() };
    let input = open(py, &path, options)?;
    check_places(&input, [], &[&out]).map_err(of_checkpoints)?;
    checkpoint::remove_unfinished_output(&out);
    let done = operate(py, progress, |progress| dequantize.run(&input, &out, &device, progress))?;
    Ok(done.to_json().to_string())
}

/// Measures a checkpoint against another, or against its own values in a format. Returns JSON.
#[pyfunction]
#[pyo3(signature = (path, other, format, numerics, device, progress))]
pub(crate) fn compare_checkpoints(
    py: Python<'_>,
    path: PathBuf,
    other: Option<PathBuf>,
    format: Option<&str>,
    numerics: Option<&str>,
    device: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let (format, numerics) = (optional::<Format>(py, format)?, optional::<Numerics>(py, numerics)?);
    let recipe = match (&other, format) {
        (Some(_), None) if numerics.is_none() => None,
        (None, Some(format)) => {
            let numerics = numerics.unwrap_or(Numerics::default_for(format));
            Some(Recipe::of(format, numerics).map_err(|error| of_tensors(py, error))?)
        }
        _ => return Err(error(py, "compare takes another checkpoint, or a format and its numerics")),
    };
    let computed_on_gpus = format.is_some_and(|format| !matches!(format, Format::Comparison(_)));
    let device = if computed_on_gpus { ready(py, device)? } else { ready_to_dequantize(py, device)? };
    let open = |path: &Path| open(py, path, OpenOptions::default());
    let (first, second) = (open(&path)?, other.as_deref().map(open).transpose()?);
    let comparison = operate(py, progress, |progress| match (&second, &recipe) {
        (Some(second), _) => checkpoint::compare(&first, second, &device, progress),
        (None, Some(recipe)) => {
            checkpoint::compare_format(&first, &Selection::default(), recipe, &device, progress)
        }
        (None, None) => unreachable!("one of the two is given"),
    })?;
    Ok(comparison.to_json().to_string())
}

/// Makes a device ready for an operation that dequantizes. `auto` means the CPU: copying values
/// back from a GPU takes longer than computing them.
fn ready_to_dequantize(py: Python<'_>, device: &str) -> PyResult<Device> {
    ready(py, if device == "auto" { "cpu" } else { device })
}

/// Makes a device ready.
fn ready(py: Python<'_>, device: &str) -> PyResult<Device> {
    let choice: DeviceChoice = device.parse().map_err(|why| error(py, why))?;
    py.detach(|| Device::choose(choice)).map_err(|error| of_tensors(py, error))
}

/// Makes sure that nothing that is read will be overwritten.
fn check_places<'a>(
    input: &Checkpoint,
    files: impl IntoIterator<Item = &'a PathBuf>,
    outputs: &[&PathBuf],
) -> checkpoint::Result<()> {
    let mut places = Places::default();
    places.read(input)?;
    files.into_iter().try_for_each(|file| places.read_file(file))?;
    outputs.iter().try_for_each(|out| places.write(out))
}

/// Runs an operation and calls `progress(tensor, done, total)` before each tensor. An exception in
/// it stops the operation, and so does Ctrl-C, also in the middle of a tensor. The operation then
/// removes its output.
fn operate<R: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    operation: impl FnOnce(&mut OnProgress<'_>) -> checkpoint::Result<R> + Send,
) -> PyResult<R> {
    let (mut raised, mut reported): (_, Option<String>) = (None, None);
    let done = work(py, || {
        let mut update = |at: Progress<'_>| {
            // Workers report other tensors until the operation stops.
            if raised.is_some() {
                return ControlFlow::Break(());
            }
            let go_on = Python::attach(|py| {
                py.check_signals()?;
                let Some(progress) = &progress else { return Ok(()) };
                if reported.as_deref() == Some(at.tensor) {
                    return Ok(());
                }
                reported = Some(at.tensor.into());
                progress.call1(py, (at.tensor, at.done, at.total)).map(|_| ())
            });
            match go_on {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    raised = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        operation(&mut update)
    })?;
    match (done, raised) {
        (Ok(done), None) => Ok(done),
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(of_checkpoints(py, error)),
    }
}
