//! Errors of plans.

use std::path::PathBuf;

use microscale::{Search, Words};

use crate::reason::Reason;

/// How to go on with weights in NVFP4.
pub(crate) const DEQUANTIZE: &str = "dequantize it first, or start from the original, which rounds only once";

/// How to go on with weights in MXFP4.
pub(crate) const CONVERT: &str = "dequantize it first, or start from the original; convert --format nvfp4 makes NVFP4 of MXFP4 \
     exactly, and --requantize rounds MXFP4 again";

/// What to do instead of quantizing, by the reason to copy the largest weight.
pub(crate) fn instead(reason: Option<&Reason>) -> String {
    let advice = match reason {
        Some(Reason::Dequantized(reason) | Reason::InQ8_0(reason)) => return instead(Some(reason)),
        Some(Reason::Dtype(dtype)) => {
            return format!(
                "its weights are {dtype}, of which values cannot be computed here: take the checkpoint in bf16, or dequantize it with \
                 the software that wrote it"
            );
        }
        Some(Reason::NoGlobalScale(_)) => "--global-scale none stores nvfp4 as llama.cpp loads it, and ",
        Some(Reason::Role(_) | Reason::NotAWeight) => "`quantize --include` selects some, and ",
        _ => "",
    };
    format!("{advice}`quantize --dry-run` shows why each is copied")
}

/// An error of a plan.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The input is quantized already.
    #[error("{} has a quantization_config ({method}): the checkpoint is quantized already; {advice}", .config.display())]
    AlreadyQuantized {
        /// The config.json.
        config: PathBuf,
        /// The `quant_method` in it.
        method: String,
        /// The alternatives, which depend on how the weights are stored.
        advice: &'static str,
    },

    /// No tensor is selected.
    #[error("{} has no tensor to quantize; {advice}", .path.display())]
    NothingToQuantize {
        /// The input.
        path: PathBuf,
        /// The alternatives, which depend on why the weights are copied.
        advice: String,
    },

    /// Layers that engines fuse have recipes that one fused layer cannot have.
    #[error(
        "{}: serving engines make one layer of {first} ({}) and {second} ({}); give both the same recipe: \
         match {pattern:?} in one rule",
        .file.display(), .recipes[0], .recipes[1]
    )]
    FusedDiffer {
        /// The file of `second`.
        file: PathBuf,
        /// The weight of one layer.
        first: String,
        /// The weight of another layer.
        second: String,
        /// The recipes of both.
        recipes: Box<[String; 2]>,
        /// A pattern that matches both weights.
        pattern: String,
    },

    /// A pattern or rule copies some experts of a layer, and others are to be quantized.
    #[error(
        "{}: {copied} is copied ({why}), and {quantized} of the same layer is quantized; engines load the \
         experts of a layer alike, so apply the pattern or rule to all of them: {pattern}",
        .file.display()
    )]
    SomeExperts {
        /// The file of `copied`.
        file: PathBuf,
        /// The weight that is copied.
        copied: String,
        /// The reason for copying it.
        why: String,
        /// A weight of the same layer that is quantized.
        quantized: String,
        /// A pattern that matches the experts of the layer.
        pattern: String,
    },

    /// No choice of formats fits a budget.
    #[error(
        "no plan fits {budget}: the smallest one has {least}; raise the budget, or add formats with --formats"
    )]
    Budget {
        /// The budget.
        budget: String,
        /// The smallest budget that a plan fits.
        least: String,
    },

    /// No layer's inputs can be transformed.
    #[error(
        "{tensor} and all other tensors would be quantized without the Hadamard transform: {why}; leave it out"
    )]
    NotTransformed {
        /// A tensor.
        tensor: String,
        /// The reason.
        why: &'static str,
    },

    /// There is no format to choose.
    #[error("a plan needs a format besides unquantized; add one to --formats")]
    NoFormat,

    /// A search for global scales was requested, and the recipe leaves nothing to search.
    #[error(
        "the global scale is searched for nvfp4, where it follows from amax and block scales are searched \
         too, but {why}; choose --format nvfp4 with --search {} and without --global-scale, \
         or leave out --search-global",
        microscale::searches()
    )]
    NoGlobalSearch {
        /// The reason.
        why: String,
    },

    /// A check was requested for a search that does not look for the best scale.
    #[error(
        "only a full search looks for the best of all scales, and this is {}; choose --search full, or \
         leave out --check-search",
        .search.word()
    )]
    NothingToCheck {
        /// The search.
        search: Search,
    },
}
