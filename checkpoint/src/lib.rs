//! Reads, quantizes, dequantizes, converts and compares checkpoints: safetensors, GGUF and PyTorch
//! files, and directories in Hugging Face layout.
//!
//! [`Checkpoint::open`] maps every file and checks every header. [`Quantize::plan`] decides which
//! tensors to quantize, and [`Plan::run`] writes them. [`Convert::run`] and [`Dequantize::run`]
//! write a new checkpoint too. [`Allocate::run`] chooses a format for each tensor within a budget,
//! as a recipe. [`compare()`], [`inspect()`] and [`diagnose`] only read.
//!
//! The modules from the bottom up. Each one imports only modules above it in this table:
//!
//! | module | contents |
//! |---|---|
//! | [`calibration`] | names in the directory of a calibration |
//! | `names` | facts that follow from the names of tensors |
//! | `dtype`, `checkpoint_format`, `reason`, `sums` | dtypes, checkpoint formats, reasons for copying, sums |
//! | `error` | error types |
//! | `limits` | limits on the input |
//! | `progress`, `pipeline` | progress reports; the threads that work on a checkpoint |
//! | `gguf` | GGUF, the container of ggml and llama.cpp |
//! | `pytorch` | PyTorch files: pickles, which are never executed |
//! | `read` | input: files, tensors, typed views |
//! | `write` | output: tensor by tensor, complete or not at all |
//! | `checkpoint_formats` | how each checkpoint format stores quantized tensors, and finding them |
//! | `histogram` | the distribution of scales and codes |
//! | `plan` | what happens to each tensor: recipes, selection, global scales, importance |
//! | `quantize`, `parts`, `run` | executing a plan: as a whole, or in parts |
//! | `allocate` | choosing a format for each tensor within a budget |
//! | `dequantize`, `convert`, `compare`, `compare_format`, `inspect`, `doctor` | the other operations |
//! | `json` | results of operations as JSON |
//!
//! Files are little-endian, as safetensors requires, so the machine must be too.

#[cfg(target_endian = "big")]
compile_error!("safetensors data is mapped as it is, which needs a little-endian machine");

mod allocate;
pub mod calibration;
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
mod json;
mod limits;
mod names;
mod parts;
mod pipeline;
mod plan;
mod progress;
mod pytorch;
mod quantize;
mod read;
mod reason;
mod run;
mod sums;
mod write;

pub use allocate::allocation::{Allocated, Allocation, Alternative, Share};
pub use allocate::budget::Budget;
pub use allocate::choice::Choice;
pub use allocate::hull::Point;
pub use allocate::request::Allocate;
pub use checkpoint_format::{CheckpointFormat, Written};
pub use checkpoint_formats::ownership::logical;
pub use checkpoint_formats::packed::{Logical, Packed};
pub use compare::{Compared, Comparison, Difference, compare};
pub use compare_format::compare_format;
pub use convert::Converted;
pub use convert::requantized::Requantized;
pub use convert::request::Convert;
pub use convert::rounding::Rounding;
pub use dequantize::{Dequantize, Dequantized};
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
pub use names::layers::layer_part;
pub use names::role::{Role, role};
pub use parts::directory::{parts_directory, remove_unfinished_part};
pub use parts::merge::{Merged, merge};
pub use plan::hessians::Gptq;
pub use plan::input_scales::InputScales;
pub use plan::kept_as::KeptAs;
pub use plan::part::Part;
pub use plan::recipes::Recipes;
pub use plan::recipes::presets::{Preset, presets};
pub use plan::request::Quantize;
pub use plan::selection::Selection;
pub use plan::settings::{GlobalSetting, Settings};
pub use plan::used_recipe::{Facts, UsedRecipe};
pub use plan::warning::{FileProblem, Warning};
pub use plan::{CopyPlan, Plan, QuantizePlan, TensorPlan};
pub use progress::{OnProgress, Progress};
pub use quantize::summary::{Outcome, PartSummary, Plain, Summary, TensorSummary, Totals};
pub use read::checkpoint::{Checkpoint, OpenOptions};
pub use read::scale_grid::ScaleGrid;
pub use read::tensor::Tensor;
pub use read::values::{Values, file_dtype, float_dtype};
pub use reason::Reason;
pub use sums::Sums;
pub use write::job::Job;
pub use write::others::{Skipped, other_weights, outside_links};
pub use write::output::remove_unfinished_output;
pub use write::place::{Places, real_path};
pub use write::replacement::{replace_file, try_replacing};
pub use write::temporary::{LeftBehind, remove_unfinished};

// Compiles the examples in the README as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
