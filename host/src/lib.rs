//! Quantization to the microscaling formats, MXFP4, NVFP4 and MXFP8, on CPUs and NVIDIA GPUs: the same bytes
//! from both.
//!
//! ```
//! use microscale::{Recipe, Shape, dequantize, quantize};
//!
//! let values: Vec<f32> = (0..2 * 48).map(|i| (i as f32 * 0.37).sin()).collect();
//! let quantized = quantize(&values, Shape::new(2, 48), &Recipe::default())?;
//! assert_eq!(quantized.tensor.codes().len(), 2 * 2 * 16); // two blocks a row: the second is half padding
//! let back: Vec<f32> = dequantize(&quantized.tensor);
//! assert_eq!(back.len(), values.len());
//! # Ok::<(), microscale::Error>(())
//! ```
//!
//! The way of the data is one line: dtype decode → blocks → scale → encode → pack → layout → container, and
//! back.
//!
//! | to | see |
//! |---|---|
//! | say what is wanted | [`Recipe`], [`Format`], [`Convention`] |
//! | quantize host memory on the CPU | [`quantize`], [`quantize_strided`], [`dequantize`], [`amax()`] |
#![cfg_attr(feature = "cuda", doc = "| quantize on a GPU, from host or device memory | [`gpu::Gpu`] |")]
//! | multiply quantized matrices with quantized vectors | [`gemv()`] |
//! | multiply quantized weights with activations of 16 bits | [`gemv_weights()`] |
//! | measure the loss | [`ErrorStats`], [`WorstBlocks`] |
//! | read and write checkpoints | [`checkpoint`] |

mod amax;
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod bench;
mod bounds;
mod check_search;
pub mod checkpoint;
pub mod cpu;
pub mod device;
mod element;
mod error;
mod gemv;
#[cfg(feature = "cuda")]
pub mod gpu;
mod layout;
mod quality;
mod recipe;
mod report;
mod round_trip;
mod scheme;
mod shape;
mod strided;
mod tensor;
mod words;
mod worst_blocks;

#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;

pub use amax::Amax;
pub use check_search::check_search;
pub use cpu::{
    amax, dequantize, dequantize_into, gemv, gemv_weights, quantize, quantize_hessian, quantize_strided,
    quantize_weighted,
};
pub use device::{Device, DeviceChoice};
pub use element::{Dtype, Element};
pub use error::{Error, HessianFault, OperandFault, Result};
pub use gemv::{Activation, Batch};
pub use microscale_formats as formats;
pub use microscale_formats::nvfp4::search_global;
pub use microscale_formats::{Format, GlobalScale, ScaleLayout, Search};
pub use quality::ErrorStats;
pub use recipe::Recipe;
pub use report::{Position, Report};
pub use scheme::{Convention, Global, NonFinite, Scheme};
pub use shape::{QuantizedShape, Shape, Strided};
pub use tensor::{Quantized, QuantizedTensor};
pub use words::Words;
pub use worst_blocks::{BlockError, WorstBlocks};

// The README's example is compiled and run like the others.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
