//! Operations on checkpoints. Their results go to Python as JSON.

use std::ffi::CString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::formats::{ScaleRule, Ties};
use microscale::{Device, DeviceChoice, Dtype, Format, HadamardWidth, NonFinite, Numerics, Recipe, Search};
use microscale_checkpoint::{
    self as checkpoint, Allocate, Budget, Checkpoint, Choice, Convert, Dequantize, GlobalSetting, Gptq,
    InputScales, Inspected, KeptAs, OnProgress, OpenOptions, Part, Places, Progress, Quantize, Recipes,
    Selection, Settings,
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
    hadamard: Option<usize>,
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
    calibration: Option<PathBuf>,
    gptq: bool,
    gptq_static_scales: bool,
    gptq_order: Option<String>,
    gptq_damping: Option<f64>,
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
        let hadamard = self.hadamard.map(|width| width.to_string());
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
            search: optional::<Search>(py, self.search.as_deref())?.or(self.gptq.then_some(Search::Full)),
            search_global: self.search_global.then_some(true),
            non_finite: optional::<NonFinite>(py, self.non_finite.as_deref())?,
            hadamard: optional::<HadamardWidth>(py, hadamard.as_deref())?.map(Some),
        });
        recipes.kept = optional::<KeptAs>(py, self.kept.as_deref())?.unwrap_or(recipes.kept);
        recipes.select(&self.include, &self.exclude).map_err(of_checkpoints)?;
        recipes.check_settings().map_err(of_checkpoints)?;
        Ok(recipes)
    }

    /// The file with importance by column, unless GPTQ replaces it.
    fn importance(&self, py: Python<'_>) -> PyResult<Option<PathBuf>> {
        let calibrated = self.calibration.as_deref().filter(|_| !self.gptq);
        let calibrated = calibrated.map(checkpoint::calibration::importance).transpose();
        Ok(self.importance.clone().or(calibrated.map_err(|error| of_checkpoints(py, error))?))
    }

    /// The options of GPTQ.
    fn gptq(&self, py: Python<'_>) -> PyResult<Option<Gptq>> {
        let has_options = self.gptq_static_scales || self.gptq_order.is_some() || self.gptq_damping.is_some();
        let wrong = match (&self.calibration, self.gptq) {
            (Some(_), _) if self.importance.is_some() => "importance and calibration; pass one of them",
            (None, true) => "gptq without calibration; pass a directory of calibrate",
            (_, true) if self.search_global => "gptq and search_global; leave one out",
            (_, false) if has_options => "options of GPTQ without gptq; pass gptq=True",
            _ => "",
        };
        if !wrong.is_empty() {
            return Err(error(py, wrong));
        }
        let order = self.gptq_order.as_deref().map(|word| {
            let known = Gptq::ORDERS.into_iter().find(|(known, _)| *known == word);
            let wrong = || error(py, format!("gptq_order is {word:?}; pass blocks, columns or natural"));
            known.map(|(_, order)| order).ok_or_else(wrong)
        });
        let order = order.transpose()?;
        let statistics = self.calibration.as_ref().filter(|_| self.gptq);
        Ok(statistics
            .map(|statistics| Gptq::new(statistics).with(order, self.gptq_static_scales, self.gptq_damping)))
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
        let gptq = self.gptq(py)?;
        Ok(Quantize {
            open: OpenOptions { skip_other_weights, split_experts },
            recipes: self.recipes(py)?,
            format: optional(py, self.to.as_deref())?,
            requantize: self.requantize,
            global_scales: self.global_scales.clone(),
            importance: self.importance(py)?,
            gptq,
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
        self.global_scales.iter().chain(inputs)
    }
}

/// A part as two numbers: which, counted from 1, and of how many.
fn part(py: Python<'_>, part: Option<(usize, usize)>) -> PyResult<Option<Part>> {
    part.map(|(index, of)| word(py, &format!("{index}/{of}"))).transpose()
}

/// Opens a checkpoint, and warns where its index and its files disagree.
pub(crate) fn open(py: Python<'_>, path: &Path, options: OpenOptions) -> PyResult<Checkpoint> {
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
    check_places(&input, arguments.files().chain(&quantize.importance), &outputs).map_err(of_checkpoints)?;
    match quantize.part {
        None => drop(checkpoint::remove_unfinished_output(&out)),
        Some(part) => drop(checkpoint::remove_unfinished_part(&out, part)),
    }
    let done = operate(py, progress, |progress| Ok(plan.run(&out, &device, progress)?.to_json()))?;
    with_notes(done, warnings)
}

/// The arguments of a plan.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Planning {
    bits: Option<f64>,
    size: Option<u64>,
    formats: Vec<String>,
    include: Vec<String>,
    exclude: Vec<String>,
    search: Option<String>,
    importance: Option<PathBuf>,
    to: Option<String>,
    split_experts: bool,
}

