//! The sample checkpoints in the repository.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::{Convention, Format, Recipe};
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Plan, Selection, quantize};

/// A sample's directory.
///
/// `MICROSCALE_TEST_DATA` names the root directory for tests that run on a machine other than the
/// build machine.
pub(crate) fn sample(name: &str) -> PathBuf {
    let root = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("MICROSCALE_TEST_DATA").map_or_else(root, PathBuf::from).join("sample").join(name)
}

/// Quantizes a sample into a directory.
pub(crate) fn quantized(
    name: &str,
    out: &Path,
    format: Format,
    convention: Convention,
    files: CheckpointFormat,
) {
    let checkpoint = Checkpoint::open(&sample(name)).unwrap();
    let recipe = Recipe::of(format, convention).unwrap();
    let plan = Plan::new(&checkpoint, &Selection::default(), recipe, files).unwrap();
    quantize(&plan, out, &microscale::Device::Cpu, &mut |_| ControlFlow::Continue(())).unwrap();
}
