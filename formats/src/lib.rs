//! The microscaling formats and the arithmetic of one block, written once.
//!
//! The same functions are compiled for CPUs and GPUs. They are the *definition*: vector code on
//! either side is tested bit for bit against them. The crate needs neither `std` nor `alloc` and
//! has no dependencies.
//!
//! | module | contents |
//! |---|---|
//! | [`format`](mod@format) | the formats and their facts: [`Format`], [`Facts`] |
//! | [`dtype`] | the dtypes of unquantized values: [`Dtype`] |
//! | [`facts`] | the types of a format's facts |
//! | [`comparison`] | formats for comparison only: [`ComparisonFormat`] |
//! | [`activations`] | row operations before quantizing activations; FP8 with f32 scales |
//! | [`arithmetic`] | the f32 operations that the crate is written in, for scalars and vectors |
//! | [`e2m1`] | the 4-bit element [`E2m1`], the packed pair [`E2m1x2`], rounding, [`Ties`] |
//! | [`e3m0`] | the 4-bit powers of two [`E3m0`], for comparison |
//! | [`fp8`] | the 8-bit floats [`E4m3`] (also NVFP4's block scale) and [`E5m2`] |
//! | [`e8m0`] | the power-of-two block scale [`E8m0`] |
//! | [`scale`] | the types of block scales and the meaning of their bytes: [`ScaleType`] |
//! | [`block`] | parts that all blocks share: amax, [`NegativeZero`], [`BlockEvents`] |
//! | [`mx`] | MXFP4 and MXFP8 blocks: [`ScaleRule`], quantizing, dequantizing |
//! | [`nvfp4`] | NVFP4 blocks: [`GlobalScale`], the numerics, quantizing, dequantizing |
//! | [`nf4`] | the NF4 codebook and its blocks under [`Bf16`] scales, for comparison |
//! | [`bf16`] | the block scale [`Bf16`] |
//! | [`plan`], [`shortcut`] | NVFP4 for one tensor, precomputed for fast code |
//! | [`errors`] | quantization loss, and the order of its sums |
//! | [`layout`] | where scale bytes are stored: [`ScaleLayout`], [`ActivationLayout`] |
//! | [`search`] | choosing a block's scale by its error: [`Search`] |
//! | [`hadamard`](mod@hadamard) | block Hadamard transforms of rows: [`HadamardWidth`] |
//! | [`hessian`] | choosing it by the error in a layer's output: [`Hessian`](hessian::Hessian) |
//! | [`dot`] | the product of two quantized vectors, and the order of its sums |
//! | [`fp4_dot`] | the same product with the arithmetic of Blackwell's tensor cores |
//! | [`fp8_dot`] | 4-bit weights times FP8 activations, as Hopper's tensor cores multiply |
//! | [`weights`] | the product of a quantized row and a vector of 16-bit activations |
//! | [`int8`] | the same product with activations rounded to INT8 |
//! | [`kv`] | paged KV caches: [`KvShape`](kv::KvShape) |
//! | [`gate`] | gates that combine two values of a feed-forward layer: [`Gate`], [`Glu`] |
//! | [`words`](mod@words) | names of formats, rules and searches, `Display`, `FromStr`: [`Words`] |
//!
//! The formats follow the OCP Microscaling Formats (MX) specification v1.0. Scale rules and
//! numerics name their own sources.
#![no_std]

pub mod activations;
pub mod arithmetic;
pub mod bf16;
pub mod block;
pub mod comparison;
pub mod dot;
pub mod dtype;
pub mod e2m1;
pub mod e3m0;
pub mod e8m0;
pub mod errors;
pub mod facts;
pub mod format;
pub mod fp4_dot;
pub mod fp8;
pub mod fp8_dot;
pub mod gate;
pub mod hadamard;
pub mod hessian;
pub mod int8;
pub mod kv;
pub mod layout;
mod message;
pub mod mx;
pub mod nf4;
pub mod nvfp4;
pub mod plan;
pub mod scale;
pub mod search;
pub mod shortcut;
pub mod weights;
pub mod words;

pub use bf16::Bf16;
pub use block::{BlockEvents, NegativeZero};
pub use comparison::ComparisonFormat;
pub use dtype::Dtype;
pub use e2m1::{E2m1, E2m1x2, Ties};
pub use e3m0::E3m0;
pub use e8m0::E8m0;
pub use facts::Facts;
pub use format::Format;
pub use fp8::{E4m3, E5m2};
pub use gate::{Gate, Glu};
pub use hadamard::HadamardWidth;
pub use layout::{ActivationLayout, ScaleLayout};
pub use mx::ScaleRule;
pub use nvfp4::GlobalScale;
pub use scale::ScaleType;
pub use search::Search;
pub use words::{UnknownWord, Words};

// Compiles and runs the README's examples as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
