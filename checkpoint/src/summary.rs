//! What happened to a checkpoint that was quantized: for every tensor, and in total.

use std::path::PathBuf;

use microscale::{ErrorStats, Format, GlobalScale, Report, Words};
use serde_json::{Map, Value, json};

use crate::details::Details;
use crate::dtype::FileDtype;
use crate::others::Skipped;
use crate::read::Tensor;
use crate::selection::Reason;
use crate::treatment::{Facts, UsedRecipe, by_format, common};

/// What happened to a checkpoint.
#[derive(Clone, Debug)]
pub struct Summary {
    /// How it was quantized: the recipes of the plan, the one for the most elements first.
    pub recipes: Vec<UsedRecipe>,
    /// On what.
    pub device: String,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<TensorSummary>,
    /// What else was in the directory and not copied.
    pub skipped: Vec<Skipped>,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
    /// Time in which anything was being quantized.
    pub quantize_seconds: f64,
    /// Blocks whose scales were compared with all others, if that was wanted.
    pub checked_blocks: Option<u64>,
}

/// What happened to one tensor.
#[derive(Clone, Debug)]
pub struct TensorSummary {
    /// Its name in the input.
    pub name: String,
    /// The file that it is in.
    pub file: PathBuf,
    /// Its dtype in the input.
    pub dtype: FileDtype,
    /// Its sizes in the input.
    pub shape: Vec<usize>,
    /// Its elements.
    pub elements: u64,
    /// Bytes in the input.
    pub bytes_before: u64,
    /// Bytes in the output.
    pub bytes_after: u64,
    /// Which of the summary's recipes it was quantized by, if it was and there are several.
    pub recipe: Option<usize>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a tensor.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Copied, and why.
    Copied(Reason),
    /// Quantized.
    Quantized {
        /// The format.
        format: Format,
        /// Counts of what could not be kept.
        report: Report,
        /// The loss.
        errors: ErrorStats,
        /// NVFP4's global scale in the convention's direction; `None` if there is none.
        global_scale: Option<GlobalScale>,
        /// Time from when the values were where the device works until there were codes and scales, others being worked
        /// at meanwhile. Of tensors that share a global scale, the first one's includes the search for the amax, and
        /// for the global scale, of all.
        seconds: f64,
        /// What plain scales would have been like; `None` unless scales were searched.
        plain: Option<Plain>,
        /// A closer look; `None` unless the plan collects details.
        details: Option<Box<Details>>,
    },
}

/// A tensor quantized with the scales of the convention, for comparison with searched ones.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    /// The loss.
    pub errors: ErrorStats,
    /// NVFP4's global scale in the convention's direction; `None` if there is none.
    pub global_scale: Option<GlobalScale>,
}

/// Sums over tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Tensors.
    pub tensors: u64,
    /// Elements.
    pub elements: u64,
    /// Bytes in the input.
    pub bytes_before: u64,
    /// Bytes in the output.
    pub bytes_after: u64,
}

/// Sums over the tensors of a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Of the tensors that were quantized.
    pub quantized: Sums,
    /// Of those that were copied.
    pub copied: Sums,
    /// Blocks of the tensors that were quantized.
    pub blocks: u64,
    /// Counts of what could not be kept.
    pub report: Report,
    /// The loss.
    pub errors: ErrorStats,
    /// The loss of plain scales, in all tensors that were quantized; `None` unless scales were searched.
    pub plain: Option<ErrorStats>,
    /// Blocks of the tensors whose scales were searched.
    pub searched_blocks: u64,
    /// Tensors that a search gave another global scale than the convention's.
    pub rescaled_tensors: u64,
    /// Time in which anything was being quantized.
    pub seconds: f64,
}

impl TensorSummary {
    pub(crate) fn new(tensor: &Tensor<'_>, bytes_after: u64, outcome: Outcome) -> Self {
        Self {
            name: tensor.name.into(),
            file: tensor.file.into(),
            dtype: tensor.dtype,
            shape: tensor.shape.into(),
            elements: tensor.elements(),
            bytes_before: tensor.data.len() as u64,
            bytes_after,
            recipe: None,
            outcome,
        }
    }
}

impl Sums {
    /// Counts a tensor.
    pub fn add(&mut self, elements: u64, bytes_before: u64, bytes_after: u64) {
        self.tensors += 1;
        self.elements += elements;
        self.bytes_before += bytes_before;
        self.bytes_after += bytes_after;
    }

    /// Both together.
    pub fn with(self, other: Self) -> Self {
        Self {
            tensors: self.tensors + other.tensors,
            elements: self.elements + other.elements,
            bytes_before: self.bytes_before + other.bytes_before,
            bytes_after: self.bytes_after + other.bytes_after,
        }
    }

    /// How many times smaller the output is; 1 if there is nothing.
    pub fn ratio(&self) -> f64 {
        if self.bytes_after == 0 { 1.0 } else { self.bytes_before as f64 / self.bytes_after as f64 }
    }

    fn to_json(self) -> Value {
        json!({
            "tensors": self.tensors,
            "elements": self.elements,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "ratio": self.ratio(),
        })
    }
}

