//! The crate from outside: whole operations on checkpoints, and the bytes and reports they return.
//!
//! Expected values come from `microscale` on a whole tensor at once, from the oracle of the test
//! support, or from arithmetic in the test.

mod allocate;
mod by_name;
mod convert;
mod damage;
mod dequantize;
mod doctor;
mod errors;
mod indexes;
mod input;
mod interrupted;
mod jobs;
mod parts;
mod quantize;
mod shards;
mod threads;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use microscale::{Device, Format};
use microscale_checkpoint::{OnProgress, Plan, Quantize, Recipes, Result, Selection, Settings, Summary};
use microscale_test_support::Scratch;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

/// Elements that the library has in memory at once, unless one row is longer.
///
/// Only the choice of shapes depends on it: tensors below, at and above it must give the same
/// bytes.
pub(crate) const BAND: usize = 1 << 18;

/// Tensors of files by name: dtype, shape, bytes.
pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Returns the tensors of a file, or of all `.safetensors` files of a directory.
pub(crate) fn tensors(path: &Path) -> Tensors {
    let mut tensors = Tensors::new();
    for bytes in shards(path).values() {
        for (name, view) in SafeTensors::deserialize(bytes).unwrap().tensors() {
            let entry = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            assert!(tensors.insert(name, entry).is_none(), "a name occurs twice");
        }
    }
    tensors
}

/// Returns the bytes of a file, or of all `.safetensors` files of a directory.
pub(crate) fn shards(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = files(path);
    files.retain(|name, _| path.is_file() || name.extension().is_some_and(|end| end == "safetensors"));
    files
}

/// Returns the bytes of a file, or of every file in a directory.
pub(crate) fn files(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    if path.is_file() {
        return BTreeMap::from([(PathBuf::new(), fs::read(path).unwrap())]);
    }
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|file| (file.file_name().unwrap().into(), fs::read(&file).unwrap())).collect()
}

/// Returns the paths of all files and directories, temporary ones included.
pub(crate) fn paths(scratch: &Scratch) -> BTreeSet<PathBuf> {
    scratch.contents().into_keys().collect()
}

/// A request for a format with its default numerics.
pub(crate) fn request(format: Format) -> Quantize {
    Quantize::new(Settings { format: Some(format), ..Settings::default() })
}

/// Quantizes every tensor called `*.weight` to a format, of two or more dimensions.
pub(crate) fn request_all(format: Format) -> Quantize {
    let settings = Settings { format: Some(format), ..Settings::default() };
    let weights = Selection::new(&["*.weight"], &["*norm*"]).unwrap();
    Quantize { recipes: Recipes::new(settings, weights), ..Quantize::default() }
}

/// Opens `input`, passes the plan to `work`, and returns its result.
pub(crate) fn with_plan<R>(
    request: &Quantize,
    input: &Path,
    work: impl FnOnce(&Plan<'_>) -> Result<R>,
) -> Result<R> {
    let checkpoint = request.open(input)?;
    work(&request.plan(&checkpoint)?)
}

/// Quantizes `input` to `out` on the CPU.
pub(crate) fn quantize(request: &Quantize, input: &Path, out: &Path) -> Result<Summary> {
    with_plan(request, input, |plan| plan.run(out, &Device::Cpu, going_on()))
}

/// Ignores progress and never breaks off.
pub(crate) fn going_on() -> &'static mut OnProgress<'static> {
    Box::leak(Box::new(|_| ControlFlow::Continue(())))
}
