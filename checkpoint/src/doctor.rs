//! Checks a quantized checkpoint for defects, and names the place, the effect and the fix of each.
//!
//! | file | contents |
//! |---|---|
//! | `finding` | the kinds of defects, with the effect and the fix of each |
//! | `contents` | the tensors of a checkpoint, for checks of several together |
//! | `blocks` | scale bytes and codes, block by block |
//! | `values`, `zeros` | the values of unquantized tensors: NaN, infinities and zeros |
//! | `w8_scales` | the scales of FP8 and INT8 weights |
//! | `stored` | dtypes and shapes that microscale reads but loaders misread |
//! | `global_scales` | NVFP4's global scales: their direction, and equality within fused layers |
//! | `input_scales`, `cache`, `cache_names` | the scales of layers' inputs, and of a cache of keys and values |
//! | `loaders`, `index` | correct tensors that known loaders misread, refuse or take from elsewhere |
//! | `selection` | tensors that loaders and engines take only unquantized |
//! | `missing` | tensors that are not there |
//! | `original` | values, compared with the checkpoint that was quantized |
//! | `config`, `layers` | config.json: the method, and which layers it lists as quantized |
//! | `groups` | the entries of config_groups |
//! | `modelopt` | ModelOpt's configs |
//! | `stacks`, `sizes` | the layers of the language model, and their number; sizes in config.json |
//! | `transforms` | transforms of activations that a loader leaves out |

mod blocks;
mod cache;
mod cache_names;
mod config;
mod contents;
pub(crate) mod finding;
mod global_scales;
mod groups;
mod index;
mod input_scales;
mod layers;
mod loaders;
mod missing;
mod modelopt;
mod original;
mod selection;
mod sizes;
mod stacks;
mod stored;
mod transforms;
mod values;
mod w8_scales;
mod zeros;

use std::collections::{BTreeMap, HashMap};

use microscale::{Device, Words};
use serde_json::{Value, json};

use crate::checkpoint_formats::ownership::{Ownership, StoredLogical};
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::checkpoint_formats::undone::check_same;
use crate::doctor::blocks::check_blocks;
use crate::doctor::cache::check_cache;
use crate::doctor::config::check_config;
use crate::doctor::contents::{Contents, Zeros, weight_of};
use crate::doctor::finding::{Defect, Finding};
use crate::doctor::global_scales::check_global_scales;
use crate::doctor::index::check_index;
use crate::doctor::input_scales::check_input_scales;
use crate::doctor::loaders::check_loaders;
use crate::doctor::missing::check_missing;
use crate::doctor::modelopt::check_modelopt;
use crate::doctor::original::{check_against_original, check_left};
use crate::doctor::selection::check_selection;
use crate::doctor::sizes::check_sizes;
use crate::doctor::stacks::check_stack;
use crate::doctor::stored::{check_dtype, check_stored};
use crate::doctor::transforms::check_transforms;
use crate::doctor::values::check_values;
use crate::doctor::w8_scales::check_w8_scales;
use crate::doctor::zeros::check_zeros;
use crate::error::format::FormatError;
use crate::error::{Error, Result};
use crate::pipeline::{Worker, map};
use crate::progress::{Meter, OnProgress};
use crate::read::checkpoint::Checkpoint;
use crate::read::input::Input;
use crate::read::position::Position;
use crate::read::tensor::Tensor;

/// The result of checking a checkpoint.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Diagnosis {
    /// The defects, tensor by tensor.
    pub findings: Vec<Finding>,
    /// Number of quantized tensors that were checked.
    pub quantized: u64,
    /// Number of other tensors.
    pub plain: u64,
    /// Number of blocks that were checked.
    pub blocks: u64,
}

/// Checks every tensor of a checkpoint, its fused layers and its config.
///
/// With `against`, the checkpoint that was quantized, values are also compared with its tensors of
/// the same names. A defect of a tensor is a finding. A checkpoint that cannot be opened is an
/// error of [`Checkpoint::open`].
///
/// # Errors
/// [`Error::Interrupted`] if `progress` asks to stop, the errors of reading `against`, and
/// [`FormatError::Transformed`] if only one of both is stored under a transform.
pub fn diagnose(
    checkpoint: &Checkpoint,
    against: Option<&Checkpoint>,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Diagnosis> {
    if let Some(against) = against {
        check_same(checkpoint, against)?;
    }
    let mut originals = against.map(originals).unwrap_or_default();
    let of = originals.values().filter(|tensor| tensor.logical.is_some()).count();
    let mut units = Vec::new();
    for tensor in Ownership::of(checkpoint).tensors() {
        let original = match &tensor.logical {
            Some(Ok(logical)) => original(against, &mut originals, logical.name())?,
            _ => None,
        };
        units.push(TensorCheck { tensor, original });
    }
    let devices = device.workers(0).map_err(Error::Device)?;
    let checked = check_all(&units, checkpoint, against, &devices, progress)?;
    let mut findings = Vec::new();
    let mut contents = Contents {
        checkpoint,
        packed: Vec::new(),
        plain: Vec::new(),
        unreadable: Vec::new(),
        zeros: BTreeMap::new(),
    };
    for (TensorCheck { tensor, .. }, (of_tensor, zeros)) in units.into_iter().zip(checked) {
        findings.extend(of_tensor);
        contents.zeros.extend((zeros.zero > 0).then_some((tensor.stored.name, zeros)));
        match tensor.logical {
            None => {}
            Some(Ok(Logical::Packed(tensor))) => contents.packed.push(*tensor),
            Some(Ok(Logical::Plain(tensor))) => contents.plain.push(tensor),
            Some(Err(_)) => contents.unreadable.push(tensor.stored),
        }
    }
    check_global_scales(&contents.packed, &mut findings);
    check_loaders(&contents, &mut findings);
    check_selection(&contents, &mut findings);
    check_config(&contents, &mut findings);
    check_modelopt(&contents, &mut findings);
    let odd = check_stack(&contents, &mut findings);
    check_sizes(&contents, &odd, &mut findings);
    check_input_scales(&contents, &mut findings);
    check_cache(&contents, &mut findings);
    check_zeros(&contents, &mut findings);
    check_missing(&contents, &mut findings);
    check_index(checkpoint, &mut findings);
    check_transforms(checkpoint, &mut findings);
    let left = originals.values().filter(|tensor| tensor.logical.is_some()).map(|tensor| tensor.stored.name);
    let mut left: Vec<_> = left.map(weight_of).collect();
    left.sort_unstable();
    check_left(&contents, &left, of, &mut findings);
    let w8 = contents.plain.iter().filter(|tensor| tensor.scaling.is_some()).count();
    Ok(Diagnosis {
        findings,
        quantized: (contents.packed.len() + w8) as u64,
        plain: (contents.plain.len() - w8 + contents.unreadable.len()) as u64,
        blocks: contents.packed.iter().map(Packed::blocks).sum(),
    })
}

/// A stored tensor to check, and its original.
struct TensorCheck<'a> {
    tensor: StoredLogical<'a>,
    original: Option<(Position, Tensor<'a>)>,
}

/// The stored tensors of the original checkpoint by name.
type Originals<'a> = HashMap<&'a str, StoredLogical<'a>>;

fn originals(against: &Checkpoint) -> Originals<'_> {
    Ownership::of(against).tensors().map(|tensor| (tensor.stored.name, tensor)).collect()
}

