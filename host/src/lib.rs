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
//!
//! Checkpoints, files of many tensors, are read and written by the crate `microscale-checkpoint`.

mod amax;
mod bounds;
mod check_search;
pub mod cpu;
pub mod device;
mod element;
mod elements;
mod error;
mod gemv;
#[cfg(feature = "cuda")]
pub mod gpu;
mod layout;
mod loss;
mod origin;
mod recipe;
mod report;
mod scheme;
mod shape;
mod strided;
mod tensor;

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
pub use loss::{BlockError, ErrorStats, WorstBlocks};
pub use microscale_formats as formats;
pub use microscale_formats::nvfp4::search_global;
pub use microscale_formats::{Format, GlobalScale, ScaleLayout, Search, UnknownWord, Words};
pub use recipe::Recipe;
pub use report::{Position, Report};
pub use scheme::{Convention, Global, NonFinite, Scheme};
pub use shape::{QuantizedShape, Shape, Strided};
pub use tensor::{Quantized, QuantizedTensor};

// The README's examples are compiled and run like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
