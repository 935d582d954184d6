//! Checks a quantized checkpoint for defects, and names the place, the effect and the fix of each.
//!
//! | file | contents |
//! |---|---|
//! | `finding` | the kinds of defects, with the effect and the fix of each |
//! | `blocks` | scale bytes and codes, block by block |
//! | `w8_scales` | the scales of FP8 and INT8 weights |
//! | `stored` | dtypes and shapes that microscale reads but loaders misread |
//! | `global_scales` | NVFP4's global scales: their direction, and equality within fused layers |
//! | `loaders` | correct tensors that known loaders misread or refuse |
//! | `original` | values, compared with the checkpoint that was quantized |
//! | `config`, `layers` | config.json: the method, and which layers it lists as quantized |
//! | `groups`, `patterns` | the entries of config_groups; names and patterns of layers |

mod blocks;
mod config;
pub(crate) mod finding;
mod global_scales;
mod groups;
mod layers;
mod loaders;
mod original;
mod patterns;
mod stored;
mod w8_scales;

use std::collections::HashMap;

use microscale::{Device, Words};
use serde_json::{Value, json};

use crate::checkpoint_formats::ownership::{Ownership, StoredLogical};
use crate::checkpoint_formats::packed::{Logical, Packed};
use crate::doctor::blocks::check_blocks;
use crate::doctor::config::{check_config, check_input_scales};
use crate::doctor::finding::{Defect, Finding};
use crate::doctor::global_scales::check_global_scales;
use crate::doctor::loaders::check_loaders;
use crate::doctor::original::check_against_original;
use crate::doctor::stored::check_stored;
use crate::doctor::w8_scales::check_w8_scales;
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
/// [`Error::Interrupted`] if `progress` asks to stop, and the errors of reading `against`.
pub fn diagnose(
    checkpoint: &Checkpoint,
    against: Option<&Checkpoint>,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Diagnosis> {
    let mut originals = against.map(originals).unwrap_or_default();
    let mut units = Vec::new();
    for tensor in Ownership::of(checkpoint).tensors() {
        let original = match &tensor.logical {
            Some(Ok(Logical::Packed(packed))) => original(against, &mut originals, packed.name)?,
            _ => None,
        };
        units.push(TensorCheck { tensor, original });
    }
    let devices = device.workers(0).map_err(Error::Device)?;
    let checked = check_all(&units, [Some(checkpoint), against], &devices, progress)?;
    let mut diagnosis = Diagnosis { findings: checked.into_iter().flatten().collect(), ..Default::default() };
    let (mut packed, mut plain) = (Vec::new(), Vec::new());
    for TensorCheck { tensor, .. } in units {
        match tensor.logical {
            None => {}
            Some(Ok(Logical::Packed(tensor))) => packed.push(*tensor),
            Some(Ok(Logical::Plain(tensor))) => plain.push(tensor),
            Some(Err(_)) => plain.push(tensor.stored),
        }
    }
    diagnosis.blocks = packed.iter().map(Packed::blocks).sum();
    let w8 = plain.iter().filter(|tensor| tensor.scaling.is_some()).count();
    diagnosis.quantized = (packed.len() + w8) as u64;
    diagnosis.plain = (plain.len() - w8) as u64;
    check_global_scales(&packed, &mut diagnosis.findings);
    check_loaders(checkpoint, &packed, &mut diagnosis.findings);
    check_config(checkpoint, &packed, &plain, &mut diagnosis.findings);
    check_input_scales(checkpoint, &packed, &mut diagnosis.findings);
    Ok(diagnosis)
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

/// Checks all tensors, and returns the findings of each.
fn check_all<'env>(
    units: &'env [TensorCheck<'env>],
    [checkpoint, against]: [Option<&Checkpoint>; 2],
    devices: &'env [Device],
    progress: &mut OnProgress<'_>,
) -> Result<Vec<Vec<Finding>>> {
    let facts =
        |unit: &'env TensorCheck<'env>| (unit.tensor.stored.name, unit.tensor.stored.data.len() as u64);
    let mut meter = Meter::new(units.iter().map(|unit| facts(unit).1).sum(), progress);
    let check = |unit: &'env TensorCheck<'env>, worker: &Worker<'_, 'env>| {
        let original = unit.original.zip(against);
        let original = original.map(|((position, tensor), against)| Input::new(against, tensor, position));
        let findings = check_tensor(&unit.tensor, original.as_ref(), worker);
        checkpoint.into_iter().for_each(|checkpoint| checkpoint.forget(&unit.tensor.stored));
        if let Some((original, against)) = original.zip(against) {
            against.forget(&original.tensor);
        }
        findings
    };
    map(units, devices, &mut meter, facts, &check)
}

/// Checks one tensor.
fn check_tensor<'env>(
    tensor: &'env StoredLogical<'env>,
    original: Option<&Input<'env>>,
    worker: &Worker<'_, 'env>,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    match &tensor.logical {
        None => {}
        Some(Ok(Logical::Plain(tensor))) => check_w8_scales(tensor, &mut findings),
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
    Ok(findings)
}

impl Diagnosis {
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
