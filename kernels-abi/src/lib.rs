//! The interface between kernels and launcher: the PTX targets, the kernels with their launch
//! shapes, and the structures that they take. Plain data, `no_std`. Kernels, launcher, build tool
//! and tests all read it here.
//!
//! A kernel family is a module: an enumeration of its kernels, their table, and their own
//! arguments. [`launch`] defines a kernel; [`grid`] and [`memory`] hold shared arguments. The
//! kernels of [`gemm`] follow from one list of tiles.
#![no_std]

#[cfg(any(test, feature = "std"))]
extern crate std;

pub mod activations;
pub mod amax;
pub mod dequantize;
pub mod epilogue;
pub mod errors;
pub mod experts;
mod families;
pub mod gemm;
pub mod gemv;
pub mod gptq;
pub mod grid;
pub mod launch;
pub mod layout;
pub mod memory;
#[cfg(any(test, feature = "std"))]
pub mod ptx;
pub mod quantize;
pub mod search;
mod targets;

pub use activations::ActivationParams;
pub use amax::Amax;
pub use dequantize::Dequantize;
pub use epilogue::Epilogue;
pub use errors::Errors;
pub use experts::Experts;
pub use families::{kernels, kernels_for};
pub use gemm::{GemmConfig, Mainloop};
pub use gemv::Gemv;
pub use gptq::Gptq;
pub use grid::{BlockGrid, Divider, Divider32, ScaleGrid};
pub use launch::{Converts, Family, Kernel, KernelId};
pub use layout::Layout;
pub use memory::{ApplyGlobal, GlobalSlot, NO_POSITION, REPORT_SLOTS, ReportSlot};
#[cfg(any(test, feature = "std"))]
pub use ptx::Ptx;
pub use quantize::{MxOptions, NvOptions, Quantize};
pub use search::Search;
pub use targets::{PtxFile, PtxHead, TARGETS, Target, target_for};

// The README's examples are compiled and run like the others.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
