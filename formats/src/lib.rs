//! The microscaling formats and the arithmetic of one block, written once.
//!
//! The same functions are compiled for the CPU and for the GPU. They are the *definition*: vector code on either side
//! may be cleverer and is tested bit for bit against them. The crate needs neither `std` nor `alloc` and has no
//! dependencies.
//!
//! | module | what it holds |
//! |---|---|
//! | [`e2m1`] | the 4-bit element: [`E2m1`], the packed pair [`E2m1x2`], rounding and its [`Ties`] |
//! | [`e8m0`] | the power-of-two block scale [`E8m0`] |
//! | [`mxfp4`] | MXFP4 blocks: [`ScaleRule`], what becomes of −0 and of non-finite input, quantizing and dequantizing a block |
//!
//! Sources: OCP Microscaling Formats (MX) specification v1.0 for the formats; the scale rules name theirs.
#![no_std]

pub mod e2m1;
pub mod e8m0;
pub mod mxfp4;

pub use e2m1::{E2m1, E2m1x2, Ties};
pub use e8m0::E8m0;
pub use mxfp4::{NegativeZero, ScaleRule};
