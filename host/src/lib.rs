//! Quantizes to the microscaling formats MXFP4, NVFP4 and MXFP8, and multiplies with them, on CPUs
//! and NVIDIA GPUs.
//!
//! CPUs and GPUs quantize to the same bytes.
//!
//! ```
//! use microscale::{Device, DeviceChoice, Recipe, Shape};
//!
//! let device = Device::choose(DeviceChoice::Auto)?; // a GPU or else the CPU
//! let values: Vec<f32> = (0..6 * 48).map(|i| (i as f32 * 0.37).sin()).collect();
//! let weights = device.quantize(&values, Shape::new(6, 48), &Recipe::default())?.tensor;
//! assert_eq!(weights.codes().len(), 6 * 2 * 16); // two blocks per row, one half padding
//!
//! let back: Vec<f32> = device.dequantize(&weights)?;
//! assert_eq!(back.len(), values.len());
//!
//! let x = [1f32; 3 * 48];
//! let y = device.linear(&x, Shape::new(3, 48), &weights)?; // x·Wᵀ for three tokens
//! assert_eq!(y.len(), 3 * 6);
//! # Ok::<(), microscale::Error>(())
//! ```
//!
//! | to | on any device | on the CPU |
//! |---|---|---|
//! | quantize | [`Device::quantize`] | [`quantize`], [`quantize_with`], [`quantize_into`] |
//! | quantize by a layer's outputs (GPTQ) | | [`quantize_gptq()`] with a [`GptqFactor`] |
//! | dequantize | [`Device::dequantize`] | [`dequantize`], [`dequantize_into`] |
//! | multiply by weights | [`Device::linear`], [`Device::load_weights`] | [`gemm_weights()`] |
//! | the same, with the bits of the reference | | [`gemv_weights()`] |
//! | round activations to INT8 | [`Device::load_weights`] | [`gemm_weights_int8()`] |
//! | multiply with experts | | [`gemm_experts()`], [`gemm_experts_int8()`] |
//! | multiply quantized operands | | [`gemm_fp4()`], [`gemm_fp4_gated()`] |
//! | the same for single vectors, rounding least | | [`gemv()`] |
//! | the same with experts | | [`gemm_experts_fp4()`], [`gemm_experts_fp4_gated()`] |
//! | quantize activations | `Gpu::quantize_activations_on` | [`quantize_activations()`] |
//! | write KV caches | `Gpu::append_kv_on` | [`append_kv()`] |
//! | read KV caches | `Gpu::gather_kv_on` | [`gather_kv()`] |
//! | compute the largest magnitude | [`Device::amax`] | [`amax()`] |
//! | measure the loss | | [`ErrorStats`], [`WorstBlocks`] |
//!
#![cfg_attr(feature = "cuda", doc = "For values in GPU memory, plans and your own streams, see")]
#![cfg_attr(feature = "cuda", doc = "[`gpu::Gpu`]: [`gpu::Gpu::linear`], [`gpu::Gpu::linear_experts`].")]
#![cfg_attr(feature = "cuda", doc = "")]
//! `Device::linear` documents which product to call when.
//!
//! # Types
//!
//! - A [`Recipe`] is a format and its numerics: [`Format`], [`Numerics`], [`Scheme`], [`Global`],
//!   [`GlobalScale`] ([`Direction`]), [`Search`], [`ScaleLayout`], [`NonFinite`].
//! - [`Shape`] and [`Strided`] describe values in memory ([`MatrixShape`] is either), whose
//!   [`Element`] type has a [`Dtype`]. [`Activation`] types can be multiplied.
//! - [`Quantized`] is a result: a [`QuantizedTensor`] ([`QuantizedShape`]), and a [`Report`] of
//!   lossy events, with the first non-finite [`Position`].
//! - [`QuantizedView`] is a quantized matrix in borrowed memory, such as a mapped file. Every
//!   function that reads a `&QuantizedTensor` also reads a view.
//! - [`QuantizeOptions`] adds importance or a Hessian. [`quantize_into_parts`] writes to your own
//!   buffers.
#![cfg_attr(
    feature = "cuda",
    doc = "- [`gpu::DeviceView`] and [`gpu::DeviceTensorView`] are GPU memory of other libraries."
)]
//! - [`GptqOptions`], [`GptqOrder`] and [`GptqScales`] are requests of GPTQ, [`GptqQuantized`] and
//!   [`OutputLoss`] its results.
//! - [`Batch`] divides the operands of [`gemv()`]. [`ExpertRows`] is the order of experts' rows.
//!   [`Fp4Weights`] adds alpha and a bias to [`gemm_fp4()`]. [`Fp4Rows`] are activations of
//!   [`gemm_experts_fp4()`]. [`ActivationRounding`] says whether a product rounds activations.
//!   [`Fp8Rows`] and [`Fp8Options`] are activations and options of [`gemm_weights_fp8()`].
//! - [`Gate`], [`interleave_rows`], [`deinterleave_rows`] and `gpu::DeviceEpilogue` fuse an
//!   epilogue into a product on a GPU.
//! - [`search_global`] chooses a global scale by its loss, and [`check_search`] checks a search.
//!   [`BlockError`] is the loss of a block, and [`Amax`] a largest magnitude.
//! - [`DeviceChoice`] and types with [`Words`] parse from command lines ([`UnknownWord`]).
//! - [`Error`], [`OperandFault`], [`HessianFault`] and [`GptqFault`] are the errors. `Debug` prints
//!   the message of an [`Error`], so that `main` may return it.
//! - [`formats`] has the arithmetic itself.
//!
//! Values take one path, and the same path back: dtype decode → blocks → scale → encode → pack →
//! layout → container.
//!
//! The crate `microscale-checkpoint` reads and writes checkpoints, files of many tensors.
//!
//! Debug builds are slow without `[profile.dev.package.microscale] opt-level = 3` in your
//! `Cargo.toml`.

