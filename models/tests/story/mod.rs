//! The sample that was trained, and checkpoints made of it.

#![allow(dead_code, reason = "each test program uses a part")]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use microscale::{Format, Numerics};
use microscale_candle::Weights;
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Quantize, Settings};
use microscale_models::{Config, Evaluated, Stored, Text, TextOptions, Window};

/// The repository, or where `MICROSCALE_TEST_DATA` has it on a machine other than the build
/// machine.
fn root() -> PathBuf {
    let here = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("MICROSCALE_TEST_DATA").map_or_else(here, PathBuf::from)
}

/// The directory of the sample.
pub(crate) fn sample() -> PathBuf {
    root().join("sample/tiny-story")
}

/// The directory of a random model of an architecture.
pub(crate) fn golden(model: &str) -> PathBuf {
    root().join("tests/golden/models").join(model)
}

/// A checkpoint that is open.
pub(crate) struct Story {
    pub(crate) config: Config,
    pub(crate) source: Stored,
}

impl Story {
    pub(crate) fn open(directory: &Path) -> Self {
        Self::open_on(directory, &Device::Cpu)
    }

    pub(crate) fn open_on(directory: &Path, device: &Device) -> Self {
        Self::of(directory, directory, device)
    }

    /// A random model of an architecture, whose directory has golden values too.
    pub(crate) fn golden(model: &str) -> Self {
        Self::golden_on(model, &Device::Cpu)
    }

    pub(crate) fn golden_on(model: &str, device: &Device) -> Self {
        let directory = golden(model);
        Self::of(&directory, &directory.join("model.safetensors"), device)
    }

    fn of(directory: &Path, weights: &Path, device: &Device) -> Self {
        let weights = Weights::open(weights, DType::F32, device).unwrap();
        Self { config: Config::read(directory).unwrap(), source: Stored::new(weights) }
    }

    pub(crate) fn model(&self) -> Evaluated<'_> {
        Evaluated { name: "story", source: &self.source, config: &self.config }
    }

    pub(crate) fn windows(&self, windows: Option<usize>) -> Vec<Window> {
        let text = fs::read_to_string(sample().join("heldout.txt")).unwrap();
        let options = TextOptions { window: 512, windows, documents: true };
        Text::open(&sample()).unwrap().windows(&text, &self.config, &options).unwrap()
    }
}

/// Quantizes the sample into a directory, in compressed-tensors' checkpoint format.
pub(crate) fn quantized(out: &Path, format: Format, numerics: Numerics) {
    quantized_to(out, format, numerics, CheckpointFormat::CompressedTensors);
}

/// Quantizes the sample into a directory.
pub(crate) fn quantized_to(out: &Path, format: Format, numerics: Numerics, files: CheckpointFormat) {
    let checkpoint = Checkpoint::open(&sample()).unwrap();
    let settings = Settings { format: Some(format), numerics: Some(numerics), ..Settings::default() };
    let quantize = Quantize { format: Some(files), ..Quantize::new(settings) };
    let plan = quantize.plan(&checkpoint).unwrap();
    plan.run(out, &microscale::Device::Cpu, &mut |_| ControlFlow::Continue(())).unwrap();
}
