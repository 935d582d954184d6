//! Weights in four bits times activations in 16.

use microscale_formats::dot::CHUNK;

use crate::gemv::BLOCK_LIMIT;
use crate::grid::Divider;
use crate::launch::{Converts, Dtype, Family, Kernel, KernelId, Launch, WARP, kernel};

/// Rows of a tile of weights. One instruction of the tensor cores multiplies a tile.
pub const TILE_ROWS: u32 = 16;
/// Columns of a tile: tokens, which the same instruction multiplies the weights with.
pub const TILE_COLUMNS: u32 = 8;
/// Lanes that share a tile row. Each has one of its chunks in a k-iteration.
pub const QUAD: u32 = 4;
/// Threads in a thread block of the kernels that are not pipelined.
pub const WEIGHTS_THREADS: u32 = 256;
/// The first number of tokens that is too large for one launch.
pub const TOKEN_LIMIT: u64 = 1 << 24;
/// The first number of columns that is too large for the pipelined kernels: they count bytes in 32 bits.
pub const PIPELINED_COLUMN_LIMIT: u64 = 1 << 24;

/// The format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsFormat {
    /// NVFP4.
    Nvfp4,
    /// MXFP4.
    Mxfp4,
}

/// The kernels by how they multiply. `M1` and `M8` say how many tokens one reading of the weights serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// One token, pipelined, a tile a warp.
    M1Tiles1,
    /// One token, pipelined, two tiles a warp.
    M1Tiles2,
    /// One token, pipelined, four tiles a warp.
    M1Tiles4,
    /// A token tile of up to eight tokens, pipelined, a tile a warp.
    M8Tiles1,
    /// A token tile of up to eight tokens, pipelined, two tiles a warp.
    M8Tiles2,
    /// A token tile of up to 16 tokens, pipelined, a tile a warp.
    M16Tiles1,
    /// A token tile of up to 32 tokens, pipelined, two tiles a warp.
    M32Tiles2,
    /// A token tile of up to eight tokens by plain loads to registers, a tile a warp.
    UnpipelinedTiles1,
    /// A token tile of up to eight tokens by plain loads to registers, two tiles a warp.
    UnpipelinedTiles2,
    /// Ragged rows, which are not whole chunks, by the definition.
    Ragged,
}

impl Weights {
    /// The kernel for a format and the activations' dtype, f16 or bf16; none for f32.
    pub const fn of(self, format: WeightsFormat, dtype: Dtype) -> Option<KernelId> {
        let dtype = match dtype {
            Dtype::F32 => return None,
            Dtype::F16 => 0,
            Dtype::Bf16 => 1,
        };
        Some(KernelId::new(Family::Weights, self as usize * 4 + format as usize * 2 + dtype))
    }
}

/// The table. A row makes four kernels: NVFP4 and MXFP4, each with f16 and bf16. Those with f16 convert.
macro_rules! table {
    ($($variant:literal $launch:expr, $converts:ident;)+) => {
        &[$(
            kernel(concat!("nvfp4_gemv_weights_f16_", $variant), Some(Dtype::F16), $launch, Converts::$converts),
            kernel(concat!("nvfp4_gemv_weights_bf16_", $variant), Some(Dtype::Bf16), $launch, Converts::Nothing),
            kernel(concat!("mxfp4_gemv_weights_f16_", $variant), Some(Dtype::F16), $launch, Converts::$converts),
            kernel(concat!("mxfp4_gemv_weights_bf16_", $variant), Some(Dtype::Bf16), $launch, Converts::Nothing),
        )+]
    };
}

