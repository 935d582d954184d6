//! The microscaling formats and the arithmetic of one block, written once.
//!
//! The same functions are compiled for the CPU and for the GPU. They are the *definition*: vector code on
//! either side may be cleverer and is tested bit for bit against them. The crate needs neither `std` nor
//! `alloc` and has no dependencies.
//!
//! | module | what it holds |
//! |---|---|
//! | [`format`](mod@format) | the formats, and the facts of each in one descriptor: [`Format`], [`Facts`] |
//! | [`dtype`] | the dtypes of unquantized values: [`Dtype`] |
//! | [`facts`] | the types of which a descriptor is made |
//! | [`comparison`] | formats without kernels and files, to compare with: [`ComparisonFormat`] |
//! | [`arithmetic`] | the operations of f32 that all of it is written in, for numbers and for vectors |
//! | [`e2m1`] | the 4-bit element: [`E2m1`], the packed pair [`E2m1x2`], rounding and its [`Ties`] |
//! | [`e3m0`] | the 4-bit powers of two [`E3m0`], to compare with |
//! | [`fp8`] | the 8-bit floats [`E4m3`] (also NVFP4's block scale) and [`E5m2`] |
//! | [`e8m0`] | the power-of-two block scale [`E8m0`] |
//! | [`scale`] | the types of block scales, their bytes and what they mean: [`ScaleType`] |
//! | [`block`] | what all blocks have in common: amax, [`NegativeZero`], [`BlockEvents`] |
//! | [`mx`] | MXFP4 and MXFP8 blocks: [`ScaleRule`], quantizing and dequantizing a block |
//! | [`nvfp4`] | NVFP4 blocks: [`GlobalScale`], the table of conventions, quantizing, dequantizing |
//! | [`nf4`] | the codebook of NF4 and its blocks under [`Bf16`] scales, to compare with |
//! | [`bf16`] | the block scale [`Bf16`] |
//! | [`plan`], [`shortcut`] | NVFP4 for one tensor as fast code wants it |
//! | [`errors`] | the loss of quantizing, and the order of its sums |
//! | [`layout`] | where scale bytes lie: [`ScaleLayout`] |
//! | [`search`] | choosing a block's scale by the error it makes: [`Search`] |
//! | [`dot`] | the product of two quantized vectors, and the order of its sums |
//! | [`weights`] | the product of a quantized row and a vector of 16 bits |
//! | [`gate`] | what makes one result of two: [`Gate`] |
//! | [`words`](mod@words) | the words by which formats, rules and searches are named, `Display` and `FromStr`: [`Words`] |
//! | [`hessian`] | the same by the error in a layer's output: [`Hessian`](hessian::Hessian) |
//!
//! Sources: OCP Microscaling Formats (MX) specification v1.0 for the formats; scale rules and conventions
//! name theirs.
#![no_std]

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
pub mod fp8;
pub mod gate;
pub mod hessian;
pub mod layout;
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
pub use gate::Gate;
pub use layout::ScaleLayout;
pub use mx::ScaleRule;
pub use nvfp4::GlobalScale;
pub use scale::ScaleType;
pub use search::Search;
pub use words::{UnknownWord, Words};

// The README's examples are compiled and run like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
