//! Results of operations as JSON, with the same keys in the program and in Python.
//!
//! **docs/json.md lists the keys.** Figures that are not finite are null.

use microscale::{ErrorStats, Words};
use serde_json::{Value, json};

use crate::allocate::allocation::Allocation;
use crate::allocate::choice::Choice;
use crate::allocate::hull::Point;
use crate::checkpoint_formats::packed::Logical;
use crate::compare::{Compared, Comparison, Difference};
use crate::convert::Converted;
use crate::dequantize::Dequantized;
use crate::inspect::Inspected;
use crate::parts::merge::Merged;
use crate::write::others::skipped_to_json;

impl Dequantized {
    /// Returns everything as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "dtype": self.dtype.word(),
            "device": self.device,
            "seconds": self.seconds,
            "dequantize_seconds": self.compute_seconds,
            "dequantized": self.dequantized.to_json(),
            "copied": self.copied.to_json(),
            "nan_scales": self.nan_scales,
            "nan": self.report.nan,
            "infinite": self.report.infinite,
            "skipped": skipped_to_json(&self.skipped),
        })
    }
}

impl Converted {
    /// Returns everything but the warnings ([`Self::misread_by`]) as JSON.
    pub fn to_json(&self) -> Value {
        let rounded = self.rounded.iter().map(|rounding| {
            json!({
                "tensor": rounding.tensor,
                "before": rounding.before.value(),
                "after": rounding.after.value(),
                "differing": rounding.differing,
                "values": rounding.values,
            })
        });
        let requantized = self.requantized.iter().map(|tensor| {
            json!({
                "tensor": tensor.tensor,
                "from": tensor.from,
                "to": tensor.to,
                "differing": tensor.differing,
                "values": tensor.values,
                "relative_squared_error": tensor.errors.relative_squared_error(),
            })
        });
        json!({
            "to": self.to.word(),
            "seconds": self.seconds,
            "converted": self.converted.to_json(),
            "in_bf16": self.in_bf16.to_json(),
            "copied": self.copied.to_json(),
            "cast": self.cast,
            "rounded": rounded.collect::<Vec<_>>(),
            "requantized": requantized.collect::<Vec<_>>(),
            "rounded_inputs": self.rounded_inputs,
            "dropped_inputs": self.dropped_inputs,
            "unscaled_inputs": self.unscaled_inputs,
            "dropped_activations": self.dropped_activations,
            "dropped_cache": self.dropped_cache,
            "skipped": skipped_to_json(&self.skipped),
        })
    }
}

impl Allocation {
    /// Returns everything but the warnings as JSON. Losses are [`Self::relative`].
    pub fn to_json(&self) -> Value {
        let point = |point: Point| {
            json!({
                "bytes": point.bytes,
                "bits": self.bits(point.bytes),
                "loss": self.relative(point.loss),
            })
        };
        let with = |mut json: Value, more: Value| {
            if let (Value::Object(members), Value::Object(more)) = (&mut json, more) {
                members.extend(more);
            }
            json
        };
        let shares = self.shares().into_iter().map(|share| {
            let sums = json!({
                "format": share.choice.word(),
                "tensors": share.tensors,
                "elements": share.elements,
            });
            with(sums, point(share.point))
        });
        let alternatives = self
            .alternatives
            .iter()
            .map(|alternative| with(json!({ "recipe": alternative.name() }), point(alternative.point)));
        let tensors = self.tensors.iter().map(|tensor| {
            let choices = self.choices.iter().zip(&tensor.points);
            let choices = choices.map(|(choice, of)| {
                json!({ "format": choice.word(), "bytes": of.bytes, "loss": self.relative(of.loss) })
            });
            json!({
                "name": tensor.name,
                "elements": tensor.elements,
                "group": tensor.group,
                "format": self.format_of(tensor).map_or(Choice::Unquantized, Choice::Format).word(),
                "choices": choices.collect::<Vec<_>>(),
            })
        });
        json!({
            "files": self.checkpoint_format.word(),
            "held_by": self.held_by.iter().map(|format| format.word()).collect::<Vec<_>>(),
            "search": self.search.word(),
            "importance": self.importance.as_ref().map(|path| path.to_string_lossy()),
            "elements": self.elements(),
            "budget_bytes": self.budget,
            "bytes": self.chosen.bytes,
            "bits": self.bits(self.chosen.bytes),
            "other_bytes": self.others,
            "loss": self.relative(self.chosen.loss),
            "relaxed_loss": self.relative(self.relaxed),
            "loss_bound": self.relative(self.bound),
            "optimal": self.is_optimal(),
            "formats": shares.collect::<Vec<_>>(),
            "alternatives": alternatives.collect::<Vec<_>>(),
            "tensors": tensors.collect::<Vec<_>>(),
            "curve": self.curve.iter().map(|corner| point(*corner)).collect::<Vec<_>>(),
        })
    }
}