pub(crate) const KERNELS: &[Kernel] = table! {
    "m1_tiles1" pipelined(1, 1), E2m1;
    "m1_tiles2" pipelined(1, 2), E2m1;
    "m1_tiles4" pipelined(1, 4), E2m1;
    "m8_tiles1" pipelined(8, 1), E2m1;
    "m8_tiles2" pipelined(8, 2), E2m1;
    "m16_tiles1" pipelined(16, 1), E2m1;
    "m32_tiles2" pipelined(32, 2), E2m1;
    "unpipelined_tiles1" unpipelined(1), E2m1;
    "unpipelined_tiles2" unpipelined(2), E2m1;
    "ragged" (WEIGHTS_THREADS, WEIGHTS_THREADS / WARP, 0), Nothing;
};

/// The launch of a kernel that is not pipelined, of so many tiles a warp. Its grid says how many thread
/// blocks there are.
const fn unpipelined(tiles: u32) -> Launch {
    (WEIGHTS_THREADS, 0, weights_shared_bytes(tiles))
}

/// The launch of a pipelined kernel, with as many warps as a thread block may have.
const fn pipelined(tokens: u32, tiles: u32) -> Launch {
    let kernel = Pipelined { tokens, tiles };
    (kernel.warps() * WARP, 0, kernel.warps() * kernel.warp_bytes())
}

/// Bytes of shared memory that a thread block of a kernel that is not pipelined needs, if a warp has so many
/// tiles: their sums, and a flag for each warp.
const fn weights_shared_bytes(tiles: u32) -> u32 {
    WEIGHTS_THREADS / WARP * (tiles * TILE_ROWS * TILE_COLUMNS + 1) * 4
}

/// Warps of a thread block of the pipelined kernels, at most: enough to keep an H200's multiprocessor busy.
pub const PIPELINED_WARPS: u32 = 16;

/// A pipelined kernel for weights, and how it uses shared memory.
///
/// Such a kernel copies the next k-iterations to shared memory while it computes one. Its thread blocks are
/// persistent: they stay for as long as there are rows. The rows that a warp group multiplies at once are a
/// work tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipelined {
    /// Tokens of a token tile, at most: one, or as many as some tiles have columns.
    pub tokens: u32,
    /// Tiles of a warp.
    pub tiles: u32,
}

impl Pipelined {
    /// The exponent of the segments of rows and tokens, given that of the tokens of a token tile: 0 in kernels for more tokens than a tile
    /// has columns.
    #[inline(always)]
    pub const fn segment_bits(self, token_tile_bits: u32) -> u32 {
        match self.tokens {
            1 => 1,
            2..=TILE_COLUMNS => TILE_COLUMNS.ilog2() - token_tile_bits,
            _ => 0,
        }
    }

    /// Stages of a warp's ring: k-iterations that are in shared memory at once, or on their way to it. There
    /// are three, or two large ones, so that shared memory has room for all warps.
    pub const fn stages(self) -> u32 {
        match (self.tokens, self.tiles) {
            (1, ..=2) | (8, 1) => 3,
            _ => 2,
        }
    }

    /// Warps of a thread block, at most.
    pub const fn warps(self) -> u32 {
        if self.tokens > 16 { PIPELINED_WARPS / 2 } else { PIPELINED_WARPS }
    }

    /// Bytes of the activations of a stage: for one token eight chunks of 64 and zeros, for several four chunks of each.
    pub const fn activation_bytes(self) -> u32 {
        64 * if self.tokens == 1 { 9 } else { self.tokens * QUAD }
    }

    /// Bytes of a stage: codes of two rows a lane and tile, a word of scales, and activations.
    pub const fn stage_bytes(self) -> u32 {
        self.tiles * WARP * (2 * 16 + 4) + self.activation_bytes()
    }

    /// Bytes of a warp's ring, which is all its stages.
    pub const fn ring_bytes(self) -> u32 {
        self.stages() * self.stage_bytes()
    }

    /// Work tiles of a warp, at most.
    pub const fn work_tiles(self) -> u32 {
        match self.tokens {
            1 => 8,
            2..=8 => 4,
            _ => 1,
        }
    }