impl Totals {
    /// Bytes read and written by quantizing, a second.
    pub fn bytes_per_second(&self) -> f64 {
        (self.quantized.bytes_before + self.quantized.bytes_after) as f64
            / self.seconds.max(f64::MIN_POSITIVE)
    }
}

impl Summary {
    /// The sums over all tensors.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals { seconds: self.quantize_seconds, ..Totals::default() };
        let (mut plain_errors, mut searched) = (ErrorStats::default(), false);
        for tensor in &self.tensors {
            let sums = match &tensor.outcome {
                Outcome::Copied(_) => &mut totals.copied,
                Outcome::Quantized { format, report, errors, global_scale, plain, .. } => {
                    let blocks = tensor.elements / format.block() as u64;
                    totals.blocks += blocks;
                    totals.report += *report;
                    totals.errors += *errors;
                    plain_errors += plain.map_or(*errors, |plain| plain.errors);
                    if let Some(plain) = plain {
                        searched = true;
                        totals.searched_blocks += blocks;
                        totals.rescaled_tensors += u64::from(plain.global_scale != *global_scale);
                    }
                    &mut totals.quantized
                }
            };
            sums.add(tensor.elements, tensor.bytes_before, tensor.bytes_after);
        }
        totals.plain = searched.then_some(plain_errors);
        totals
    }

    /// Whether recipes say so: the name of one of their facts.
    pub fn has_fact(&self, name: &str) -> bool {
        self.recipes.iter().any(|used| used.facts.iter().any(|(known, _)| *known == name))
    }

    /// The formats, the one for the most elements first, each with the sums over its tensors.
    pub fn formats(&self) -> Vec<(Format, Sums)> {
        by_format(&self.recipes)
    }

    /// All of it as JSON. Figures that are not finite (the SQNR of a perfect copy, say) are null.
    pub fn to_json(&self) -> Value {
        let totals = self.totals();
        let mut json = recipes_to_json(&self.recipes);
        let figures = json!({
            "device": self.device,
            "seconds": self.seconds,
            "quantize_seconds": totals.seconds,
            "bytes_per_second": totals.bytes_per_second(),
            "quantized": totals.quantized.to_json(),
            "copied": totals.copied.to_json(),
            "total": totals.quantized.with(totals.copied).to_json(),
            "loss": loss_to_json(&totals.report, &totals.errors, totals.plain.as_ref()),
            "tensors": self.tensors.iter().map(TensorSummary::to_json).collect::<Vec<_>>(),
            "skipped": self.skipped.iter().map(|skipped| {
                json!({ "path": skipped.path.to_string_lossy(), "why": skipped.why })
            }).collect::<Vec<_>>(),
        });
        if let Value::Object(figures) = figures {
            json.extend(figures);
        }
        if let Some(blocks) = self.checked_blocks {
            json.insert("checked_blocks".into(), blocks.into());
        }
        json.into()
    }
}

impl TensorSummary {
    pub(crate) fn to_json(&self) -> Value {
        let mut json = json!({
            "name": self.name,
            "file": self.file.to_string_lossy(),
            "dtype": self.dtype.to_string(),
            "shape": self.shape,
            "elements": self.elements,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        });
        match &self.outcome {
            Outcome::Copied(reason) => json["copied"] = reason.to_string().into(),
            Outcome::Quantized { format, report, errors, global_scale, seconds, plain, .. } => {
                json["copied"] = Value::Null;
                json["format"] = format.word().into();
                if let Some(recipe) = self.recipe {
                    json["recipe"] = recipe.into();
                }
                if let Some(scale) = global_scale {
                    json["global_scale"] = scale.value().into();
                }
                json["seconds"] = (*seconds).into();
                json["loss"] = loss_to_json(report, errors, plain.as_ref().map(|plain| &plain.errors));
            }
        }
        json
    }
}

/// What recipes have in common as the first entries of a JSON object, and if there are several each of them.
pub(crate) fn recipes_to_json(recipes: &[UsedRecipe]) -> Map<String, Value> {
    let object = |facts: &Facts| -> Map<String, Value> {
        facts.iter().map(|(name, fact)| (name.to_string(), fact.as_str().into())).collect()
    };
    let mut json = object(&common(recipes));
    if recipes.len() > 1 {
        let each = recipes.iter().map(|used| {
            let mut json = object(&used.facts);
            json.insert("used_for".into(), used.sums.to_json());
            Value::Object(json)
        });
        json.insert("recipes".into(), each.collect());
    }
    json
}

fn loss_to_json(report: &Report, errors: &ErrorStats, plain: Option<&ErrorStats>) -> Value {
    let mut json = json!({
        "relative_squared_error": errors.relative_squared_error(),
        "sqnr_db": errors.sqnr_db(),
        "max_abs_error": errors.max_abs_error(),
        "cosine": errors.cosine(),
        "nan": report.nan,
        "infinite": report.infinite,
        "clipped_blocks": report.clipped_blocks,
        "flushed_blocks": report.flushed_blocks,
        "saturated_scales": report.saturated_scales,
    });
    if let Some(plain) = plain {
        json["plain_relative_squared_error"] = plain.relative_squared_error().into();
        json["rescaled_blocks"] = report.rescaled_blocks.into();
        json["tried_scales"] = report.tried_scales.into();
    }
    json
}
