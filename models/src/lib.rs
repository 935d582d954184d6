//! Forward passes of language models, to measure and calibrate their quantization.

mod activations;
mod attention;
mod calibrate;
mod config;
mod decoder;
mod error;
mod estimate;
mod evaluate;
mod families;
mod mlp;
mod model;
mod norm;
mod pass;
mod progress;
mod rope;
mod rows;
mod source;
mod statistics;
mod text;

pub use activations::{InputFormat, QuantizedInputs};
pub use calibrate::{CalibrateOptions, calibrate};
pub use config::Config;
pub use decoder::DecoderLayer;
pub use error::{Error, Result};
pub use estimate::Estimate;
pub use evaluate::{Difference, EvaluateOptions, Evaluated, Evaluation, LayerError, evaluate};
pub use model::{Ends, Model, prefix};
pub use progress::{OnProgress, Progress};
pub use rows::{Rotations, Rows};
pub use source::{Layer, LayerName, PlainLinear, Source, Stored, Wrapped};
pub use statistics::{Identity, InputStatistics, Statistics};
pub use text::{Text, TextOptions, Window};