    /// Bytes of the sums that a warp keeps of a work tile: for one token one of each row, for several all
    /// that the tensor cores leave in the lanes.
    pub const fn sums_bytes(self) -> u32 {
        let sums = if self.tokens == 1 { TILE_ROWS >> self.segment_bits(0) } else { TILE_ROWS * self.tokens };
        self.tiles * sums * 4
    }

    /// Bytes that a warp keeps of a work tile: sums, and for several tokens a flag behind them, on 16 bytes.
    pub const fn work_tile_bytes(self) -> u32 {
        self.sums_bytes() + if self.tokens == 1 { 0 } else { 16 }
    }

    /// The offset in a warp's shared memory of what it keeps of its work tiles: behind the ring, or in its place where there is but one
    /// work tile, for what shared memory does not take is left to the L1 cache.
    pub const fn results_offset(self) -> u32 {
        if self.work_tiles() == 1 { 0 } else { self.ring_bytes() }
    }

    /// Bytes of a warp's shared memory.
    pub const fn warp_bytes(self) -> u32 {
        let ring = self.ring_bytes();
        let end = self.results_offset() + self.work_tiles() * self.work_tile_bytes();
        if ring > end { ring } else { end }
    }
}

/// The shape of weights, a quantized matrix, to multiply with tokens' activations, which are not quantized.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsShape {
    /// Rows of the matrix, at least 1.
    pub rows: u64,
    /// Columns of the matrix, as many as a token has activations.
    pub cols: u64,
    /// Blocks in a row; fewer than [`BLOCK_LIMIT`].
    pub blocks: u64,
}

/// Token tiles of a launch, each with thread blocks of its own.
#[derive(Clone, Copy, Debug)]
pub struct TokenTiles {
    /// How many there are.
    pub count: u64,
    /// The exponent of the tokens of one.
    pub bits: u32,
}

impl TokenTiles {
    /// The token tiles of so many tokens, for kernels that take up to so many at a time.
    fn of(tokens: u64, most: u32) -> Self {
        let each = (tokens.min(u64::from(most)) as u32).next_power_of_two();
        Self { count: tokens.div_ceil(u64::from(each)), bits: each.ilog2() }
    }
}

impl WeightsShape {
    /// Returns whether there is something to multiply with so many tokens, and kernels can count it.
    pub(crate) const fn counts(&self, tokens: u64) -> bool {
        self.rows > 0 && self.blocks < BLOCK_LIMIT && tokens > 0 && tokens < TOKEN_LIMIT
    }
}

/// How the kernels that are not pipelined multiply weights with up to eight tokens at a time.
///
/// Tensor cores multiply 16 tile rows with eight tile columns. With fewer tokens than columns, parts of the
/// same row and of the same token fill tile rows and columns side by side: segments. Kernels divide by powers
/// of two only, which are given by their exponents.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsGrid {
    /// The matrix.
    pub shape: WeightsShape,
    /// Tokens, at least 1; fewer than [`TOKEN_LIMIT`].
    pub tokens: u64,
    /// The exponent of the slices of K (sliced-K). The warps of a warp group share rows, and each has a slice
    /// of their columns. There are at most as many as warps in a thread block.
    pub slice_bits: u32,
    /// The exponent of the segments: up to 3.
    pub segment_bits: u32,
    /// The exponent of the tokens of a token tile.
    pub token_tile_bits: u32,
    /// The exponent of the tiles that a warp has.
    pub tile_bits: u32,
    /// Token tiles, each with thread blocks of its own: fewer than 2³¹ thread blocks in all.
    pub token_tiles: Divider,
}

impl WeightsGrid {
    /// Makes a grid of so many tiles a warp and so many slices of K.
    ///
    /// `None` if there is nothing to multiply, or more than a launch can count, or if these are not powers of
    /// two or more slices than a thread block has warps.
    pub fn new(shape: WeightsShape, tokens: u64, tiles: u32, slices: u32) -> Option<Self> {
        Self::with(shape, tokens, TokenTiles::of(tokens, TILE_COLUMNS), tiles, slices)
    }

