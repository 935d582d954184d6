//! The model that a command runs, and the text that it reads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use microscale_candle::Weights;
use microscale_models::{Config, Stored, Text, TextOptions, Window};

use crate::outputs::open;

/// The longest default window.
const WINDOW: usize = 2048;

/// The text, and how it is cut into windows.
#[derive(clap::Args)]
pub(crate) struct TextArgs {
    /// Text to run the model on, in UTF-8
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Tokens that the model reads at once [default: its context, at most 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(2..))]
    window: Option<u64>,
    /// Read only the first N windows [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    windows: Option<u64>,
    /// Begin each paragraph of the text like a document of its own
    ///
    /// Empty lines separate documents. Each one begins with the model's first token. Without this
    /// option, the text is one document.
    #[arg(long)]
    documents: bool,
    /// Dtype of hidden states: f32, or bf16 as in engines
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: DType,
}

fn parse_dtype(word: &str) -> std::result::Result<DType, String> {
    match word {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        _ => Err("pass f32 or bf16".into()),
    }
}

/// A checkpoint directory whose model can run.
pub(crate) struct OpenModel {
    pub(crate) path: PathBuf,
    pub(crate) config: Config,
    pub(crate) source: Stored,
}

impl OpenModel {
    /// Opens a checkpoint directory.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let checkpoint = open(path)?;
        let config = Config::read(path)?;
        let weights = Weights::of(checkpoint, DType::F32, &Device::Cpu)?;
        Ok(Self { path: path.into(), config, source: Stored::new(weights) })
    }
}

impl TextArgs {
    /// Reads the text with a model's tokenizer.
    pub(crate) fn windows(&self, model: &OpenModel) -> Result<Vec<Window>> {
        let text = fs::read_to_string(&self.text).with_context(|| self.text.display().to_string())?;
        let options = self.options(model);
        Ok(Text::open(&model.path)?.windows(&text, &model.config, &options)?)
    }

    /// Returns how the text is cut into windows.
    pub(crate) fn options(&self, model: &OpenModel) -> TextOptions {
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        TextOptions {
            window: self.window.map_or(model.config.context.min(WINDOW), number),
            windows: self.windows.map(number),
            documents: self.documents,
        }
    }
}
