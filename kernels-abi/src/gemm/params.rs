//! Parameters of the packing kernel, and of the kernels that multiply packed activations.

use super::packing::PACK_THREADS;
use super::schedule::Schedule;
use super::stage::ScalePieces;
use super::{
    COLUMN_LIMIT, GemmConfig, MOST_ROW_TILES, PACK_COLUMNS, TILE_COLUMNS, TOKEN_LIMIT, WeightsShape,
};
use crate::grid::{Divider, Divider32};
use crate::launch::WARP;

/// Semaphores, one per tile of 16 rows of the split work tiles: zeros before a launch and after it.
/// There are fewer split work tiles than thread blocks.
pub const SEMAPHORES: u32 = 1 << 14;

/// Parameters of the packing kernel.
///
/// A pack holds the activations of one token tile and [`PACK_COLUMNS`] columns, in pieces of 16
/// bytes. Tokens and columns that do not exist are zeros. Weights are decoded eight at a time, to
/// four pairs, and activations are packed in the same pairs.
///
/// For `mma`, a piece has the pairs of one token and chunk; pieces are ordered by chunk, then
/// token, then eight of the chunk. For `wgmma`, a piece has one of these pairs of each of the four
/// chunks of a token. The pieces of eight tokens make a core matrix; core matrices are ordered by
/// pair, then eight of the chunk, then eight of the tokens, so that the first tokens come first.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PackParams {
    /// Columns: fewer than [`COLUMN_LIMIT`].
    pub cols: u64,
    /// Packs per token tile: divides the number of a pack of all token tiles.
    pub packs: Divider,
    /// Tokens.
    pub tokens: u32,
    /// Eights of tokens per token tile: divides the number of an eight of all packs.
    pub tile_eights: Divider32,
    /// Eights of tokens in all tiles, times packs: one per warp.
    pub eights: u32,
    /// 1 if every token's activations start on 16 bytes.
    pub aligned: u32,
    /// 1 for core matrices, which `wgmma` reads.
    pub core_matrices: u32,
    /// Thread blocks.
    pub thread_blocks: u32,
    /// Bytes of a token in a pack.
    pub token_bytes: u32,
    /// Rows of MXFP4 weights whose largest scale the kernel finds, for fast accumulation; 0 for
    /// other products.
    pub rows: u32,
    /// Blocks per row of these weights.
    pub blocks: u32,
    /// FP8: packs of a K-iteration, one or two.
    pub iteration_packs: u32,
    /// FP8: 1 if a multiplication has all four words of a chunk, 0 if it has one word of each of a
    /// pack's four chunks.
    pub by_block: u32,
}

impl PackParams {
    /// Parameters for the packed activations of a configuration. `None` if there is nothing to
    /// pack, or more than a launch can count.
    pub fn new(config: GemmConfig, cols: u64, tokens: u64, aligned: bool) -> Option<Self> {
        if tokens == 0 || cols == 0 || tokens >= TOKEN_LIMIT || cols >= COLUMN_LIMIT {
            return None;
        }
        let per_k_iteration = u64::from(config.packs());
        let packs = cols.div_ceil(u64::from(PACK_COLUMNS) * per_k_iteration) * per_k_iteration;
        let eights = tokens.next_multiple_of(u64::from(config.tile_n)) / 8;
        let eights = packs.checked_mul(eights).filter(|eights| *eights < 1 << 31)?;
        let packing = Self {
            cols,
            packs: Divider::new(packs),
            tokens: tokens as u32,
            tile_eights: Divider32::new(config.tile_n / TILE_COLUMNS),
            eights: eights as u32,
            aligned: u32::from(aligned),
            core_matrices: u32::from(config.mainloop.is_wgmma()),
            thread_blocks: 0,
            token_bytes: config.mainloop.traits().token_bytes,
            rows: 0,
            blocks: 0,
            iteration_packs: config.packs(),
            by_block: u32::from(config.multiplies_blocks()),
        };
        Some(packing.with_thread_blocks())
    }