    /// [`Self::new`] with given token tiles, of eight tokens at most.
    pub fn with(
        shape: WeightsShape,
        tokens: u64,
        token_tiles: TokenTiles,
        tiles: u32,
        slices: u32,
    ) -> Option<Self> {
        let shared = tiles.is_power_of_two() && slices.is_power_of_two() && slices <= WEIGHTS_THREADS / WARP;
        if !shared || !shape.counts(tokens) || 1 << token_tiles.bits > TILE_COLUMNS {
            return None;
        }
        let grid = Self {
            shape,
            tokens,
            slice_bits: slices.ilog2(),
            segment_bits: TILE_COLUMNS.ilog2() - token_tiles.bits,
            tile_bits: tiles.ilog2(),
            token_tile_bits: token_tiles.bits,
            token_tiles: Divider::new(token_tiles.count),
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// The exponent of the rows that half a tile stands for.
    #[inline(always)]
    pub const fn half_row_bits(&self) -> u32 {
        (TILE_ROWS / 2).ilog2() - self.segment_bits
    }

    /// The exponent of the rows that a warp group shares.
    #[inline(always)]
    pub const fn group_row_bits(&self) -> u32 {
        TILE_ROWS.ilog2() + self.tile_bits - self.segment_bits
    }

    /// The exponent of the warp groups in a thread block.
    #[inline(always)]
    pub const fn group_bits(&self) -> u32 {
        (WEIGHTS_THREADS / WARP).ilog2() - self.slice_bits
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.shape.rows.div_ceil(1 << (self.group_bits() + self.group_row_bits())) * self.token_tiles.divisor
    }
}

/// How the pipelined kernels multiply weights.
///
/// A thread block has one warp group or several. The warps of a group multiply the rows of a work tile, each
/// with k-iterations of its own (sliced-K). Work tiles go to the groups one after the other, to the first
/// groups of all thread blocks before the second ones. So all groups have as many work tiles, or one more.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PipelinedGrid {
    /// The matrix, of fewer columns than [`PIPELINED_COLUMN_LIMIT`].
    pub shape: WeightsShape,
    /// Token tiles, each with thread blocks of its own.
    pub token_tiles: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of the tokens of a token tile.
    pub token_tile_bits: u32,
    /// Thread blocks of a token tile.
    pub row_blocks: u32,
    /// Work tiles that each warp group has, and how many groups have one more: at most
    /// [`Pipelined::work_tiles`] each.
    pub work_tiles: [u32; 2],
    /// Warps of a thread block.
    pub warps: u32,
    /// The exponent of the slices of K, which is that of the warps of a group.
    pub slice_bits: u32,
    /// K-iterations of a row. A warp has every so many-th, as many apart as there are slices.
    pub k_iterations: u32,
}

impl PipelinedGrid {
    /// Makes a grid for a kernel, with so many slices of K and so many warps of a thread block, on a GPU that
    /// has room for so many thread blocks at once.
    ///
    /// `None` if there is nothing to multiply, or more than a launch can count, or [`PIPELINED_COLUMN_LIMIT`]
    /// columns, or if slices and warps are not powers of two, or if there are more slices than warps.
    pub fn new(
        kernel: Pipelined,
        shape: WeightsShape,
        tokens: u64,
        slices_and_warps: [u32; 2],
        at_once: u32,
    ) -> Option<Self> {
        let token_tiles = TokenTiles::of(tokens, kernel.tokens);
        Self::with(kernel, shape, tokens, token_tiles, slices_and_warps, at_once)
    }