mod activations;
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
mod fp4;
mod fp8;
mod gemv;
mod gptq;
#[cfg(feature = "cuda")]
pub mod gpu;
mod hadamard;
mod interleave;
mod kv;
mod layout;
mod loss;
mod options;
mod origin;
mod recipe;
mod report;
mod rounding;
mod scheme;
mod shape;
mod strided;
mod tensor;
mod view;

pub use activations::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationRecipe, ActivationScale, Fp8Scale,
    GluOrder, QuantizedActivations, RowOperation,
};
pub use amax::Amax;
pub use check_search::check_search;
pub use cpu::{
    GptqFactor, amax, append_kv, dequantize, dequantize_into, gather_kv, gemm_experts, gemm_experts_fp4,
    gemm_experts_fp4_gated, gemm_experts_fp8, gemm_experts_int8, gemm_fp4, gemm_fp4_gated, gemm_weights,
    gemm_weights_fp8, gemm_weights_int8, gemv, gemv_weights, quantize, quantize_activations, quantize_gptq,
    quantize_into, quantize_into_parts, quantize_with,
};
pub use device::{Device, DeviceChoice};
pub use element::{Dtype, Element, narrow};
pub use error::{ActivationFault, Error, GptqFault, HessianFault, OperandFault, Result};
#[doc(hidden)]
pub use error::{choice, searches};
pub use experts::ExpertRows;
pub use fp4::{Fp4Rows, Fp4Weights};
pub use fp8::{Fp8Options, Fp8Rows};
pub use gemv::{Activation, Batch};
pub use gptq::{GPTQ_DAMPING, GptqOptions, GptqOrder, GptqQuantized, GptqScales, OutputLoss};
pub use hadamard::{hadamard_hessian, hadamard_rows};
pub use interleave::{deinterleave_rows, interleave_rows};
pub use kv::{KvCache, KvCacheMut, KvFormat};
pub use loss::{BlockError, ErrorStats, WorstBlocks};
pub use microscale_formats as formats;
pub use microscale_formats::nvfp4::{Direction, search_global};
pub use microscale_formats::{
    ActivationLayout, Format, Gate, GlobalScale, Glu, HadamardWidth, ScaleLayout, Search, UnknownWord, Words,
};
pub use options::QuantizeOptions;
pub use recipe::Recipe;
pub use report::{Position, Report};
pub use rounding::ActivationRounding;
pub use scheme::{Global, NonFinite, Numerics, Scheme};
pub use shape::{MatrixShape, QuantizedShape, Shape, Strided};
pub use tensor::{Quantized, QuantizedTensor};
pub use view::QuantizedView;

// Compiles and runs the README's examples as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
