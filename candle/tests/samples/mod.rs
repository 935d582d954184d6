//! The sample checkpoints in the repository.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::{Format, Numerics};
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Quantize, Settings};

/// A sample's directory.
///
/// `MICROSCALE_TEST_DATA` names the root directory for tests that run on a machine other than the
/// build machine.
pub(crate) fn sample(name: &str) -> PathBuf {
    let root = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("MICROSCALE_TEST_DATA").map_or_else(root, PathBuf::from).join("sample").join(name)
}

/// Quantizes a sample into a directory.
pub(crate) fn quantized(name: &str, out: &Path, format: Format, numerics: Numerics, files: CheckpointFormat) {
    let checkpoint = Checkpoint::open(&sample(name)).unwrap();
    let settings = Settings { format: Some(format), numerics: Some(numerics), ..Settings::default() };
    let quantize = Quantize { format: Some(files), ..Quantize::new(settings) };
    let plan = quantize.plan(&checkpoint).unwrap();
    plan.run(out, &microscale::Device::Cpu, &mut |_| ControlFlow::Continue(())).unwrap();
}
