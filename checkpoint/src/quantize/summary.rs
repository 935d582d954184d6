//! The summary of quantizing a checkpoint: for every tensor, and in total.

use std::path::PathBuf;
use std::{fmt, io};

use microscale::{BlockError, ErrorStats, Format, GlobalScale, OutputLoss, Report, Words};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use crate::dtype::FileDtype;
use crate::histogram::Histogram;
use crate::plan::used_recipe::{UsedRecipe, by_format, recipes_to_json};
use crate::quantize::details::{Details, WorstBlock};
use crate::read::tensor::Tensor;
use crate::reason::Reason;
use crate::sums::Sums;
use crate::write::others::{Skipped, skipped_to_json};

/// The outcome of quantizing a checkpoint.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Summary {
    /// The recipes of the plan, the one for the most elements first.
    pub recipes: Vec<UsedRecipe>,
    /// The device that it was done on.
    pub device: String,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<TensorSummary>,
    /// Other entries of the directory that were not copied.
    pub skipped: Vec<Skipped>,
    /// Time for everything, reading and writing included.
    pub seconds: f64,
    /// Seconds during which at least one tensor was being quantized.
    pub quantize_seconds: f64,
    /// Blocks whose scales were compared with all others, if that was wanted.
    pub checked_blocks: Option<u64>,
    /// The part of the shards that was made, if it was not all of them.
    pub part: Option<PartSummary>,
    /// Details of all tensors; empty unless the plan collects details.
    pub(crate) details: Details,
}

/// The shards of a part.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartSummary {
    /// Shards that were made now.
    pub made: usize,
    /// Shards that were finished before.
    pub kept: usize,
    /// All shards of the checkpoint.
    pub of: usize,
    /// The directory of the shards.
    pub directory: PathBuf,
}

/// The outcome of one tensor.
#[derive(Clone, Debug)]
#[non_exhaustive]
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
    /// The index among the summary's recipes of the one it was quantized by, if it was and there
    /// are several.
    pub recipe: Option<usize>,
    /// Counts of values that are not finite, of codes under scales that stay out of four bits.
    pub report: Report,
    /// The outcome.
    pub outcome: Outcome,
}

/// The outcome of a tensor.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Not quantized, and why: copied, but for codes under scales, whose values are written.
    Copied(Reason),
    /// Quantized.
    Quantized {
        /// The format.
        format: Format,
        /// Counts of what could not be kept.
        report: Report,
        /// The loss.
        errors: ErrorStats,
        /// With GPTQ: tr(R·H·Rᵀ), where R is the loss and H the damped Hessian.
        output_error: Option<f64>,
        /// NVFP4's global scale in the numerics' direction; `None` if there is none.
        global_scale: Option<GlobalScale>,
        /// Time from when the values were where the device works until there were codes and scales,
        /// others being worked at meanwhile. Of tensors that share a global scale, the first one's
        /// includes the search for the amax, and for the global scale, of all.
        seconds: f64,
        /// The figures of plain quantization; `None` unless scales were searched or GPTQ ran.
        plain: Option<Box<Plain>>,
    },
}

/// A tensor quantized with the scales of the numerics, for comparison with searched ones.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Plain {
    /// The loss.
    pub errors: ErrorStats,
    /// With GPTQ: the error in the layer's outputs.
    pub output: Option<OutputLoss>,
    /// NVFP4's global scale in the numerics' direction; `None` if there is none.
    pub global_scale: Option<GlobalScale>,
}

