//! Where a lane's chunks lie, and moving them.
//!
//! A warp handles 1024 elements in blocks that follow each other, or shares them with other warps, step by step. (Where scales are
//! swizzled and the matrix is whole tiles, it takes a quarter of them from each of four rows, whose scales lie together.) In step j its
//! lanes cover 32 consecutive chunks, so that every access of a warp is contiguous. A block has as many lanes as chunks, so in so
//! many steps each of its lanes can become the owner of one block's scale: lane `part` of step j = part, then of step
//! j = part + lanes, and so on. Blocks of 32 make a lane the owner of one, blocks of 16 of two.

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