    /// The parameters with the rows of MXFP4 weights, whose largest scales the kernel finds.
    #[must_use]
    pub fn with_rows(self, shape: WeightsShape) -> Self {
        Self { rows: shape.rows as u32, blocks: shape.blocks as u32, ..self }.with_thread_blocks()
    }

    /// The parameters with thread blocks for a warp per eight, or per row. Warps that take turns
    /// would wait for memory each time, which takes longer than starting more thread blocks.
    fn with_thread_blocks(self) -> Self {
        let thread_blocks = self.eights.max(self.rows).div_ceil(PACK_THREADS / WARP);
        Self { thread_blocks, ..self }
    }

    /// Tokens, rounded up to whole token tiles.
    pub fn padded_tokens(&self) -> u32 {
        let (eights_of_tokens, _) = self.packs.divide_32(self.eights);
        eights_of_tokens * TILE_COLUMNS
    }

    /// Bytes of the packed activations.
    pub const fn bytes(&self) -> u64 {
        self.eights as u64 * 8 * self.token_bytes as u64
    }
}

/// Parameters of a kernel that multiplies packed activations, or experts' rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemmParams {
    /// The weights, or one expert's weights.
    pub shape: WeightsShape,
    /// K-iterations per work tile: divides the number of a K-iteration of all split tiles.
    pub k_iterations: Divider,
    /// The schedule. Experts' rows have theirs in their plan; this one then assumes that all token
    /// tiles exist.
    pub schedule: Schedule,
    /// Tokens.
    pub tokens: u32,
    /// Bytes of shared memory, for all [`Stage`](super::stage::Stage)s that fit.
    pub shared: u32,
    /// 1 if FP8 activations have a scale per pack, 0 for a scale per token.
    pub pack_scales: u32,
    /// Always 0. Without it, there would be four bytes of padding.
    pub reserved: u32,
}

impl GemmParams {
    /// Parameters for a GPU with room for `thread_blocks` thread blocks, with `shared` bytes of
    /// shared memory each.
    ///
    /// `None` if there is nothing to multiply, or more than kernels can count, if two stages do not
    /// fit, or if work tiles cannot be split between the thread blocks of the configuration's
    /// clusters.
    pub fn new(
        config: GemmConfig,
        shape: WeightsShape,
        tokens: u64,
        thread_blocks: u32,
        shared: u32,
    ) -> Option<Self> {
        let clusters = thread_blocks / config.cluster;
        if !shape.counts(tokens)
            || shape.cols == 0
            || clusters == 0
            || thread_blocks > SEMAPHORES / MOST_ROW_TILES
        {
            return None;
        }
        let stage = config.stage(ScalePieces::MOST);
        let token_tiles = tokens.div_ceil(u64::from(config.tile_n));
        let k_iterations = shape.cols.div_ceil(u64::from(stage.packs * PACK_COLUMNS));
        let row_tiles = shape.rows.div_ceil(u64::from(config.tile_m));
        let tiles = token_tiles.checked_mul(row_tiles)?;
        // K-iterations are counted in 32 bits, with room for a divider's estimate.
        if tiles.checked_mul(k_iterations).is_none_or(|all| all >= 1 << 31) || shape.rows >= 1 << 31 {
            return None;
        }
        let [row_tiles, token_tiles] = [row_tiles, token_tiles].map(|count| count as u32);
        let schedule = match config.k_sharers() {
            1 => Schedule::new(row_tiles, token_tiles, k_iterations as u32, clusters),
            _ => Schedule::in_pairs(row_tiles, token_tiles, k_iterations as u32, clusters)?,
        };
        let k_iterations = Divider::new(k_iterations);
        let tokens = tokens as u32;
        Some(Self { shape, k_iterations, schedule, tokens, shared, pack_scales: 0, reserved: 0 })
            .filter(|_| stage.count(shared) >= 2)
    }

    /// Thread blocks of the launch.
    pub fn thread_blocks(&self, config: GemmConfig) -> u32 {
        self.schedule.thread_blocks * config.row_sharers()
    }