/// Takes the original of a tensor, with its scales if it has any.
fn original<'a>(
    against: Option<&'a Checkpoint>,
    originals: &mut Originals<'a>,
    name: &str,
) -> Result<Option<(Position, Tensor<'a>)>> {
    let Some((against, original)) = against.zip(originals.remove(name)) else { return Ok(None) };
    let StoredLogical { position, stored, logical } = original;
    let tensor = match logical.transpose()? {
        Some(Logical::Plain(tensor)) => tensor,
        Some(Logical::Packed(packed)) => packed.scaled(against).unwrap_or(stored),
        None => stored,
    };
    Ok(Some((position, tensor)))
}

/// Checks all tensors, and returns the findings of each, and its rows of zeros.
fn check_all<'env>(
    units: &'env [TensorCheck<'env>],
    checkpoint: &Checkpoint,
    against: Option<&Checkpoint>,
    devices: &'env [Device],
    progress: &mut OnProgress<'_>,
) -> Result<Vec<(Vec<Finding>, Zeros)>> {
    let facts =
        |unit: &'env TensorCheck<'env>| (unit.tensor.stored.name, unit.tensor.stored.data.len() as u64);
    let mut meter = Meter::new(units.iter().map(|unit| facts(unit).1).sum(), progress);
    let check = |unit: &'env TensorCheck<'env>, worker: &Worker<'_, 'env>| {
        let original = unit.original.zip(against);
        let original = original.map(|((position, tensor), against)| Input::new(against, tensor, position));
        let checked = check_tensor(&unit.tensor, checkpoint, original.as_ref(), worker);
        checkpoint.forget(&unit.tensor.stored);
        if let Some((original, against)) = original.zip(against) {
            against.forget(&original.tensor);
        }
        checked
    };
    map(units, devices, &mut meter, facts, &check)
}

/// Checks one tensor, and counts its rows of zeros if it is unquantized.
fn check_tensor<'env>(
    tensor: &'env StoredLogical<'env>,
    checkpoint: &Checkpoint,
    original: Option<&Input<'env>>,
    worker: &Worker<'_, 'env>,
) -> Result<(Vec<Finding>, Zeros)> {
    let (mut findings, mut zeros) = (Vec::new(), Zeros::default());
    match &tensor.logical {
        None => {}
        Some(Ok(Logical::Plain(plain))) => {
            check_w8_scales(plain, &mut findings);
            check_dtype(checkpoint.naming, plain, &mut findings);
            let input = Input::new(checkpoint, *plain, tensor.position);
            zeros = check_values(&input, original, worker, &mut findings)?;
        }
        Some(Ok(Logical::Packed(packed))) => {
            check_blocks(packed, original, worker, &mut findings)?;
            check_stored(packed, &mut findings);
            if let Some(original) = original {
                check_against_original(packed, original, worker, &mut findings)?;
            }
        }
        Some(Err(error)) => {
            findings.push(Finding::of(Defect::Unreadable, &tensor.stored, described(error)));
        }
    }
    Ok((findings, zeros))
}

impl Diagnosis {
    /// Refuses a checkpoint that has no quantized tensor and no finding.
    ///
    /// # Errors
    /// [`FormatError::Unquantized`].
    pub fn of_quantized(self, checkpoint: &Checkpoint) -> Result<Self> {
        if self.findings.is_empty() && self.quantized == 0 {
            return Err(FormatError::Unquantized { path: checkpoint.path.clone() }.into());
        }
        Ok(self)
    }

    /// The diagnosis as JSON.
    pub fn to_json(&self) -> Value {
        let findings = self.findings.iter().map(|finding| {
            json!({
                "defect": finding.defect.word(),
                "tensor": finding.tensor,
                "file": finding.file.to_string_lossy(),
                "what": finding.what,
                "effect": finding.defect.effect(),
                "fix": finding.defect.fix(),
            })
        });
        json!({
            "findings": findings.collect::<Vec<_>>(),
            "quantized_tensors": self.quantized,
            "other_tensors": self.plain,
            "blocks": self.blocks,
        })
    }
}

/// An error and its cause in one line.
fn described(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