impl Planning {
    /// The request that the arguments make.
    fn request(&self, py: Python<'_>) -> PyResult<Allocate> {
        let budget = match (self.bits, self.size) {
            (Some(bits), None) if bits.is_finite() && bits > 0.0 => Budget::Bits(bits),
            (None, Some(bytes)) => Budget::Bytes(bytes),
            _ => return Err(error(py, "a plan takes bits, a positive number, or size, a number of bytes")),
        };
        let choice = |choice: &String| match choice.as_str() {
            Choice::UNQUANTIZED => Ok(Choice::Unquantized),
            format => word(py, format).map(Choice::Format),
        };
        let selection = Selection::new(&self.include, &self.exclude);
        Ok(Allocate {
            open: OpenOptions { split_experts: self.split_experts, ..OpenOptions::default() },
            choices: self.formats.iter().map(choice).collect::<PyResult<_>>()?,
            selection: selection.map_err(|error| of_checkpoints(py, error))?,
            search: optional::<Search>(py, self.search.as_deref())?.unwrap_or_default(),
            format: optional(py, self.to.as_deref())?,
            importance: self.importance.clone(),
            ..Allocate::new(budget)
        })
    }
}

/// Chooses a format for each tensor within a budget. Returns JSON, a recipe that says that it was
/// `made_by` a call, and warnings.
#[pyfunction]
#[pyo3(signature = (path, out, arguments, made_by, device, progress))]
pub(crate) fn plan_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    out: Option<PathBuf>,
    arguments: Planning,
    made_by: &str,
    device: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, String, Vec<String>)> {
    let of_checkpoints = |error| of_checkpoints(py, error);
    let allocate = arguments.request(py)?;
    let device = ready(py, device)?;
    let input = warned(py, work(py, || allocate.open(&path))?.map_err(of_checkpoints)?)?;
    check_places(&input, &arguments.importance, &out.iter().collect::<Vec<_>>()).map_err(of_checkpoints)?;
    let plan = operate(py, progress, |progress| allocate.run(&input, &device, progress))?;
    let warnings = plan.warnings.iter().map(ToString::to_string).collect();
    Ok((plan.to_json().to_string(), plan.recipe(made_by), warnings))
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
pub(crate) fn check_places<'a>(
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
    let mut reporter = Reporter::new(progress);
    let done = work(py, || operation(&mut |at: Progress<'_>| reporter.report(at.tensor, at.done, at.total)))?;
    reporter.result(done.map_err(|error| of_checkpoints(py, error)))
}

/// Calls a callable of Python with the progress of an operation.
pub(crate) struct Reporter {
    progress: Option<Py<PyAny>>,
    /// The name of the last call.
    reported: Option<String>,
    /// The exception that stopped the operation.
    raised: Option<PyErr>,
}

impl Reporter {
    pub(crate) fn new(progress: Option<Py<PyAny>>) -> Self {
        Self { progress, reported: None, raised: None }
    }

    /// Reports a name, unless it was the last one. Breaks after an exception and after Ctrl-C.
    pub(crate) fn report(&mut self, name: &str, done: u64, total: u64) -> ControlFlow<()> {
        // Workers report other tensors until the operation stops.
        if self.raised.is_some() {
            return ControlFlow::Break(());
        }
        let go_on = Python::attach(|py| {
            py.check_signals()?;
            let Some(progress) = &self.progress else { return Ok(()) };
            if self.reported.as_deref() == Some(name) {
                return Ok(());
            }
            self.reported = Some(name.into());
            progress.call1(py, (name, done, total)).map(|_| ())
        });
        match go_on {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.raised = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    /// Returns the operation's result, or the exception that stopped it.
    pub(crate) fn result<R>(self, done: PyResult<R>) -> PyResult<R> {
        self.raised.map_or(done, Err)
    }
}