    /// Work tiles of a thread block, at most, split ones included.
    pub fn most_work_tiles(&self) -> u64 {
        u64::from(self.schedule.waves) + u64::from(self.schedule.shared != 0)
    }

    /// K-iterations of a thread block, at most.
    pub fn most_k_iterations(&self) -> u64 {
        let Schedule { waves, shared, share, .. } = self.schedule;
        let shared = if shared == 0 { 0 } else { u64::from(share.divisor) };
        u64::from(waves) * self.k_iterations.divisor + shared
    }

    /// Thread blocks that share a work tile, at most; 1 if none is split.
    pub fn most_sharers(&self) -> u64 {
        let Schedule { shared, share, .. } = self.schedule;
        if shared == 0 { 1 } else { self.k_iterations.divisor.div_ceil(u64::from(share.divisor)) }
    }
}

/// The tensor and the boxes of a [`TensorMap`], innermost first: bytes of rows, rows, matrices.
#[derive(Clone, Copy, Debug)]
pub struct WeightsBoxes {
    /// Sizes of the tensor.
    pub sizes: [u64; 3],
    /// Bytes from one row to the next, and from one matrix to the next.
    pub strides: [u64; 2],
    /// Sizes of a box, whose rows have 128 bytes: the width of the swizzle.
    pub box_sizes: [u32; 3],
}

impl WeightsBoxes {
    /// The boxes for a configuration and `matrices` matrices of a shape. `None` if its kernels make
    /// no tensor copies.
    pub fn new(config: GemmConfig, shape: WeightsShape, matrices: u64) -> Option<Self> {
        if !config.mainloop.traits().copies_boxes {
            return None;
        }
        let row = shape.blocks * config.weights.block_bytes() as u64;
        let columns = config.packs() * PACK_COLUMNS;
        Some(Self {
            sizes: [row, shape.rows, matrices],
            strides: [row, row * shape.rows],
            box_sizes: [columns / 2, config.block_rows(), 1],
        })
    }
}

/// A tensor map of the codes of weights for tensor copies (TMA), as the driver encodes it, swizzled
/// in rows of 128 bytes.
///
/// As a kernel parameter it has an alignment of 128 bytes, like the driver's type. rustc aligns no
/// parameter to more than 16, so `cargo xtask build-ptx` sets the alignment in the PTX.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct TensorMap(pub [u64; 16]);

/// Bytes of the partial sums of `thread_blocks` thread blocks. Each has partial sums of its first
/// and of its last split tile.
pub const fn partial_sum_bytes(thread_blocks: u32, config: GemmConfig) -> u64 {
    2 * thread_blocks.div_ceil(config.row_sharers()) as u64 * config.accumulator_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::MOST_SHARED;
    use microscale_formats::{Dtype, Format};

    fn config(word: &str) -> GemmConfig {
        GemmConfig::from_word(word, Format::Mxfp4, Dtype::Bf16).unwrap()
    }

    fn params(rows: u64, cols: u64, tokens: u64, thread_blocks: u32) -> Option<GemmParams> {
        let shape = WeightsShape { rows, cols, blocks: cols.div_ceil(32) };
        GemmParams::new(config("mma-256x64"), shape, tokens, thread_blocks, MOST_SHARED)
    }

    #[test]
    fn sizes_that_kernels_cannot_count_are_refused() {
        assert!(params(256, 128, 0, 4).is_none());
        assert!(params(0, 128, 1, 4).is_none());
        assert!(params(256, 0, 1, 4).is_none());
        assert!(params(1 << 31, 128, 1, 4).is_none());
        assert!(params(1 << 30, 1 << 20, 1 << 20, 4).is_none());
        let packed = |cols, tokens| PackParams::new(config("mma-256x16"), cols, tokens, true);
        assert!(packed(128, TOKEN_LIMIT).is_none());
        assert!(packed(COLUMN_LIMIT, 1).is_none());
        assert!(packed(1 << 23, 1 << 20).is_none());
        assert_eq!(packed(130, 17).unwrap().bytes(), 2 * 32 * 256);
    }
}
