//! What programs ask for: checkpoint directories whose models run, a text, and an evaluation or a
//! calibration of them.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use microscale::Words;
use microscale_candle::Weights;
use microscale_checkpoint::Checkpoint;
use serde_json::{Map, Value, json};

use crate::activations::{InputFormat, QuantizedInputs};
use crate::calibrate::{CalibrateOptions, calibrate};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::estimate::Estimate;
use crate::evaluate::{Difference, EvaluateOptions, Evaluated, Evaluation, LayerError, evaluate};
use crate::progress::OnProgress;
use crate::source::{Source, Stored};
use crate::statistics::{Identity, Statistics};
use crate::text::{Text, TextOptions, Window};

/// The longest default window.
const WINDOW: usize = 2048;

/// A checkpoint directory whose model can run.
#[derive(Debug)]
pub struct OpenModel {
    /// The directory.
    pub path: PathBuf,
    /// The model's sizes.
    pub config: Config,
    /// Its tensors and layers.
    pub source: Stored,
}

impl OpenModel {
    /// Reads the config of a directory that is open. The model runs on the CPU.
    ///
    /// # Errors
    /// [`Error::Config`] for a model that this crate does not run, and errors of the checkpoint.
    pub fn new(path: &Path, checkpoint: Checkpoint) -> Result<Self> {
        Self::on_device(path, checkpoint, &Device::Cpu)
    }

    /// [`Self::new`] for a model that runs on a device: the CPU, or with the feature `cuda` a GPU.
    /// Models that are evaluated together are on one device.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn on_device(path: &Path, checkpoint: Checkpoint, device: &Device) -> Result<Self> {
        let config = Config::read(path)?;
        let weights = Weights::of(checkpoint, DType::F32, device)?;
        Ok(Self { path: path.into(), config, source: Stored::new(weights) })
    }
}

/// A text file, and how a model reads it.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The file, in UTF-8.
    pub text: PathBuf,
    /// Tokens that the model reads at once, at least 2. `None` for its context, at most 2048.
    pub window: Option<usize>,
    /// Windows to use, from the text's beginning; `None` for all.
    pub windows: Option<usize>,
    /// Whether empty lines separate documents.
    pub documents: bool,
    /// The dtype of hidden states: f32, or bf16 as engines have it.
    pub dtype: DType,
}

impl Reading {
    /// Returns a dtype of hidden states by its word, `f32` or `bf16`.
    pub fn dtype(word: &str) -> Option<DType> {
        [DType::F32, DType::BF16].into_iter().find(|dtype| dtype.as_str() == word)
    }

    /// Reads the text with a model's tokenizer.
    ///
    /// # Errors
    /// [`Error::Io`] if the text is not readable, and the errors of [`Text`].
    pub fn windows(&self, model: &OpenModel) -> Result<Vec<Window>> {
        let text =
            fs::read_to_string(&self.text).map_err(|source| Error::Io { path: self.text.clone(), source })?;
        Text::open(&model.path)?.windows(&text, &model.config, &self.options(model))
    }

    fn options(&self, model: &OpenModel) -> TextOptions {
        TextOptions {
            window: self.window.unwrap_or(model.config.context.min(WINDOW)),
            windows: self.windows,
            documents: self.documents,
        }
    }

    /// Writes the statistics of a model to a directory, or continues an interrupted run that had
    /// the same model, text and options. `windows` come from [`Self::windows`].
    ///
    /// # Errors
    /// The errors of [`calibrate`].
    pub fn calibrate(
        &self,
        model: &OpenModel,
        windows: &[Window],
        hessians: bool,
        directory: &Path,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<Statistics> {
        let identity = self.identity(model, windows.len(), hessians)?;
        let options = CalibrateOptions { dtype: self.dtype, hessians };
        calibrate(&model.source, &model.config, windows, options, &identity, directory, on_progress)
    }

    /// Returns the facts that a continued run must share with the interrupted one.
    fn identity(&self, model: &OpenModel, windows: usize, hessians: bool) -> Result<Identity> {
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Io { path, source }
        };
        let absolute = |path: &Path| path.canonicalize().map_err(failed(path));
        let text = absolute(&self.text)?;
        let options = self.options(model);
        let facts = [
            ("model", json!(absolute(&model.path)?.display().to_string())),
            ("text", json!(text.display().to_string())),
            ("text_bytes", json!(text.metadata().map_err(failed(&text))?.len())),
            ("window", json!(options.window)),
            ("windows", json!(windows)),
            ("documents", json!(options.documents)),
            ("dtype", json!(self.dtype.as_str())),
            ("device", json!(if model.source.device().is_cpu() { "cpu" } else { "cuda" })),
            ("hessians", json!(hessians)),
        ];
        Ok(Identity(Map::from_iter(facts.map(|(name, fact)| (name.to_string(), fact)))))
    }

