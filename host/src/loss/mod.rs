//! The loss of quantizing: sums over a tensor, and the blocks that lost most.
//!
//! `round_trip` goes through a matrix and its quantized form, part by part. `error_stats` sums the parts up,
//! and `worst_blocks` looks at each block of theirs.

mod error_stats;
mod round_trip;
mod worst_blocks;

pub use error_stats::ErrorStats;
pub use worst_blocks::{BlockError, WorstBlocks};
