//! The positions of a lane's chunks, and loads and stores of them.
//!
//! A warp handles 1024 elements in blocks that follow each other, or shares them with other warps,
//! step by step. (Where scales are swizzled and the matrix is whole tiles, it takes a quarter of
//! them from each of four rows, whose scales lie together.) In step j its lanes cover 32
//! consecutive chunks, so that every access of a warp is contiguous. A block has one lane per
//! chunk. With `lanes` lanes per block, lane `part` owns the scales of the blocks of steps `part`,
//! `part + lanes`, … So a lane owns one scale with blocks of 32, and two with blocks of 16.

mod lane;
mod load;
mod quantized;
mod store;
mod walk;

pub(crate) use lane::{Lane, MOST_OWNED, WarpPlace, lanes, owned, warp_blocks};
pub(crate) use load::{MOST_STEPS, element, load_all, load_all_in_tile, load_of_block};
pub(crate) use quantized::{Scales, Target, load_codes, store_codes};
pub(crate) use store::{store, store_contiguous, store_shifted};
pub(crate) use walk::Walk;
