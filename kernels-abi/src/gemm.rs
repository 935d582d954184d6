//! Products of 4-bit weights and 16-bit activations, for any number of tokens.
//!
//! | module | contents |
//! |---|---|
//! | [`mainloop`] | the mainloops and their traits, a row each |
//! | [`config`] | [`GemmConfig`]: which kernel multiplies; the list of all |
//! | [`fp4`] | the kernels before a product of FP4 activations |
//! | [`fp8`] | the kernels that pack FP8 activations, and the layout of packs |
//! | [`decoding`] | the launch of the kernel that decodes MXFP4 to FP8 and packs |
//! | [`quantizing`] | the launch of the kernels that quantize to FP8 and pack |
//! | [`packing`] | the kernels before and after: packing activations, parts of f32 activations |
//! | [`stage`] | the stages in shared memory, and the offsets before them |
//! | [`params`] | the parameters of the packing kernel and of `mma` and `wgmma` kernels |
//! | [`schedule`] | which thread block has which work tiles |
//! | [`gemv`] | the GEMV's shared memory and parameters |
//!
//! With few tokens the GEMV reads activations where they lie. With more, they are packed as tensor
//! cores read them: by a kernel before the product, or by the kernel that multiplies
//! ([`MainloopTraits::packs_up_to`](mainloop::MainloopTraits::packs_up_to)).

pub mod config;
pub mod decoding;
pub mod fp4;
pub mod fp8;
pub mod gemv;
pub mod mainloop;
pub mod packing;
pub mod params;
pub mod quantizing;
pub mod schedule;
pub mod stage;

use microscale_formats::dot::CHUNK;

use crate::launch::{Launch, WARP};

pub use config::GemmConfig;
pub use mainloop::Mainloop;

/// Rows of a tile of weights. One instruction of the tensor cores multiplies a tile.
pub const TILE_ROWS: u32 = 16;
/// Columns of a tile: the tokens of the same instruction.
pub const TILE_COLUMNS: u32 = 8;
/// Lanes that share a tile row. Each has one of its chunks in a K-iteration.
pub const QUAD: u32 = 4;
/// Columns of a pack of activations: a chunk per lane of a quad.
pub const PACK_COLUMNS: u32 = QUAD * CHUNK as u32;
/// The first number of tokens that is too large for one launch.
pub const TOKEN_LIMIT: u64 = 1 << 24;
/// The first number of columns that is too large for kernels that count a row's bytes in 32 bits.
pub const COLUMN_LIMIT: u64 = 1 << 24;
/// Tiles of 16 rows in a work tile, at most.
pub const MOST_ROW_TILES: u32 = 16;
/// Bytes of shared memory per thread block, at most, on any GPU.
pub(crate) const MOST_SHARED: u32 = 227 << 10;

/// Threads per thread block of the kernels that do not copy ahead.
pub const PLAIN_THREADS: u32 = 256;
/// Warps per thread block of the kernels that copy ahead, at most: enough to keep an H200's
/// multiprocessor busy.
pub const GEMV_WARPS: u32 = 16;
/// The launch of the kernels for ragged rows: a warp per row.
pub(crate) const RAGGED: Launch = (PLAIN_THREADS, PLAIN_THREADS / WARP, 0);

/// The shape of weights that are multiplied.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsShape {
    /// Rows, at least 1.
    pub rows: u64,
    /// Columns: activations per token.
    pub cols: u64,
    /// Blocks per row; fewer than [`BLOCK_LIMIT`](crate::gemv::BLOCK_LIMIT).
    pub blocks: u64,
}

impl WeightsShape {
    /// Returns whether there is anything to multiply by `tokens` tokens, and kernels can count it.
    pub(crate) const fn counts(&self, tokens: u64) -> bool {
        self.rows > 0 && self.blocks < crate::gemv::BLOCK_LIMIT && tokens > 0 && tokens < TOKEN_LIMIT
    }
}