    /// Evaluates quantized checkpoints against the original, each with unquantized activations and
    /// then with each format of `activations`. `windows` come from [`Self::windows`], and
    /// `layers` is [`EvaluateOptions::layers`].
    ///
    /// # Errors
    /// The errors of [`evaluate`].
    pub fn evaluate(
        &self,
        model: &OpenModel,
        quantized: &[OpenModel],
        activations: &[InputFormat],
        windows: &[Window],
        layers: bool,
        on_progress: &mut OnProgress<'_>,
    ) -> Result<ModelEvaluation> {
        let formats = || [None].into_iter().chain(activations.iter().copied().map(Some));
        let rows = quantized.iter().flat_map(|model| formats().map(move |format| (model, format)));
        let rows: Vec<_> = rows
            .map(|(model, activations)| {
                let inputs = activations.map(|format| QuantizedInputs::new(model.source.clone(), format));
                (EvaluatedRow { path: model.path.clone(), activations }, model, inputs)
            })
            .collect();
        let names: Vec<_> = rows.iter().map(|(row, ..)| row.name()).collect();
        let others = rows.iter().zip(&names).map(|((_, model, inputs), name)| {
            let source: &dyn Source = match inputs {
                Some(inputs) => inputs,
                None => &model.source,
            };
            Evaluated { name, source, config: &model.config }
        });
        let others: Vec<_> = others.collect();
        let name = model.path.display().to_string();
        let reference = Evaluated { name: &name, source: &model.source, config: &model.config };
        let options = EvaluateOptions { dtype: self.dtype, layers };
        let evaluation = evaluate(reference, &others, windows, options, on_progress)?;
        let rows = rows.into_iter().map(|(row, ..)| row).collect();
        Ok(ModelEvaluation { model: model.path.clone(), evaluation, rows })
    }
}

/// The evaluation of checkpoints.
#[derive(Clone, Debug)]
pub struct ModelEvaluation {
    /// The original's directory.
    pub model: PathBuf,
    /// The results.
    pub evaluation: Evaluation,
    /// The checkpoint of each of the evaluation's `others`.
    pub rows: Vec<EvaluatedRow>,
}

/// A quantized checkpoint of an evaluation.
#[derive(Clone, Debug)]
pub struct EvaluatedRow {
    /// The directory.
    pub path: PathBuf,
    /// The format of activations; `None` if they are not quantized.
    pub activations: Option<InputFormat>,
}

impl EvaluatedRow {
    /// Returns the path, and the format of activations.
    pub fn name(&self) -> String {
        let path = self.path.display();
        self.activations
            .map_or_else(|| path.to_string(), |format| format!("{path}, {} activations", format.word()))
    }
}

impl ModelEvaluation {
    /// Returns each checkpoint and its results.
    pub fn others(&self) -> impl Iterator<Item = (&EvaluatedRow, &Difference)> {
        self.rows.iter().zip(&self.evaluation.others)
    }

    /// Returns all results as JSON. docs/json.md describes the keys.
    pub fn to_json(&self) -> Value {
        let estimate = |Estimate { mean, margin }: Estimate| json!({ "mean": mean, "margin": margin });
        let layer = |layer: &LayerError| json!({ "weight": layer.weight, "sqnr_db": layer.sqnr_db() });
        let model = |(row, other): (&EvaluatedRow, &Difference)| {
            json!({
                "model": row.path.display().to_string(),
                "activations": row.activations.map(Words::word),
                "loss": estimate(other.loss),
                "perplexity": estimate(other.perplexity),
                "increase": estimate(other.increase),
                "divergence": estimate(other.divergence),
                "agreement": estimate(other.agreement),
                "layers": other.layers.iter().map(layer).collect::<Value>(),
            })
        };
        let evaluation = &self.evaluation;
        json!({
            "model": self.model.display().to_string(),
            "windows": evaluation.windows,
            "tokens": evaluation.tokens,
            "loss": estimate(evaluation.loss),
            "perplexity": estimate(evaluation.perplexity),
            "quantized": self.others().map(model).collect::<Value>(),
        })
    }
}
