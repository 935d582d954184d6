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
//! | say what is wanted | [`Recipe`] of a [`Format`] and a [`Convention`]: [`Scheme`], [`Global`], [`GlobalScale`], [`Search`], [`ScaleLayout`], [`NonFinite`] |
//! | say where the values lie | [`Shape`], [`Strided`] ([`MatrixShape`] is either), of an [`Element`] type ([`Dtype`]) |
//! | quantize host memory on the CPU | [`quantize`], [`quantize_with`] [`QuantizeOptions`], [`quantize_into`], [`quantize_into_parts`], [`dequantize`], [`dequantize_into`], [`amax()`] ([`Amax`]) |
//! | do so on whichever device there is | [`Device`], [`DeviceChoice`] |
#![cfg_attr(feature = "cuda", doc = "| quantize on a GPU, from host or device memory | [`gpu::Gpu`] |")]
#![cfg_attr(
    feature = "cuda",
    doc = "| work on a GPU in memory of other software | [`gpu::DeviceView`], [`gpu::DeviceTensorView`] |"
)]
//! | take the result | [`Quantized`]: a [`QuantizedTensor`] ([`QuantizedShape`]), and a [`Report`] of what could not be kept, where ([`Position`]) |
//! | read a quantized matrix where it is, a mapped file for instance | [`QuantizedView`], in place of a `&QuantizedTensor` |
//! | multiply quantized matrices with quantized vectors | [`gemv()`] ([`Batch`]) |
//! | multiply quantized weights with activations | [`gemv_weights()`] of a few tokens, [`gemm_weights()`] of any number ([`Activation`]) |
//! | fuse what follows a product on a GPU | [`Gate`], [`interleave_rows`], [`deinterleave_rows`]; `gpu::DeviceEpilogue` |
//! | multiply each token with the weights of its experts | [`gemm_experts()`] ([`ExpertRows`]) |
//! | measure the loss | [`ErrorStats`], [`WorstBlocks`] ([`BlockError`]) |
//! | choose a global scale by the loss, or check a search | [`search_global`], [`check_search`] |
//! | name things on command lines, and know what went wrong | [`Words`], [`UnknownWord`]; [`Error`] ([`OperandFault`], [`HessianFault`]) |
//! | use the arithmetic itself | [`formats`] |
//!
//! Checkpoints, files of many tensors, are read and written by the crate `microscale-checkpoint`.

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
pub use error::{Error, HessianFault, OperandFault, Result};
pub use experts::ExpertRows;
pub use gemv::{Activation, Batch};
pub use interleave::{deinterleave_rows, interleave_rows};
pub use loss::{BlockError, ErrorStats, WorstBlocks};
pub use microscale_formats as formats;
pub use microscale_formats::nvfp4::search_global;
pub use microscale_formats::{Format, Gate, GlobalScale, ScaleLayout, Search, UnknownWord, Words};
pub use options::QuantizeOptions;
pub use recipe::Recipe;
pub use report::{Position, Report};
pub use scheme::{Convention, Global, NonFinite, Scheme};
pub use shape::{MatrixShape, QuantizedShape, Shape, Strided};
pub use tensor::{Quantized, QuantizedTensor};
pub use view::QuantizedView;

// The README's examples are compiled and run like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
