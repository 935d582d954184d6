//! Runs language models to measure and calibrate their quantization, one decoder layer in memory
//! at a time.
//!
//! | to | use |
//! |---|---|
//! | read a model's sizes | [`Config`] |
//! | read its weights, quantized or not | [`Stored`], [`QuantizedInputs`] |
//! | replace its layers | [`Wrapped`], [`Source`] |
//! | cut a text into windows of tokens | [`Text`] |
//! | measure perplexity, divergence and errors of layers | [`evaluate`] |
//! | record importance, Hessians and largest magnitudes of inputs | [`calibrate`], [`Statistics`] |
//! | generate text | [`Model`] |
//! | run the program's commands | [`OpenModel`], [`Reading`] |
//!
//! The README lists the architectures. Models run on CPUs and, with the feature `cuda`, on NVIDIA
//! GPUs.

mod activations;
mod attention;
mod calibrate;
mod config;
mod decoder;
mod error;
mod estimate;
mod evaluate;
mod families;
mod figures;
mod mlp;
mod model;
mod norm;
mod pass;
mod progress;
mod request;
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
pub use figures::InputFigures;
pub use model::{Ends, Model, prefix};
pub use progress::{OnProgress, Progress};
pub use request::{EvaluatedRow, ModelEvaluation, OpenModel, Reading};
pub use rows::{Rotations, Rows};
pub use source::{Layer, LayerName, PlainLinear, Source, Stored, Wrapped};
pub use statistics::{Identity, Statistics};
pub use text::{Text, TextOptions, Window};

// The README's examples are compiled like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
