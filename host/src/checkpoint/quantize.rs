//! Quantizing a checkpoint.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Instant;

use safetensors::Dtype as FileDtype;
use serde_json::{Map, Value, json};

use super::compressed_tensors;
use super::error::{Error, Result};
use super::read::{Checkpoint, Tensor};
use super::rewrite::{OnProgress, Rewrite, rewrite, unchanged};
use super::selection::{Reason, Selection};
use super::summary::{Outcome, Summary, TensorSummary};
use super::values::with_values;
use super::write::{Outline, Writer};
use crate::device::Device;
use crate::recipe::Words;
use crate::{ErrorStats, Quantized, Recipe, Shape};

/// What is to become of each tensor of a checkpoint.
pub struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    recipe: Recipe,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<Planned<'a>>,
}

/// What is to become of one tensor.
#[derive(Clone, Debug)]
pub struct Planned<'a> {
    /// The tensor.
    pub tensor: Tensor<'a>,
    /// Why it is copied; `None` if it is quantized.
    pub reason: Option<Reason>,
    /// Bytes of what takes its place.
    pub bytes_after: u64,
}

impl<'a> Plan<'a> {
    /// Decides about every tensor and makes sure that the output's names are free.
    ///
    /// # Errors
    /// [`Error::AlreadyQuantized`], [`Error::NameTaken`].
    pub fn new(checkpoint: &'a Checkpoint, selection: &Selection, recipe: Recipe) -> Result<Self> {
        if let Some(config) = &checkpoint.config
            && let Some(method) = compressed_tensors::configured_method(&config.json)
        {
            return Err(Error::AlreadyQuantized { config: config.file.clone(), method });
        }
        let mut tensors = Vec::new();
        for tensor in checkpoint.tensors() {
            let reason = selection.reason_to_copy(&tensor);
            let bytes_after = outlines(&tensor, reason.is_none(), &recipe).iter().map(Outline::bytes).sum();
            tensors.push(Planned { tensor, reason, bytes_after });
        }
        let plan = Self { checkpoint, recipe, tensors };
        plan.check_names()?;
        Ok(plan)
    }

    /// How tensors are to be quantized.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// How many tensors are to be quantized.
    pub fn quantized(&self) -> usize {
        self.tensors.iter().filter(|planned| planned.reason.is_none()).count()
    }

    /// What is to become of each tensor, as JSON.
    pub fn to_json(&self) -> Value {
        let tensors = self.tensors.iter().map(|Planned { tensor, reason, bytes_after }| {
            json!({
                "name": tensor.name,
                "file": tensor.file.to_string_lossy(),
                "dtype": tensor.dtype.to_string(),
                "shape": tensor.shape,
                "elements": tensor.elements(),
                "bytes_before": tensor.data.len(),
                "bytes_after": bytes_after,
                "copied": reason.as_ref().map(Reason::to_string),
            })
        });
        json!({ "format": self.recipe.format.word(), "tensors": tensors.collect::<Vec<_>>() })
    }

    fn check_names(&self) -> Result<()> {
        let mut taken: HashSet<_> =
            self.tensors.iter().map(|planned| planned.tensor.name.to_string()).collect();
        for Planned { tensor, .. } in self.tensors.iter().filter(|planned| planned.reason.is_none()) {
            for name in compressed_tensors::names(tensor.name) {
                if !taken.insert(name.clone()) {
                    return Err(Error::NameTaken {
                        file: tensor.file.into(),
                        tensor: tensor.name.into(),
                        name,
                    });
                }
            }
        }
        Ok(())
    }

    /// The linear layers that the output's config must tell loaders to ignore.
    fn ignored(&self, config: &Map<String, Value>) -> Vec<String> {
        let copied = self.tensors.iter().filter_map(|Planned { tensor, reason, .. }| {
            reason.as_ref().and_then(|reason| compressed_tensors::ignored_module(tensor, reason))
        });
        let mut modules: Vec<_> =
            copied.chain(compressed_tensors::tied_head(config, self.checkpoint)).collect();
        modules.sort();
        modules
    }
}

