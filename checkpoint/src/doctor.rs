//! Auditing a quantized checkpoint: defects that will make a model wrong, their places, and what helps.
//!
//! | file | what it looks at |
//! |---|---|
//! | `finding` | everything that can be wrong, what it does and what helps |
//! | `blocks` | scale bytes and codes, block by block |
//! | `scaled` | the scales of codes of eight bits |
//! | `stored` | dtypes and shapes that are read, and should not be so |
//! | `global_scales` | NVFP4's: direction, and layers that serving engines fuse |
//! | `loaders` | what loaders are known to read wrongly, or to refuse, however right it is |
//! | `against` | values, given the checkpoint that was quantized: the order of nibbles among them |
//! | `config`, `layers` | what config.json says; which layers it says are quantized, and how |
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

use std::ops::ControlFlow;

use microscale::{Device, Words};
use serde_json::{Value, json};

use crate::checkpoint_formats::packed::{Logical, resolve};
use crate::doctor::blocks::check_blocks;
use crate::doctor::config::{check_config, check_input_scales};
use crate::doctor::finding::{Defect, Finding};
use crate::doctor::global_scales::check_global_scales;
use crate::doctor::loaders::check_loaders;
use crate::doctor::original::check_against_original;
use crate::doctor::stored::check_stored;
use crate::doctor::w8_scales::check_w8_scales;
use crate::error::{Error, Result};
use crate::read::checkpoint::Checkpoint;
use crate::read::tensor::Tensor;
use crate::write::progress::{OnProgress, Progress};

/// The result of examining a checkpoint.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Everything that is wrong, tensor by tensor.
    pub findings: Vec<Finding>,
    /// Quantized tensors that were looked at.
    pub quantized: u64,
    /// Other tensors.
    pub plain: u64,
    /// Blocks that were looked at.
    pub blocks: u64,
}

/// Looks at every tensor of a checkpoint, at what its layers have in common, and at its config.
///
/// Given the checkpoint that was quantized, also compares values with its tensors of the same names. Wrong
/// files are findings where a tensor is to blame; a checkpoint that cannot be opened at all is an error of
/// [`Checkpoint::open`].
///
/// # Errors
/// [`Error::Interrupted`], and what keeps `against` from being read.
pub fn diagnose(
    checkpoint: &Checkpoint,
    against: Option<&Checkpoint>,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Diagnosis> {
    let mut diagnosis = Diagnosis::default();
    let total = checkpoint.tensors().map(|tensor| tensor.data.len() as u64).sum();
    let (mut packed, mut plain, mut done) = (Vec::new(), Vec::new(), 0);
    for tensor in checkpoint.tensors() {
        if let ControlFlow::Break(()) = progress(Progress { tensor: tensor.name, done, total }) {
            return Err(Error::Interrupted);
        }
        done += tensor.data.len() as u64;
        match resolve(checkpoint, tensor) {
            Ok(None) => {}
            Ok(Some(Logical::Plain(tensor))) => {
                check_w8_scales(&tensor, &mut diagnosis.findings);
                plain.push(tensor);
            }
            Ok(Some(Logical::Packed(tensor))) => {
                diagnosis.blocks += tensor.blocks();
                let original = against.map(|against| original(against, tensor.name)).transpose()?.flatten();
                check_blocks(&tensor, original.as_ref(), &mut diagnosis.findings)?;
                check_stored(&tensor, &mut diagnosis.findings);
                if let Some((against, original)) = against.zip(original) {
                    check_against_original(&tensor, &original, device, &mut diagnosis.findings)?;
                    against.forget(&original);
                }
                checkpoint.forget(&tensor.codes);
                packed.push(*tensor);
            }
            Err(error) => {
                plain.push(tensor);
                diagnosis.findings.push(Finding::of(Defect::Unreadable, &tensor, described(&error)));
            }
        }
    }
    let w8 = plain.iter().filter(|tensor| tensor.scaling.is_some()).count();
    diagnosis.quantized = (packed.len() + w8) as u64;
    diagnosis.plain = (plain.len() - w8) as u64;
    check_global_scales(&packed, &mut diagnosis.findings);
    check_loaders(checkpoint, &packed, &mut diagnosis.findings);
    check_config(checkpoint, &packed, &plain, &mut diagnosis.findings);
    check_input_scales(checkpoint, &packed, &mut diagnosis.findings);
    Ok(diagnosis)
}

/// The tensor of a name with the scales that it is under, if there are any.
fn original<'a>(against: &'a Checkpoint, name: &str) -> Result<Option<Tensor<'a>>> {
    let Some(tensor) = against.tensor(name) else { return Ok(None) };
    Ok(Some(match resolve(against, tensor)? {
        Some(Logical::Plain(tensor)) => tensor,
        Some(Logical::Packed(packed)) => packed.scaled(against).unwrap_or(tensor),
        None => tensor,
    }))
}

impl Diagnosis {
    /// All of it as JSON.
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

/// An error with its cause, in a line.
fn described(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