/// Sums over the tensors of a checkpoint.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Totals {
    /// Sums over the tensors that were quantized.
    pub quantized: Sums,
    /// Sums over the tensors that were copied.
    pub copied: Sums,
    /// Blocks of the tensors that were quantized.
    pub blocks: u64,
    /// Counts of what could not be kept.
    pub report: Report,
    /// The loss.
    pub errors: ErrorStats,
    /// The loss of plain scales, in all tensors that were quantized; `None` unless scales were
    /// searched.
    pub plain: Option<ErrorStats>,
    /// With GPTQ, the errors in the outputs of its layers: GPTQ's, and plain quantization's.
    /// The energy of both is the original outputs'.
    pub outputs: Option<[OutputLoss; 2]>,
    /// Blocks of the tensors whose scales were searched.
    pub searched_blocks: u64,
    /// Tensors that a search gave another global scale than the numerics'.
    pub rescaled_tensors: u64,
    /// Seconds during which at least one tensor was being quantized.
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
            bytes_before: tensor.bytes() as u64,
            bytes_after,
            recipe: None,
            report: Report::default(),
            outcome,
        }
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
            totals.report += tensor.report;
            let sums = match &tensor.outcome {
                Outcome::Copied(_) => &mut totals.copied,
                Outcome::Quantized { format, report, errors, output_error, global_scale, plain, .. } => {
                    let blocks = tensor.elements / format.block() as u64;
                    totals.blocks += blocks;
                    totals.report += *report;
                    totals.errors += *errors;
                    plain_errors += plain.as_ref().map_or(*errors, |plain| plain.errors);
                    if let Some(plain) = plain {
                        searched = true;
                        totals.searched_blocks += blocks;
                        totals.rescaled_tensors += u64::from(plain.global_scale != *global_scale);
                        if let Some((error, output)) = output_error.zip(plain.output) {
                            let [gptq, plain] = totals.outputs.get_or_insert_default();
                            gptq.error += error;
                            plain.error += output.error;
                            gptq.energy += output.energy;
                            plain.energy += output.energy;
                        }
                    }
                    &mut totals.quantized
                }
            };
            sums.add(tensor.elements, tensor.bytes_before, tensor.bytes_after);
        }
        totals.plain = searched.then_some(plain_errors);
        totals
    }

    /// Returns whether one of the recipes has a fact of this name.
    pub fn has_fact(&self, name: &str) -> bool {
        self.recipes.iter().any(|used| used.facts.iter().any(|(known, _)| *known == name))
    }

    /// The formats, the one for the most elements first, each with the sums over its tensors.
    pub fn formats(&self) -> Vec<(Format, Sums)> {
        by_format(&self.recipes)
    }

    /// Returns everything as JSON.
    ///
    /// Figures that are not finite are null, such as the SQNR of a perfect copy, or any figure of a
    /// tensor whose values were all left out.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Writes the text of [`Self::to_json`], indented, in memory that does not depend on the number
    /// of tensors.
    ///
    /// # Errors
    /// The errors of `to`.
    pub fn write_json(&self, to: &mut dyn fmt::Write) -> fmt::Result {
        serde_json::to_writer_pretty(Text(to), self).map_err(|_| fmt::Error)
    }

    /// The members of the JSON, but for the tensors.
    fn members(&self) -> Map<String, Value> {
        let totals = self.totals();
        let mut loss = loss_to_json(&totals.report, &totals.errors, totals.plain.as_ref());
        if let Some(outputs) = &totals.outputs {
            outputs_to_json(&mut loss, outputs);
        }
        let mut json = recipes_to_json(&self.recipes);
        let figures = json!({
            "device": self.device,
            "seconds": self.seconds,
            "quantize_seconds": totals.seconds,
            "bytes_per_second": totals.bytes_per_second(),
            "quantized": totals.quantized.to_json(),
            "copied": totals.copied.to_json(),
            "total": totals.quantized.with(totals.copied).to_json(),
            "loss": loss,
            TENSORS: null,
            "skipped": skipped_to_json(&self.skipped),
        });
        if let Value::Object(figures) = figures {
            json.extend(figures);
        }
        if let Some(blocks) = self.checked_blocks {
            json.insert("checked_blocks".into(), blocks.into());
        }
        if let Some(PartSummary { made, kept, of, directory }) = &self.part {
            let directory = directory.to_string_lossy();
            json.insert(
                "part".into(),
                json!({ "made": made, "kept": kept, "of": of, "directory": directory }),
            );
        }
        json
    }
}

/// The member of the JSON that lists the tensors.
const TENSORS: &str = "tensors";

impl Serialize for Summary {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        for (key, value) in self.members() {
            match key.as_str() {
                TENSORS => map.serialize_entry(TENSORS, &Tensors(&self.tensors))?,
                _ => map.serialize_entry(&key, &value)?,
            }
        }
        map.end()
    }
}

/// Tensors whose JSON is made one by one.
struct Tensors<'a>(&'a [TensorSummary]);

impl Serialize for Tensors<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(TensorSummary::to_json))
    }
}

/// Takes bytes of text.
struct Text<'a>(&'a mut dyn fmt::Write);

impl io::Write for Text<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = str::from_utf8(bytes).map_err(io::Error::other)?;
        self.0.write_str(text).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
            Outcome::Copied(reason) => {
                json["copied"] = reason.to_string().into();
                if self.report.first_non_finite.is_some() {
                    json["nan"] = self.report.nan.into();
                    json["infinite"] = self.report.infinite.into();
                }
            }
            Outcome::Quantized { format, report, errors, output_error, global_scale, seconds, plain } => {
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
                if let Some((error, output)) = output_error.zip(plain.as_ref().and_then(|plain| plain.output))
                {
                    outputs_to_json(&mut json["loss"], &[OutputLoss { error, ..output }, output]);
                }
            }
        }
        json
    }
}

impl Summary {
    /// Counts of each scale byte and each code in all tensors of a format, for each format; empty
    /// unless details were collected.
    pub fn histograms(&self) -> Vec<Histogram> {
        self.details.histograms()
    }

    /// The worst blocks of all tensors, `most` at most, each with its tensor: by the squared error
    /// as a share of the block's energy.
    pub fn worst_relative(&self, most: usize) -> Vec<(&TensorSummary, &BlockError)> {
        self.worst(most, &self.details.relative)
    }

    /// The worst blocks of all tensors, `most` at most, each with its tensor: by the squared error.
    pub fn worst_absolute(&self, most: usize) -> Vec<(&TensorSummary, &BlockError)> {
        self.worst(most, &self.details.absolute)
    }

    fn worst<'s>(
        &'s self,
        most: usize,
        blocks: &'s [WorstBlock],
    ) -> Vec<(&'s TensorSummary, &'s BlockError)> {
        let of = |name: &str| self.tensors.iter().find(|tensor| tensor.name == name);
        blocks.iter().take(most).filter_map(|block| Some((of(&block.tensor)?, &block.block))).collect()
    }
}

/// Adds the errors in layers' outputs: GPTQ's, and plain quantization's.
fn outputs_to_json(loss: &mut Value, [gptq, plain]: &[OutputLoss; 2]) {
    loss["output_error"] = gptq.relative().into();
    loss["plain_output_error"] = plain.relative().into();
}

fn loss_to_json(report: &Report, errors: &ErrorStats, plain: Option<&ErrorStats>) -> Value {
    let mut json = json!({
        "relative_squared_error": errors.relative_squared_error(),
        "sqnr_db": errors.sqnr_db(),
        "max_abs_error": errors.max_abs_error(),
        "cosine": errors.cosine(),
        "left_out": errors.non_finite(),
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