    /// [`Self::new`] with given token tiles, of as many tokens as the kernel takes, at most.
    pub fn with(
        kernel: Pipelined,
        shape: WeightsShape,
        tokens: u64,
        token_tiles: TokenTiles,
        [slices, warps]: [u32; 2],
        at_once: u32,
    ) -> Option<Self> {
        let groups = slices.is_power_of_two() && warps.is_power_of_two() && slices <= warps;
        if !groups
            || at_once == 0
            || !shape.counts(tokens)
            || shape.cols >= PIPELINED_COLUMN_LIMIT
            || 1 << token_tiles.bits > kernel.tokens
        {
            return None;
        }
        let segment_bits = kernel.segment_bits(token_tiles.bits);
        let groups = u64::from(warps / slices);
        let work_tiles = shape.rows.div_ceil(u64::from((kernel.tiles * TILE_ROWS) >> segment_bits));
        if work_tiles >= 1 << 31 {
            return None;
        }
        let waves = work_tiles.div_ceil(u64::from(at_once) * groups * u64::from(kernel.work_tiles()));
        let row_blocks = work_tiles.div_ceil(groups).min(u64::from(at_once) * waves);
        let (each, more) = (work_tiles / (row_blocks * groups), work_tiles % (row_blocks * groups));
        // In a k-iteration, each of four lanes has a chunk of each segment.
        let columns = (u64::from(QUAD) * CHUNK as u64) << segment_bits;
        let grid = Self {
            shape,
            token_tiles: Divider::new(token_tiles.count),
            tokens: tokens as u32,
            token_tile_bits: token_tiles.bits,
            row_blocks: row_blocks as u32,
            work_tiles: [each as u32, more as u32],
            warps,
            slice_bits: slices.ilog2(),
            k_iterations: u32::try_from(shape.cols.div_ceil(columns)).ok()?,
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.row_blocks as u64 * self.token_tiles.divisor
    }

    /// Threads in a thread block, and bytes of shared memory for them.
    pub const fn threads_and_shared(&self, kernel: Pipelined) -> (u32, u32) {
        (self.warps * WARP, self.warps * kernel.warp_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        let pipelined = |cols: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols, blocks: cols / 32 };
            PipelinedGrid::new(Pipelined { tokens: 1, tiles: 1 }, shape, tokens, [2, 16], 132).is_some()
        };
        assert_eq!([1, 0].map(|tokens| pipelined(4096, tokens)), [true, false]);
        let [columns, tokens] = [PIPELINED_COLUMN_LIMIT, TOKEN_LIMIT];
        assert_eq!([columns - 128, columns].map(|cols| pipelined(cols, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| pipelined(4096, tokens)), [true, false]);
        let unpipelined = |blocks: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols: blocks * 32, blocks };
            WeightsGrid::new(shape, tokens, 2, 8).is_some()
        };
        assert_eq!([BLOCK_LIMIT - 1, BLOCK_LIMIT].map(|blocks| unpipelined(blocks, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| unpipelined(128, tokens)), [true, false]);
    }

    #[test]
    fn launches_fit_into_any_gpu() {
        let pipelined = [(1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (16, 1), (32, 2)]
            .map(|(tokens, tiles)| Pipelined { tokens, tiles });
        // KiB of shared memory that a thread block may have: before one asks, on compute capability 8.6, 8.0
        // and 9.0.
        let warps = [
            (48, [8, 4, 4, 4, 2, 4, 2]),
            (99, [16, 8, 8, 8, 4, 8, 4]),
            (163, [16, 16, 8, 8, 8, 8, 4]),
            (227, [16, 16, 16, 16, 16, 16, 8]),
        ];
        for (kib, warps) in warps {
            for kernel in KERNELS {
                let within = kernel.within(kib << 10);
                assert!(within.shared <= kib << 10, "{} with {kib} KiB", kernel.name);
                assert!(within == *kernel || kernel.elements == 0 && within.threads >= WARP);
                for (pipelined, warps) in pipelined.into_iter().zip(warps) {
                    let Pipelined { tokens, tiles } = pipelined;
                    if kernel.name.ends_with(&std::format!("_m{tokens}_tiles{tiles}")) {
                        assert_eq!(
                            (within.threads, within.shared),
                            (warps * WARP, warps * pipelined.warp_bytes())
                        );
                    }
                }
            }
        }
    }
}
