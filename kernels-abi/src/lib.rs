//! What the two sides of a kernel launch agree on, in one place: the PTX targets, the kernels' names and launch shapes,
//! and the structures passed to them. Plain data, `no_std`, no dependencies: the kernels, the launcher in the host crate
//! and the build tool all read it from here.
#![no_std]

mod args;
mod kernels;
mod targets;

pub use args::{BlockGrid, NO_POSITION, QuantizeOptions, REPORT_SLOTS, ReportSlot};
pub use kernels::{BLOCKS_PER_WARP, DEQUANTIZE_CHUNKS, Kernel, LADDER_THREADS, THREADS, WARP, kernels};
pub use targets::{TARGETS, Target, target_for};
