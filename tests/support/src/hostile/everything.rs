//! Calls every function that reads a checkpoint, and every function that writes one.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::{Device, Dtype, Format, NonFinite, Numerics};
use microscale_checkpoint::{
    self as checkpoint, Checkpoint, CheckpointFormat, Convert, Dequantize, Error, OpenOptions, Progress,
    Quantize, Result, Settings,
};

use crate::Scratch;

/// The formats of each checkpoint format, with matching numerics.
pub(super) const HELD: [(CheckpointFormat, Format, Numerics); 6] = [
    (CheckpointFormat::CompressedTensors, Format::Mxfp4, Numerics::Torchao),
    (CheckpointFormat::CompressedTensors, Format::Nvfp4, Numerics::CompressedTensors),
    (CheckpointFormat::Modelopt, Format::Nvfp4, Numerics::Modelopt),
    (CheckpointFormat::GptOss, Format::Mxfp4, Numerics::Torchao),
    (CheckpointFormat::Gguf, Format::Mxfp4, Numerics::Torchao),
    (CheckpointFormat::Gguf, Format::Nvfp4, Numerics::Torchao),
];

/// A progress callback that never cancels.
pub(super) fn go_on(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A directory that may change only by its output, and only on success.
pub(super) struct Watched<'s> {
    scratch: &'s Scratch,
    before: BTreeMap<PathBuf, Option<Vec<u8>>>,
    out: PathBuf,
}

impl<'s> Watched<'s> {
    /// The output is `OUT` or a file with that prefix.
    pub(super) fn new(scratch: &'s Scratch, out: &str) -> Self {
        Self { scratch, before: scratch.contents(), out: scratch.path(out) }
    }

    /// Calls `write` with the output's path, checks the result, and removes it.
    pub(super) fn write<T>(&self, write: impl FnOnce(&Path) -> Result<T>) -> Option<T> {
        let written = write(&self.out);
        let mut after = self.scratch.contents();
        if written.is_ok() {
            assert!(after.contains_key(&self.out), "a success, but there is no output");
            after.retain(|path, _| !path.starts_with(&self.out));
            // The output must be a checkpoint without unexpected files.
            Checkpoint::open(&self.out)
                .unwrap_or_else(|error| panic!("what was written is unreadable: {error:?}"));
            if self.out.is_dir() {
                fs::remove_dir_all(&self.out).unwrap();
            } else {
                fs::remove_file(&self.out).unwrap();
            }
        }
        assert_eq!(self.before, after, "something else was written or left behind");
        if let Err(error) = &written {
            message(error);
        }
        written.ok()
    }

    /// Asserts that nothing has changed.
    pub(super) fn unchanged(&self) {
        assert_eq!(self.before, self.scratch.contents(), "something was written");
    }
}

/// Asserts that an error message is short, so that it does not repeat hostile contents at length.
fn message(error: &Error) {
    let message = error.to_string();
    assert!(message.len() < 1 << 19, "an error of {} bytes", message.len());
}

/// Selects, by a byte, one variant of each operation that writes output.
///
/// Writing takes longer than reading, so an input does not try every variant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ways(pub(super) u8);

/// Reads everything of a file or a directory, and writes everything that can be made of it.
pub(super) fn everything(scratch: &Scratch, input: &Path, ways: Ways) {
    let out = if input.is_dir() { "OUT".into() } else { format!("OUT.{}", extension(input)) };
    let watched = Watched::new(scratch, &out);
    let checkpoint = match Checkpoint::open(input) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            message(&error);
            return watched.unchanged();
        }
    };
    let (device, go_on) = (&Device::Cpu, &mut go_on);
    for inspected in checkpoint::inspect(&checkpoint) {
        let _ = (inspected.tensor.shape(), inspected.tensor.stored().matrix());
    }
    let _ = checkpoint::diagnose(&checkpoint, Some(&checkpoint), device, go_on)
        .map(|diagnosis| diagnosis.to_json().to_string());
    let _ = checkpoint::compare(&checkpoint, &checkpoint, device, go_on);
    watched.unchanged();

    let ways = usize::from(ways.0);
    let (files, format, numerics) = HELD[ways % HELD.len()];
    let settings = Settings { format: Some(format), numerics: Some(numerics), ..Settings::default() };
    let quantize = Quantize { format: Some(files), ..Quantize::new(settings) };
    if let Ok(plan) = quantize.plan(&checkpoint) {
        let _ = plan.to_json().to_string();
        watched.write(|out| plan.run(out, device, go_on));
    }
    let (files, ..) = HELD[ways / HELD.len() % HELD.len()];
    watched.write(|out| Convert::new(files).run(&checkpoint, out, device, go_on));
    let dtype = [None, Some(Dtype::F32)][ways / HELD.len() / HELD.len() % 2];
    let non_finite = [NonFinite::Error, NonFinite::Propagate, NonFinite::Saturate][ways % 3];
    let dequantize = Dequantize { dtype, non_finite };
    watched.write(|out| dequantize.run(&checkpoint, out, device, go_on));

    let options = OpenOptions { split_experts: true, ..OpenOptions::default() };
    let split = Checkpoint::open_with(checkpoint.path(), options).map_err(|error| message(&error));
    let quantize = Quantize { format: Some(CheckpointFormat::default()), ..Quantize::default() };
    if let Ok(split) = split
        && let Ok(plan) = quantize.plan(&split)
    {
        watched.write(|out| plan.run(out, device, go_on));
    }
}

/// Returns the extension for output made from a file. PyTorch files become safetensors.
fn extension(file: &Path) -> &str {
    let extension = file.extension().and_then(|extension| extension.to_str());
    extension.filter(|extension| *extension != "pt").unwrap_or("safetensors")
}
