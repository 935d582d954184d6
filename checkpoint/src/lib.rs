//! Checkpoints: safetensors files and directories in Hugging Face layout, read, quantized, dequantized,
//! compared.
//!
//! [`Checkpoint::open`] maps every file and checks every header; [`Plan`] decides which tensors are
//! quantized; [`quantize`], [`dequantize`] and [`convert`] write a new checkpoint, one tensor at a time;
//! [`compare`] and [`inspect`] only read.
//!
//! From the bottom up, each importing only what stands above it in this table:
//!
//! | room | what it knows |
//! |---|---|
//! | `names` | what the names of tensors tell |
//! | `dtype`, `checkpoint_format`, `reason`, `sums` | dtypes, conventions, reasons for copying, sums |
//! | `error` | what can go wrong |
//! | `limits` | limits on what is read |
//! | `gguf` | GGUF, the container of ggml and llama.cpp |
//! | `pytorch` | PyTorch's files, which are pickles that are not run |
//! | `read` | input: which files, which tensors, typed views |
//! | `write` | output: tensor by tensor, complete or not at all |
//! | `checkpoint_formats` | checkpoint formats: what a quantized tensor becomes, and what is quantized in a file |
//! | `histogram` | how scales and codes are distributed |
//! | `plan` | what is to become of each tensor: recipes, selection, global scales, importance |
//! | `quantize`, `parts` | carrying out a plan: as a whole, or in parts |
//! | `dequantize`, `convert`, `compare`, `compare_format`, `inspect`, `doctor` | the other operations |
//!
//! Files are little-endian, as safetensors demands; so must the machine be.

#[cfg(target_endian = "big")]
compile_error!("safetensors data is mapped as it is, which needs a little-endian machine");

mod checkpoint_format;
mod checkpoint_formats;
mod compare;
mod compare_format;
mod convert;
mod dequantize;
mod doctor;
mod dtype;
mod error;
mod gguf;
mod histogram;
mod inspect;
mod limits;
mod names;
mod parts;
mod plan;
mod pytorch;
mod quantize;
mod read;
mod reason;
mod sums;
mod write;

pub use checkpoint_format::{CheckpointFormat, Written};
pub use checkpoint_formats::ownership::logical;
pub use checkpoint_formats::packed::{Logical, Packed};
pub use compare::{Compared, Comparison, Difference, compare};
pub use compare_format::compare_format;
pub use convert::requantized::Requantized;
pub use convert::rounding::Rounding;
pub use convert::{Converted, convert};
pub use dequantize::{Dequantized, dequantize};
pub use doctor::finding::{Defect, Finding};
pub use doctor::{Diagnosis, diagnose};
pub use dtype::FileDtype;
pub use dtype::ggml::GgmlType;
pub use error::directory::DirectoryError;
pub use error::file::FileError;
pub use error::format::FormatError;
pub use error::given::GivenError;
pub use error::output::OutputError;
pub use error::parts::PartsError;
pub use error::plan::PlanError;
pub use error::recipe::RecipeError;
pub use error::{Error, Result};
pub use histogram::Histogram;
pub use inspect::{Inspected, inspect};
pub use names::kept::{Kept, kept};
pub use names::layers::layer_part;
pub use parts::directory::{parts_directory, remove_unfinished_part};
pub use parts::merge::{Merged, merge};
pub use parts::part::Part;
pub use parts::{PartDone, quantize_part};
pub use plan::global_scales::GlobalScales;
pub use plan::importance::Importance;
pub use plan::input_scales::InputScales;
pub use plan::kept_as::KeptAs;
pub use plan::recipes::Recipes;
pub use plan::recipes::presets::{Preset, presets};
pub use plan::selection::Selection;
pub use plan::settings::{GlobalSetting, Settings};
pub use plan::used_recipe::{Facts, UsedRecipe};
pub use plan::{Plan, Planned};
pub use quantize::quantize;
pub use quantize::summary::{Outcome, Plain, Summary, TensorSummary, Totals};
pub use read::checkpoint::Checkpoint;
pub use read::scale_grid::ScaleGrid;
pub use read::tensor::Tensor;
pub use read::values::{Values, file_dtype, float_dtype};
pub use reason::Reason;
pub use sums::Sums;
pub use write::others::{Skipped, other_weights, outside_links};
pub use write::output::remove_unfinished_output;
pub use write::place::{Places, real_path};
pub use write::progress::{OnProgress, Progress};
pub use write::replacement::{replace_file, try_replacing};
pub use write::temporary::{LeftBehind, remove_unfinished};

// The README's examples are compiled like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
