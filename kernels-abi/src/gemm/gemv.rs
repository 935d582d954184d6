//! Shared memory and parameters of the GEMV: products of few tokens.

use microscale_formats::dot::CHUNK;

use super::{
    COLUMN_LIMIT, GEMV_WARPS, GemmConfig, PLAIN_THREADS, QUAD, TILE_COLUMNS, TILE_ROWS, WeightsShape,
};
use crate::grid::Divider;
use crate::launch::{Launch, WARP};

/// Shared memory of the kernels that copy K-iterations ahead
/// ([`Mainloop::Gemv`](super::Mainloop::Gemv)).
///
/// Their thread blocks are persistent. The rows that a warp group multiplies together are a work
/// tile.
impl GemmConfig {
    /// The launch of the kernels that do not copy ahead. Shared memory holds each warp's
    /// accumulators and a flag.
    pub(super) const fn plain_launch(self) -> Launch {
        let shared = PLAIN_THREADS / WARP * (self.row_tiles() * TILE_ROWS * TILE_COLUMNS + 1) * 4;
        (PLAIN_THREADS, 0, shared)
    }

    /// Base-2 logarithm of the segments of a row. `token_tile_bits` is the logarithm of the tokens
    /// of a token tile. 0 in kernels for more tokens than a tile has columns.
    #[inline(always)]
    pub const fn gemv_segment_bits(self, token_tile_bits: u32) -> u32 {
        match self.tile_n {
            1 => 1,
            2..=TILE_COLUMNS => TILE_COLUMNS.ilog2() - token_tile_bits,
            _ => 0,
        }
    }

    /// Stages of a warp's ring: three, or two large ones, so that shared memory has room for all
    /// warps.
    pub const fn gemv_stages(self) -> u32 {
        match (self.tile_n, self.row_tiles()) {
            (1, ..=2) | (8, 1) => 3,
            _ => 2,
        }
    }

    /// Warps per thread block, at most.
    pub const fn gemv_warps(self) -> u32 {
        if self.tile_n > 16 { GEMV_WARPS / 2 } else { GEMV_WARPS }
    }

    /// Bytes of a stage's activations: eight chunks of 64 and zeros for one token, four chunks per
    /// token otherwise.
    pub const fn gemv_activation_bytes(self) -> u32 {
        64 * if self.tile_n == 1 { 9 } else { self.tile_n * QUAD }
    }

    /// Bytes of a stage: per lane and tile, codes of two rows and a word of scales; then
    /// activations.
    pub const fn gemv_stage_bytes(self) -> u32 {
        self.row_tiles() * WARP * (2 * 16 + 4) + self.gemv_activation_bytes()
    }

    /// Bytes of a warp's ring.
    pub const fn gemv_ring_bytes(self) -> u32 {
        self.gemv_stages() * self.gemv_stage_bytes()
    }

    /// Work tiles of a warp, at most.
    pub const fn gemv_work_tiles(self) -> u32 {
        match self.tile_n {
            1 => 8,
            2..=8 => 4,
            _ => 1,
        }
    }

    /// Bytes of a warp's accumulators of a work tile: one per row for one token, otherwise all that
    /// the tensor cores leave in the lanes.
    pub const fn gemv_accumulator_bytes(self) -> u32 {
        let each =
            if self.tile_n == 1 { TILE_ROWS >> self.gemv_segment_bits(0) } else { TILE_ROWS * self.tile_n };
        self.row_tiles() * each * 4
    }

    /// Bytes that a warp keeps of a work tile: accumulators and, for several tokens, a flag in 16
    /// bytes.
    pub const fn gemv_work_tile_bytes(self) -> u32 {
        self.gemv_accumulator_bytes() + if self.tile_n == 1 { 0 } else { 16 }
    }

    /// Offset in a warp's shared memory of its results. They follow the ring, or reuse it where
    /// there is one work tile: shared memory that is not taken serves as L1 cache.
    pub const fn gemv_results_offset(self) -> u32 {
        if self.gemv_work_tiles() == 1 { 0 } else { self.gemv_ring_bytes() }
    }

    /// Bytes of a warp's shared memory.
    pub const fn gemv_warp_bytes(self) -> u32 {
        let ring = self.gemv_ring_bytes();
        let end = self.gemv_results_offset() + self.gemv_work_tiles() * self.gemv_work_tile_bytes();
        if ring > end { ring } else { end }
    }
}

/// Token tiles of a launch, each with thread blocks of its own.
#[derive(Clone, Copy, Debug)]
pub struct TokenTiles {
    /// The number of token tiles.
    pub count: u64,
    /// Base-2 logarithm of the tokens of one.
    pub bits: u32,
}

