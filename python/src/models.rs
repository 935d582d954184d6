//! Evaluations and calibrations of models. Their results go to Python as JSON.

use std::path::PathBuf;

use microscale_checkpoint::OpenOptions;
use microscale_models::{self as models, InputFormat, OnProgress, OpenModel, Progress, Reading};
use pyo3::prelude::*;
use serde_json::Value;

use crate::checkpoints::{Reporter, check_places, open};
use crate::errors::{error, of_checkpoints, of_models};
use crate::recipe::word;
use crate::workers::work;

/// The text and how a model reads it, as keyword arguments.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Arguments {
    text: PathBuf,
    window: Option<usize>,
    windows: Option<usize>,
    documents: bool,
    dtype: String,
}

impl Arguments {
    fn reading(&self, py: Python<'_>) -> PyResult<Reading> {
        if self.window.is_some_and(|tokens| tokens < 2) || self.windows == Some(0) {
            return Err(error(py, "a window has 2 tokens or more, and there is 1 window or more"));
        }
        let wrong = || error(py, format!("dtype is {:?}; pass f32 or bf16", self.dtype));
        Ok(Reading {
            text: self.text.clone(),
            window: self.window,
            windows: self.windows,
            documents: self.documents,
            dtype: Reading::dtype(&self.dtype).ok_or_else(wrong)?,
        })
    }
}

/// Opens a checkpoint directory whose model can run.
fn open_model(py: Python<'_>, path: PathBuf) -> PyResult<OpenModel> {
    let checkpoint = open(py, &path, OpenOptions::default())?;
    OpenModel::new(&path, checkpoint).map_err(|error| of_models(py, error))
}

/// Measures quantized models against the original. Returns JSON.
#[pyfunction]
#[pyo3(signature = (path, quantized, arguments, activations, skip_layers, progress))]
pub(crate) fn evaluate_models(
    py: Python<'_>,
    path: PathBuf,
    quantized: Vec<PathBuf>,
    arguments: Arguments,
    activations: Vec<String>,
    skip_layers: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let reading = arguments.reading(py)?;
    let activations = activations.iter().map(|format| word::<InputFormat>(py, format));
    let activations = activations.collect::<PyResult<Vec<_>>>()?;
    let model = open_model(py, path)?;
    let quantized = quantized.into_iter().map(|path| open_model(py, path)).collect::<PyResult<Vec<_>>>()?;
    let evaluation = operate(py, progress, |progress| {
        let windows = reading.windows(&model)?;
        reading.evaluate(&model, &quantized, &activations, &windows, !skip_layers, progress)
    })?;
    Ok(evaluation.to_json().to_string())
}

/// Writes statistics of the inputs of a model's layers. Returns JSON, and warnings.
#[pyfunction]
#[pyo3(signature = (path, out, arguments, skip_hessians, progress))]
pub(crate) fn calibrate_model(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    arguments: Arguments,
    skip_hessians: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Vec<String>)> {
    let reading = arguments.reading(py)?;
    let model = open_model(py, path)?;
    check_places(model.source.weights().checkpoint(), [&reading.text], &[])
        .map_err(|error| of_checkpoints(py, error))?;
    let statistics = operate(py, progress, |progress| {
        let windows = reading.windows(&model)?;
        reading.calibrate(&model, &windows, !skip_hessians, &out, progress)
    })?;
    let unseen = statistics.unseen().into_iter();
    let warnings = unseen.map(|(weight, which)| format!("{weight}: {which} saw no token; use a longer text"));
    Ok((Value::Object(statistics.index().clone()).to_string(), warnings.collect()))
}

/// Runs an operation and calls `progress("layer N", done, total)` before each layer, with numbers
/// of batches. An exception in it stops the operation, and so does Ctrl-C.
fn operate<R: Send>(
    py: Python<'_>,
    progress: Option<Py<PyAny>>,
    operation: impl FnOnce(&mut OnProgress<'_>) -> models::Result<R> + Send,
) -> PyResult<R> {
    let mut reporter = Reporter::new(progress);
    let done = work(py, || {
        operation(&mut |Progress { layer, done, total }| {
            reporter.report(&format!("layer {layer}"), done, total)
        })
    })?;
    reporter.result(done.map_err(|error| of_models(py, error)))
}
