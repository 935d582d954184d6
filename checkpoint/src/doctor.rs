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

mod against;
mod blocks;
mod config;
pub(crate) mod finding;
mod global_scales;
mod groups;
mod layers;
mod loaders;
mod patterns;
mod scaled;
mod stored;

use std::collections::HashMap;
use std::ops::ControlFlow;

use microscale::{Device, Words};
use serde_json::{Value, json};

use crate::checkpoint_formats::ownership::Ownership;
use crate::checkpoint_formats::packed::Logical;
use crate::doctor::finding::{Defect, Finding};
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
    let mut originals = Originals::new();
    if let Some(against) = against {
        let tensors = Ownership::of(against).tensors();
        originals.extend(tensors.map(|(stored, original)| (stored.name, (stored, original))));
    }
    for (tensor, logical) in Ownership::of(checkpoint).tensors() {
        if let ControlFlow::Break(()) = progress(Progress { tensor: tensor.name, done, total }) {
            return Err(Error::Interrupted);
        }
        done += tensor.data.len() as u64;
        match logical {
            None => {}
            Some(Ok(Logical::Plain(tensor))) => {
                scaled::look(&tensor, &mut diagnosis.findings);
                plain.push(tensor);
            }
            Some(Ok(Logical::Packed(tensor))) => {
                diagnosis.blocks += tensor.blocks();
                let original = against.map(|against| original(against, &mut originals, tensor.name));
                let original = original.transpose()?.flatten();
                blocks::look(&tensor, original.as_ref(), &mut diagnosis.findings)?;
                stored::look(&tensor, &mut diagnosis.findings);
                if let Some((against, original)) = against.zip(original) {
                    against::look(&tensor, &original, device, &mut diagnosis.findings)?;
                    against.forget(&original);
                }
                checkpoint.forget(&tensor.codes);
                packed.push(*tensor);
            }
            Some(Err(error)) => {
                plain.push(tensor);
                diagnosis.findings.push(Finding::of(Defect::Unreadable, &tensor, described(&error)));
            }
        }
    }
    let scaled = plain.iter().filter(|tensor| tensor.scaling.is_some()).count();
    diagnosis.quantized = (packed.len() + scaled) as u64;
    diagnosis.plain = (plain.len() - scaled) as u64;
    global_scales::look(&packed, &mut diagnosis.findings);
    loaders::look(checkpoint, &packed, &mut diagnosis.findings);
    config::look(checkpoint, &packed, &plain, &mut diagnosis.findings);
    config::inputs(checkpoint, &packed, &mut diagnosis.findings);
    Ok(diagnosis)
}

/// The stored tensors of the original checkpoint by name, each with the model's tensor that it stands
/// for.
type Originals<'a> = HashMap<&'a str, (Tensor<'a>, Option<Result<Logical<'a>>>)>;

/// Takes the original of a tensor, with its scales if it has any.
fn original<'a>(
    against: &'a Checkpoint,
    originals: &mut Originals<'a>,
    name: &str,
) -> Result<Option<Tensor<'a>>> {
    let Some((tensor, original)) = originals.remove(name) else { return Ok(None) };
    Ok(Some(match original.transpose()? {
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