impl TokenTiles {
    /// The token tiles of `tokens` tokens, for kernels that take at most `tile_n` at a time.
    pub fn of(tokens: u64, tile_n: u32) -> Self {
        let each = (tokens.min(u64::from(tile_n)) as u32).next_power_of_two();
        Self { count: tokens.div_ceil(u64::from(each)), bits: each.ilog2() }
    }
}

/// Parameters of the kernels that do not copy ahead, for up to eight tokens at a time.
///
/// Tensor cores multiply 16 tile rows by eight tile columns. With fewer tokens than columns, tile
/// rows and columns next to each other hold segments: parts of the same row and of the same token.
/// Kernels divide by powers of two only, given by their base-2 logarithms.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlainParams {
    /// The matrix.
    pub shape: WeightsShape,
    /// Tokens, at least 1; fewer than [`TOKEN_LIMIT`](super::TOKEN_LIMIT).
    pub tokens: u64,
    /// Logarithm of the slices of K (sliced-K). The warps of a warp group share rows, and each has
    /// a slice of their columns. A thread block has at least one warp per slice.
    pub slice_bits: u32,
    /// Logarithm of the segments: up to 3.
    pub segment_bits: u32,
    /// Logarithm of the tokens of a token tile.
    pub token_tile_bits: u32,
    /// Logarithm of the tiles of a warp.
    pub tile_bits: u32,
    /// Token tiles, each with thread blocks of its own: fewer than 2³¹ thread blocks in all.
    pub token_tiles: Divider,
}

impl PlainParams {
    /// Parameters for the tiles and slices of a configuration and token tiles of at most eight
    /// tokens.
    ///
    /// `None` if there is nothing to multiply, or more than a launch can count, or if tiles or
    /// slices are not powers of two, or there are more slices than warps in a thread block.
    pub fn new(
        config: GemmConfig,
        shape: WeightsShape,
        tokens: u64,
        token_tiles: TokenTiles,
    ) -> Option<Self> {
        let (tiles, slices) = (config.row_tiles().max(1), config.slices);
        let shared = tiles.is_power_of_two() && slices.is_power_of_two() && slices <= PLAIN_THREADS / WARP;
        if !shared || !shape.counts(tokens) || 1 << token_tiles.bits > TILE_COLUMNS {
            return None;
        }
        let params = Self {
            shape,
            tokens,
            slice_bits: slices.ilog2(),
            segment_bits: TILE_COLUMNS.ilog2() - token_tiles.bits,
            tile_bits: tiles.ilog2(),
            token_tile_bits: token_tiles.bits,
            token_tiles: Divider::new(token_tiles.count),
        };
        (params.thread_blocks() < 1 << 31).then_some(params)
    }

    /// Logarithm of the rows in half a tile.
    #[inline(always)]
    pub const fn half_row_bits(&self) -> u32 {
        (TILE_ROWS / 2).ilog2() - self.segment_bits
    }

    /// Logarithm of the rows that a warp group shares.
    #[inline(always)]
    pub const fn group_row_bits(&self) -> u32 {
        TILE_ROWS.ilog2() + self.tile_bits - self.segment_bits
    }

    /// Logarithm of the warp groups in a thread block.
    #[inline(always)]
    pub const fn group_bits(&self) -> u32 {
        (PLAIN_THREADS / WARP).ilog2() - self.slice_bits
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.shape.rows.div_ceil(1 << (self.group_bits() + self.group_row_bits())) * self.token_tiles.divisor
    }
}

/// Parameters of the kernels that copy ahead.
///
/// A thread block has one warp group or more. The warps of a group multiply the rows of a work
/// tile, each with its own K-iterations (sliced-K). Work tiles are dealt to the first groups of all
/// thread blocks, then to the second ones, and so on, so that the groups' counts differ by at most
/// one.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemvParams {
    /// The matrix, of fewer columns than [`COLUMN_LIMIT`].
    pub shape: WeightsShape,
    /// Token tiles, each with thread blocks of its own.
    pub token_tiles: Divider,
    /// Tokens.
    pub tokens: u32,
    /// Base-2 logarithm of the tokens of a token tile.
    pub token_tile_bits: u32,
    /// Thread blocks per token tile.
    pub row_blocks: u32,
    /// Work tiles of each warp group, at most [`GemmConfig::gemv_work_tiles`], and the number of
    /// groups that have one more.
    pub work_tiles: [u32; 2],
    /// Warps per thread block.
    pub warps: u32,
    /// Base-2 logarithm of the slices of K: the warps of a group.
    pub slice_bits: u32,
    /// K-iterations per row. Slice `s` takes iterations `s`, `s + slices`, `s + 2 * slices`, …
    pub k_iterations: u32,
}

