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

/// The original's tensor of a name, with its scales if it has any.
fn original<'a>(against: &'a Checkpoint, name: &str) -> Result<Option<Tensor<'a>>> {
    let Some(tensor) = against.tensor(name) else { return Ok(None) };
    Ok(Some(match resolve(against, tensor)? {
        Some(Logical::Plain(tensor)) => tensor,
        Some(Logical::Packed(packed)) => packed.scaled(against).unwrap_or(tensor),
        None => tensor,
    }))
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
