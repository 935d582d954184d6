//! Quantizes to the microscaling formats MXFP4, NVFP4 and MXFP8, on CPUs and NVIDIA GPUs.
//!
//! CPUs and GPUs give the same bytes.
//!
//! ```
//! use microscale::{Recipe, Shape, dequantize, quantize};
//!
//! let values: Vec<f32> = (0..2 * 48).map(|i| (i as f32 * 0.37).sin()).collect();
//! let quantized = quantize(&values, Shape::new(2, 48), &Recipe::default())?;
//! assert_eq!(quantized.tensor.codes().len(), 2 * 2 * 16); // two blocks per row, one half padding
//! let back: Vec<f32> = dequantize(&quantized.tensor);
//! assert_eq!(back.len(), values.len());
//! # Ok::<(), microscale::Error>(())
//! ```
//!
//! Data takes one path, and the same path back: dtype decode → blocks → scale → encode → pack →
//! layout → container.
//!
//! - To choose a format and its numerics, make a [`Recipe`] of a [`Format`] and a [`Numerics`]:
//!   [`Scheme`], [`Global`], [`GlobalScale`], [`Search`], [`ScaleLayout`], [`NonFinite`].
//! - To describe values in memory, use [`Shape`] or [`Strided`] ([`MatrixShape`] is either), and an
//!   [`Element`] type ([`Dtype`]).
//! - To quantize host memory on the CPU, call [`quantize`], [`quantize_with`] [`QuantizeOptions`],
//!   [`quantize_into`], [`quantize_into_parts`], [`dequantize`], [`dequantize_into`] or [`amax()`]
//!   ([`Amax`]).
//! - To use whichever device there is, see [`Device`] and [`DeviceChoice`].
#![cfg_attr(feature = "cuda", doc = "- To use a GPU with host or device memory, see [`gpu::Gpu`].")]
#![cfg_attr(feature = "cuda", doc = "- To use a GPU in another library's memory, see")]
#![cfg_attr(feature = "cuda", doc = "  [`gpu::DeviceView`] and [`gpu::DeviceTensorView`].")]
//! - The result is [`Quantized`]: a [`QuantizedTensor`] ([`QuantizedShape`]), and a [`Report`] of
//!   lossy events, with the first non-finite [`Position`].
//! - To read a quantized matrix in place, for example in a mapped file, pass a [`QuantizedView`]
//!   instead of a `&QuantizedTensor`.
//! - To multiply quantized matrices with quantized vectors, call [`gemv()`] ([`Batch`]).
//! - To multiply quantized weights with activations, call [`gemv_weights()`] for a few tokens, or
//!   [`gemm_weights()`] for any number ([`Activation`]).
//! - To fuse an epilogue into a product on a GPU, see [`Gate`], [`interleave_rows`],
//!   [`deinterleave_rows`] and `gpu::DeviceEpilogue`.
//! - To multiply each token with the weights of its experts, call [`gemm_experts()`]
//!   ([`ExpertRows`]).
//! - To measure the loss, use [`ErrorStats`] and [`WorstBlocks`] ([`BlockError`]).
//! - To choose a global scale by its loss, or to check a search, call [`search_global`] or
//!   [`check_search`].
//! - [`Words`] and [`UnknownWord`] name things on command lines. Errors are [`Error`],
//!   [`OperandFault`] and [`HessianFault`].
//! - The arithmetic itself is in [`formats`].
//!
//! The crate `microscale-checkpoint` reads and writes checkpoints, files of many tensors.

mod amax;
mod bounds;
pub mod cast;
mod check_search;
pub mod cpu;
pub mod device;
mod element;
mod elements;
mod error;
mod experts;
mod gemv;
#[cfg(feature = "cuda")]
pub mod gpu;
mod interleave;
mod layout;
mod loss;
mod options;
mod origin;
mod recipe;
mod report;
mod scheme;
mod shape;
mod strided;
mod tensor;
mod view;

pub use amax::Amax;
pub use check_search::check_search;
pub use cpu::{
    amax, dequantize, dequantize_into, gemm_experts, gemm_weights, gemv, gemv_weights, quantize,
    quantize_into, quantize_into_parts, quantize_with,
};
pub use device::{Device, DeviceChoice};
pub use element::{Dtype, Element, narrow};
#[doc(hidden)]
pub use error::searches;
pub use error::{Error, HessianFault, OperandFault, Result};
pub use experts::ExpertRows;
pub use gemv::{Activation, Batch};
pub use interleave::{deinterleave_rows, interleave_rows};
pub use loss::{BlockError, ErrorStats, WorstBlocks};
pub use microscale_formats as formats;
pub use microscale_formats::nvfp4::{Direction, search_global};
pub use microscale_formats::{Format, Gate, GlobalScale, ScaleLayout, Search, UnknownWord, Words};
pub use options::QuantizeOptions;
pub use recipe::Recipe;
pub use report::{Position, Report};
pub use scheme::{Global, NonFinite, Numerics, Scheme};
pub use shape::{MatrixShape, QuantizedShape, Shape, Strided};
pub use tensor::{Quantized, QuantizedTensor};
pub use view::QuantizedView;

// Compiles and runs the README's examples as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
