//! The loss of quantization: sums over a tensor, and the blocks with the largest loss.
//!
//! `round_trip` iterates over a matrix and its quantized form in parts. `error_stats` sums over the
//! parts, and `worst_blocks` examines each of their blocks.

mod error_stats;
mod round_trip;
mod worst_blocks;

pub use error_stats::ErrorStats;
pub use worst_blocks::{BlockError, WorstBlocks};