impl GemvParams {
    /// Parameters for a configuration and token tiles of at most its `tile_n`, with `warps` warps
    /// per thread block, on a GPU with room for `thread_blocks` thread blocks.
    ///
    /// `None` if there is nothing to multiply, or more than a launch can count, or [`COLUMN_LIMIT`]
    /// columns or more, or if slices or warps are not powers of two, or there are more slices than
    /// warps.
    pub fn new(
        config: GemmConfig,
        shape: WeightsShape,
        tokens: u64,
        token_tiles: TokenTiles,
        warps: u32,
        thread_blocks: u32,
    ) -> Option<Self> {
        let slices = config.slices;
        if !slices.is_power_of_two()
            || !warps.is_power_of_two()
            || slices > warps
            || thread_blocks == 0
            || !shape.counts(tokens)
            || shape.cols >= COLUMN_LIMIT
            || 1 << token_tiles.bits > config.tile_n
        {
            return None;
        }
        let segment_bits = config.gemv_segment_bits(token_tiles.bits);
        let groups = u64::from(warps / slices);
        let work_tiles = shape.rows.div_ceil(u64::from(config.tile_m >> segment_bits));
        if work_tiles >= 1 << 31 {
            return None;
        }
        let per_wave = u64::from(thread_blocks) * groups * u64::from(config.gemv_work_tiles());
        let waves = work_tiles.div_ceil(per_wave);
        let row_blocks = work_tiles.div_ceil(groups).min(u64::from(thread_blocks) * waves);
        let (each, more) = (work_tiles / (row_blocks * groups), work_tiles % (row_blocks * groups));
        // In a K-iteration, each lane of a quad has a chunk of each segment.
        let columns = (u64::from(QUAD) * CHUNK as u64) << segment_bits;
        let params = Self {
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
        (params.thread_blocks() < 1 << 31).then_some(params)
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.row_blocks as u64 * self.token_tiles.divisor
    }

    /// Threads of a thread block, and bytes of shared memory for them.
    pub const fn threads_and_shared(&self, config: GemmConfig) -> (u32, u32) {
        (self.warps * WARP, self.warps * config.gemv_warp_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{Mainloop, TOKEN_LIMIT};
    use crate::gemv::BLOCK_LIMIT;
    use microscale_formats::{Dtype, Format};

    fn config(word: &str) -> GemmConfig {
        GemmConfig::from_word(word, Format::Mxfp4, Dtype::Bf16).unwrap()
    }

    #[test]
    fn sizes_that_kernels_cannot_count_are_refused() {
        let gemv = |cols: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols, blocks: cols / 32 };
            let config = config("gemv-16x1-s2");
            GemvParams::new(config, shape, tokens, TokenTiles::of(tokens, 1), 16, 132).is_some()
        };
        assert_eq!([1, 0].map(|tokens| gemv(4096, tokens)), [true, false]);
        let [columns, tokens] = [COLUMN_LIMIT, TOKEN_LIMIT];
        assert_eq!([columns - 128, columns].map(|cols| gemv(cols, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| gemv(4096, tokens)), [true, false]);
        let plain = |blocks: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols: blocks * 32, blocks };
            let token_tiles = TokenTiles::of(tokens, TILE_COLUMNS);
            PlainParams::new(config("plain-16x8-s8"), shape, tokens, token_tiles).is_some()
        };
        assert_eq!([BLOCK_LIMIT - 1, BLOCK_LIMIT].map(|blocks| plain(blocks, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| plain(128, tokens)), [true, false]);
    }

    #[test]
    fn launches_fit_into_any_gpu() {
        // KiB of shared memory per thread block: without opting in, on compute capability 8.6, 8.0,
        // 9.0.
        let warps = [(48, [8, 4, 4, 2]), (99, [16, 8, 8, 4]), (163, [16, 8, 8, 4]), (227, [16, 16, 16, 8])];
        let configs = || GemmConfig::for_operands(Format::Nvfp4, Dtype::F16);
        for (kib, warps) in warps {
            let of_gemv = configs().filter(|config| config.mainloop == Mainloop::Gemv);
            for (config, warps) in of_gemv.zip(warps) {
                let within = config.id().unwrap().kernel().within(kib << 10);
                let expected = (warps * WARP, warps * config.gemv_warp_bytes());
                assert_eq!((within.threads, within.shared), expected, "{config}, {kib} KiB");
            }
            for config in configs() {
                let within = config.id().unwrap().kernel().within(kib << 10);
                assert!(within.shared <= kib << 10, "{config} with {kib} KiB");
                assert!(within.threads >= WARP);
            }
        }
    }
}
