//! Errors of plans.

use std::path::PathBuf;

use microscale::{Search, Words};

/// An error of a plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The input is quantized already.
    #[error(
        "{} has a quantization_config ({method}): the checkpoint is quantized already; dequantize it first, \
         or start from the original; convert --format nvfp4 makes NVFP4 of MXFP4 exactly, and --requantize rounds MXFP4 again",
        .config.display()
    )]
    AlreadyQuantized {
        /// The config.json.
        config: PathBuf,
        /// The `quant_method` in it.
        method: String,
    },

    /// No tensor is selected.
    #[error(
        "{} has no tensor to quantize; select some with --include, and see with --dry-run why each is copied",
        .path.display()
    )]
    NothingToQuantize {
        /// The input.
        path: PathBuf,
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

    /// A search for global scales was requested, and the recipe leaves nothing to search.
    #[error(
        "the global scale is searched for nvfp4, where it follows from amax and block scales are searched \
         too, but {why}; choose --format nvfp4 with --search four-six, window or full and without \
         --global-scale, or leave out --search-global"
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
