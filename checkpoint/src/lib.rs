//! Checkpoints: safetensors files and directories in Hugging Face layout, read, quantized, dequantized, compared.
//!
//! [`Checkpoint::open`] maps every file and checks every header; [`Plan`] decides which tensors are quantized;
//! [`quantize`], [`dequantize`] and [`convert`] write a new checkpoint, one tensor at a time; [`compare`] and
//! [`inspect`] only read.
//!
//! | file | what it knows |
//! |---|---|
//! | `read`, `header`, `index`, `json`, `values` | input: which files, which tensors, typed views |
//! | `dtype` | what elements are in a file, in either container |
//! | `selection` | which tensors are quantized, and why the others are not |
//! | `glob` | patterns of tensor names |
//! | `recipes`, `settings`, `treatment` | recipe files and presets; settings key by key; how one tensor is quantized |
//! | `layers` | layers by the names of tensors: which are the first and the last |
//! | `fused`, `global_scale` | NVFP4's global scales: which layers share one, and which number it is |
//! | `importance` | weights by column for the search of block scales |
//! | `convention` | conventions of files: what a quantized tensor becomes |
//! | `compressed_tensors`, `modelopt`, `gpt_oss` | one each: names, dtypes, config |
//! | `description` | what config.json and its like say |
//! | `ignored`, `targets` | the layers that a config must exempt, and those of each format |
//! | `gguf` | GGUF, the container of ggml and llama.cpp |
//! | `matrix` | a tensor as the matrix that is quantized |
//! | `packed` | quantized tensors in files: what belongs together, and in which format |
//! | `doctor` | what is wrong with a quantized checkpoint |
//! | `parts` | quantizing in parts, and merging them |
//! | `rewrite`, `write`, `output`, `others` | output: tensor by tensor, complete or not at all |
//! | `quantize`, `dequantize`, `convert`, `compare`, `inspect`, `summary` | the operations and what they report |
//! | `details` | a closer look at quantized tensors, for those who ask: distributions, worst blocks |
//!
//! Files are little-endian, as safetensors demands; so must the machine be.

#[cfg(target_endian = "big")]
compile_error!("safetensors data is mapped as it is, which needs a little-endian machine");

mod compare;
mod compressed_tensors;
mod convention;
mod convert;
mod dequantize;
mod description;
mod details;
mod doctor;
mod dtype;
mod error;
mod fused;
mod gguf;
mod glob;
mod global_scale;
mod gpt_oss;
mod header;
mod ignored;
mod importance;
mod index;
mod inspect;
mod json;
mod layers;
mod matrix;
mod modelopt;
mod others;
mod output;
mod packed;
mod parts;
mod plan;
mod quantize;
mod read;
mod recipes;
mod rewrite;
mod selection;
mod settings;
mod source;
mod summary;
mod targets;
mod treatment;
mod values;
mod workers;
mod write;

pub use compare::{Compared, Comparison, Difference, compare};
pub use convention::FileConvention;
pub use convert::{Converted, Rounding, convert};
pub use dequantize::{Dequantized, dequantize};
pub use details::Details;
pub use doctor::{Defect, Diagnosis, Finding, diagnose};
pub use dtype::FileDtype;
pub use error::{Error, Result};
pub use gguf::GgmlType;
pub use global_scale::GlobalScales;
pub use importance::Importance;
pub use inspect::{Histogram, Inspected, inspect};
pub use layers::layer_part;
pub use others::Skipped;
pub use packed::{Logical, Packed, logical};
pub use parts::{Merged, Part, PartDone, merge, quantize_part};
pub use plan::{Plan, Planned};
pub use quantize::quantize;
pub use read::{Checkpoint, Tensor};
pub use recipes::{Preset, Recipes, presets};
pub use rewrite::{OnProgress, Progress};
pub use selection::{Kept, Reason, Selection, kept};
pub use settings::{GlobalSetting, Settings};
pub use summary::{Outcome, Plain, Summary, Sums, TensorSummary, Totals};
pub use treatment::{Facts, UsedRecipe};
pub use values::{Values, file_dtype, float_dtype};
