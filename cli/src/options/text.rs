//! The model that a command runs, and the text that it reads.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::{DType, Device};
use microscale::DeviceChoice;
use microscale_models::{OpenModel, Reading};

#[cfg(not(feature = "models-cuda"))]
use crate::failures::Usage;
use crate::options::device::parse_device;
use crate::outputs::open;

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
    dtype: DType,
    /// Device that runs the model: cpu, cuda or cuda:N
    ///
    /// GPUs need a program that was built with the feature models-cuda.
    #[arg(long, default_value = "cpu", value_parser = parse_model_device)]
    device: DeviceChoice,
}

/// Parses a device that runs models.
fn parse_model_device(word: &str) -> std::result::Result<DeviceChoice, String> {
    match parse_device(word) {
        Ok(choice @ (DeviceChoice::Cpu | DeviceChoice::Cuda(_))) => Ok(choice),
        _ => Err("pass cpu, cuda or cuda:N".into()),
    }
}

fn parse_dtype(word: &str) -> std::result::Result<DType, String> {
    Reading::dtype(word).ok_or_else(|| "pass f32 or bf16".into())
}

/// Opens a checkpoint directory whose model can run, on a device.
pub(crate) fn open_model(path: &Path, device: &Device) -> Result<OpenModel> {
    Ok(OpenModel::on_device(path, open(path)?, device)?)
}

/// Makes a GPU ready for candle.
#[cfg(feature = "models-cuda")]
fn gpu(ordinal: usize) -> Result<Device> {
    // The library's errors say whether a driver or the GPU is missing.
    microscale::Device::choose(DeviceChoice::Cuda(ordinal))?;
    Ok(Device::new_cuda(ordinal)?)
}

#[cfg(not(feature = "models-cuda"))]
fn gpu(_ordinal: usize) -> Result<Device> {
    Err(Usage::new(
        "this program runs models on CPUs only: pass --device cpu, or build it with --features models-cuda, \
         which needs nvcc",
    )
    .into())
}

impl TextArgs {
    /// Makes the device ready.
    pub(crate) fn device(&self) -> Result<Device> {
        match self.device {
            DeviceChoice::Cuda(ordinal) => gpu(ordinal),
            _ => Ok(Device::Cpu),
        }
    }

    /// Returns the text, and how a model reads it.
    pub(crate) fn reading(&self) -> Reading {
        let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Reading {
            text: self.text.clone(),
            window: self.window.map(number),
            windows: self.windows.map(number),
            documents: self.documents,
            dtype: self.dtype,
        }
    }
}