/// Carries out a plan: writes the quantized checkpoint to `out`, a file or a directory like the input.
///
/// One tensor is in memory at a time. Output is written under a temporary name next to `out` and renamed at the end, so
/// that a failure or an interruption leaves nothing behind. The same bytes come from every device.
///
/// # Errors
/// [`Error::NothingToQuantize`], [`Error::Tensor`] (among them non-finite values, if the recipe refuses them), and
/// everything about writing.
pub fn quantize(
    plan: &Plan<'_>,
    out: &Path,
    device: &Device,
    progress: &mut OnProgress<'_>,
) -> Result<Summary> {
    let start = Instant::now();
    if plan.quantized() == 0 {
        return Err(Error::NothingToQuantize { path: plan.checkpoint.path.clone() });
    }
    let planned = plan.tensors.iter().map(|planned| (planned.tensor.name, planned)).collect();
    let mut work = Quantizer { plan, planned, device, done: Vec::new() };
    let skipped = rewrite(plan.checkpoint, out, &mut work, progress)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(Summary { recipe: plan.recipe, device: device.to_string(), tensors: work.done, skipped, seconds })
}

/// What takes a tensor's place.
fn outlines(tensor: &Tensor<'_>, quantized: bool, recipe: &Recipe) -> Vec<Outline> {
    if !quantized {
        return vec![unchanged(tensor)];
    }
    let names = compressed_tensors::names(tensor.name);
    let shapes = compressed_tensors::shapes(tensor.shape, recipe.format);
    let outline = |(name, shape)| Outline { name, dtype: FileDtype::U8, shape };
    names.into_iter().zip(shapes).map(outline).collect()
}

struct Quantizer<'a> {
    plan: &'a Plan<'a>,
    planned: HashMap<&'a str, &'a Planned<'a>>,
    device: &'a Device,
    done: Vec<TensorSummary>,
}

impl Quantizer<'_> {
    fn reason(&self, tensor: &Tensor<'_>) -> Option<&Reason> {
        self.planned.get(tensor.name).and_then(|planned| planned.reason.as_ref())
    }

    /// Quantizes a tensor and measures the loss.
    fn quantize(&self, tensor: &Tensor<'_>) -> Result<(Quantized, Outcome)> {
        let error = |source| Error::tensor(tensor.file, tensor.name, source);
        let (rows, cols) = tensor.matrix();
        let shape = Shape::new(rows, cols);
        // Only tensors of these dtypes are selected.
        let values = tensor.values().ok_or_else(|| Error::Packed {
            file: tensor.file.into(),
            tensor: tensor.name.into(),
            why: format!("{} cannot be quantized", tensor.dtype),
        })?;
        with_values!(&values, slice => {
            let start = Instant::now();
            let quantized = self.device.quantize(slice, shape, &self.plan.recipe).map_err(error)?;
            let seconds = start.elapsed().as_secs_f64();
            let errors = ErrorStats::of_quantized(slice, shape, &quantized.tensor).map_err(error)?;
            let outcome = Outcome::Quantized { report: quantized.report, errors, seconds };
            Ok((quantized, outcome))
        })
    }
}

impl Rewrite for Quantizer<'_> {
    fn outlines(&self, tensor: &Tensor<'_>) -> Vec<Outline> {
        outlines(tensor, self.reason(tensor).is_none(), &self.plan.recipe)
    }

    fn write(&mut self, tensor: &Tensor<'_>, writer: &mut Writer) -> Result<()> {
        let (bytes_after, outcome) = if let Some(reason) = self.reason(tensor) {
            writer.write(tensor.name, tensor.data)?;
            (tensor.data.len(), Outcome::Copied(reason.clone()))
        } else {
            let (quantized, outcome) = self.quantize(tensor)?;
            let [codes, scales] = compressed_tensors::names(tensor.name);
            writer.write(&codes, quantized.tensor.codes())?;
            writer.write(&scales, quantized.tensor.scales())?;
            (quantized.tensor.bytes(), outcome)
        };
        self.done.push(TensorSummary::new(tensor, bytes_after as u64, outcome));
        Ok(())
    }

    fn config(&self, config: &mut Map<String, Value>) {
        let ignored = self.plan.ignored(config);
        compressed_tensors::add_config(config, &ignored);
    }
}