impl Merged {
    /// Returns everything as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "seconds": self.seconds,
            "shards": self.shards,
            "bytes": self.bytes,
            "tensors": self.tensors,
            "left": self.left.as_ref().map(|path| path.to_string_lossy()),
            "skipped": skipped_to_json(&self.skipped),
        })
    }
}

impl Comparison {
    /// Returns everything as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "total": errors_to_json(&self.total),
            "tensors": self.tensors.iter().map(Compared::to_json).collect::<Vec<_>>(),
            "only_first": self.only_first,
            "only_second": self.only_second,
        })
    }
}

impl Compared {
    fn to_json(&self) -> Value {
        let mut json = json!({ "name": self.name, "shape": self.shape });
        match &self.difference {
            Difference::Values(errors) => json["loss"] = errors_to_json(errors),
            Difference::Bytes { same } => json["same_bytes"] = (*same).into(),
        }
        json
    }
}

impl Inspected<'_> {
    /// Returns everything but the counts of scales and codes as JSON.
    pub fn to_json(&self) -> Value {
        let stored = self.tensor.stored();
        let mut json = json!({
            "name": self.tensor.name(),
            "shape": self.tensor.shape(),
            "file": stored.file.to_string_lossy(),
        });
        match &self.tensor {
            Logical::Packed(packed) => {
                json["format"] = packed.format.word().into();
                json["checkpoint_format"] = packed.checkpoint_format().word().into();
                json["bytes"] = packed.bytes().into();
                if let Some((_, global_scale)) = packed.global_scale {
                    json["global_scale"] = global_scale.value().into();
                    json["direction"] = global_scale.direction().word().into();
                }
                if let Some(width) = packed.hadamard {
                    json["hadamard"] = width.columns().into();
                }
            }
            Logical::Plain(tensor) => {
                json["dtype"] = tensor.dtype.to_string().into();
                json["bytes"] = tensor.data.len().into();
                if let Some(scaling) = &tensor.scaling {
                    json["scale_dtype"] = scaling.dtype.to_string().into();
                    json["scale_block"] = json!(scaling.block);
                }
            }
        }
        if let Some(histogram) = &self.histogram {
            json["blocks"] = histogram.blocks().into();
            json["nan_scales"] = histogram.nan_scales().into();
            json["scale_range"] =
                histogram.scale_range().map_or(Value::Null, |(least, most)| json!([least, most]));
        }
        if let Some(error) = &self.unreadable {
            json["unreadable"] = error.to_string().into();
        }
        json
    }
}

fn errors_to_json(errors: &ErrorStats) -> Value {
    json!({
        "relative_squared_error": errors.relative_squared_error(),
        "sqnr_db": errors.sqnr_db(),
        "max_abs_error": errors.max_abs_error(),
        "cosine": errors.cosine(),
        "left_out": errors.non_finite(),
    })
}
