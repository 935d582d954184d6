//! The structures that travel as arguments of the kernels for products.

use crate::args::Divider;
use crate::kernels::{Ahead, QUAD, ROW_PLACES, TOKEN_PLACES, WARP, WEIGHTS_THREADS};
use microscale_formats::dot::CHUNK;

/// More blocks than a row may have: kernels count them in 32 bits, and a few steps past the last.
pub const BLOCK_LIMIT: u64 = 1 << 26;
/// More tokens than are multiplied with weights at once.
pub const TOKEN_LIMIT: u64 = 1 << 24;
/// More columns than weights may have for the kernels that copy ahead: they count bytes in 32 bits.
pub const AHEAD_COLUMN_LIMIT: u64 = 1 << 24;

/// How the rows of two quantized tensors are matrices and vectors to multiply with each other.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemvGrid {
    /// Rows of a matrix, at least 1.
    pub rows: u64,
    /// Matrices.
    pub batches: u64,
    /// Blocks in a row, of matrices and vectors; fewer than [`BLOCK_LIMIT`].
    pub blocks: u64,
    /// Rows of the vectors' tensor from one matrix' vector to the next.
    pub vector_stride: u64,
    /// Warps that a matrix' rows fall to: with those of all matrices, fewer than 2³¹.
    pub groups: Divider,
}

/// Weights, a quantized matrix, to multiply with tokens' activations, which are not quantized.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsShape {
    /// Rows of the matrix, at least 1.
    pub rows: u64,
    /// Its columns, and a token's activations.
    pub cols: u64,
    /// Blocks in a row; fewer than [`BLOCK_LIMIT`].
    pub blocks: u64,
}

impl WeightsShape {
    /// Whether kernels can count what there is, with so many tokens, and there is something.
    const fn counts(&self, tokens: u64) -> bool {
        self.rows > 0 && self.blocks < BLOCK_LIMIT && tokens > 0 && tokens < TOKEN_LIMIT
    }
}

/// How weights are multiplied with up to eight tokens at a time.
///
/// Tensor cores multiply 16 places of rows with eight places of tokens. With fewer tokens than that, parts of the
/// same row and of the same token lie in places side by side: segments. Counts that kernels divide by are powers of
/// two, given by their exponents.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WeightsGrid {
    /// What is multiplied.
    pub shape: WeightsShape,
    /// Tokens, at least 1; fewer than [`TOKEN_LIMIT`].
    pub tokens: u64,
    /// Of the warps that share rows, each with a part of the columns: at most as many as a thread block has.
    pub split_bits: u32,
    /// Of the segments: up to 3.
    pub segment_bits: u32,
    /// Of the tokens of a lot.
    pub lot_bits: u32,
    /// Of the tiles that a warp has.
    pub tile_bits: u32,
    /// Lots that the tokens fall to, one for each thread block with the same rows: fewer than 2³¹ thread blocks in all.
    pub lots: Divider,
}

impl WeightsGrid {
    /// With so many tiles a warp, and rows shared by so many warps; `None` if there is nothing to multiply, or more
    /// than a launch can count, or if these are not powers of two or more warps than a thread block has.
    pub fn new(shape: WeightsShape, tokens: u64, tiles: u32, splits: u32) -> Option<Self> {
        let shared = tiles.is_power_of_two() && splits.is_power_of_two() && splits <= WEIGHTS_THREADS / WARP;
        if !shared || !shape.counts(tokens) {
            return None;
        }
        let lot = (tokens as u32).next_power_of_two().min(TOKEN_PLACES);
        let grid = Self {
            shape,
            tokens,
            split_bits: splits.ilog2(),
            segment_bits: (TOKEN_PLACES / lot).ilog2(),
            tile_bits: tiles.ilog2(),
            lot_bits: lot.ilog2(),
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// The exponent of the rows that half a tile stands for.
    #[inline(always)]
    pub const fn half_row_bits(&self) -> u32 {
        (ROW_PLACES / 2).ilog2() - self.segment_bits
    }

    /// The exponent of the rows that a group of warps shares.
    #[inline(always)]
    pub const fn group_row_bits(&self) -> u32 {
        ROW_PLACES.ilog2() + self.tile_bits - self.segment_bits
    }

    /// The exponent of the groups in a thread block.
    #[inline(always)]
    pub const fn group_bits(&self) -> u32 {
        (WEIGHTS_THREADS / WARP).ilog2() - self.split_bits
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.shape.rows.div_ceil(1 << (self.group_bits() + self.group_row_bits())) * self.lots.divisor
    }
}

/// How weights are multiplied by the kernels that copy ahead.
///
/// The rows of a turn are multiplied by the warps of a team, each with steps of its own; a thread block has one team or
/// several. Teams take turns' rows one after the other, the first teams of all thread blocks first, so that thread
/// blocks have as many turns, or one more.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TurnsGrid {
    /// What is multiplied: columns fewer than [`AHEAD_COLUMN_LIMIT`].
    pub shape: WeightsShape,
    /// Lots that the tokens fall to. Each has thread blocks of its own.
    pub lots: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of those of a lot.
    pub lot_bits: u32,
    /// Thread blocks of a lot.
    pub row_blocks: u32,
    /// Turns that each team has, and how many teams have one more: at most [`Ahead::turns`] each.
    pub turns: [u32; 2],
    /// Warps of a thread block.
    pub warps: u32,
    /// The exponent of the warps of a team.
    pub split_bits: u32,
    /// Steps of a row: every so many-th is a warp's.
    pub steps: u32,
}

impl TurnsGrid {
    /// For a kernel, with so many warps of a team and of a thread block, on a GPU that has so many thread blocks at
    /// once; `None` if there is nothing to multiply, or more than a launch can count, or [`AHEAD_COLUMN_LIMIT`], or if
    /// warps are not powers of two or a team has more than a thread block.
    pub fn new(
        kernel: Ahead,
        shape: WeightsShape,
        tokens: u64,
        [splits, warps]: [u32; 2],
        at_once: u32,
    ) -> Option<Self> {
        let teams = splits.is_power_of_two() && warps.is_power_of_two() && splits <= warps;
        if !teams || at_once == 0 || !shape.counts(tokens) || shape.cols >= AHEAD_COLUMN_LIMIT {
            return None;
        }
        let lot = if kernel.one { 1 } else { (tokens as u32).next_power_of_two().min(TOKEN_PLACES) };
        let segment_bits = kernel.segment_bits(lot.ilog2());
        let teams = u64::from(warps / splits);
        let turns = shape.rows.div_ceil(u64::from((kernel.tiles * ROW_PLACES) >> segment_bits));
        if turns >= 1 << 31 {
            return None;
        }
        let waves = turns.div_ceil(u64::from(at_once) * teams * u64::from(kernel.turns()));
        let row_blocks = turns.div_ceil(teams).min(u64::from(at_once) * waves);
        let (each, more) = (turns / (row_blocks * teams), turns % (row_blocks * teams));
        let grid = Self {
            shape,
            lots: Divider::new(tokens.div_ceil(u64::from(lot))),
            tokens: tokens as u32,
            lot_bits: lot.ilog2(),
            row_blocks: row_blocks as u32,
            turns: [each as u32, more as u32],
            warps,
            split_bits: splits.ilog2(),
            // A chunk for each of four lanes, in each segment.
            steps: u32::try_from(shape.cols.div_ceil((u64::from(QUAD) * CHUNK as u64) << segment_bits))
                .ok()?,
        };
        (grid.thread_blocks() < 1 << 31).then_some(grid)
    }

    /// Thread blocks of a launch.
    pub const fn thread_blocks(&self) -> u64 {
        self.row_blocks as u64 * self.lots.divisor
    }

    /// Threads in a thread block, and bytes of shared memory for them.
    pub const fn threads_and_shared(&self, kernel: Ahead) -> (u32, u32) {
        (self.warps * WARP, self.warps * kernel.warp_bytes())
    }
}

/// What results are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OutputDtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        let ahead = |cols: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols, blocks: cols / 32 };
            TurnsGrid::new(Ahead { one: true, tiles: 1 }, shape, tokens, [2, 16], 132).is_some()
        };
        assert_eq!([1, 0].map(|tokens| ahead(4096, tokens)), [true, false]);
        let [columns, tokens] = [AHEAD_COLUMN_LIMIT, TOKEN_LIMIT];
        assert_eq!([columns - 128, columns].map(|cols| ahead(cols, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| ahead(4096, tokens)), [true, false]);
        let by_loads = |blocks: u64, tokens| {
            let shape = WeightsShape { rows: 100, cols: blocks * 32, blocks };
            WeightsGrid::new(shape, tokens, 2, 8).is_some()
        };
        assert_eq!([BLOCK_LIMIT - 1, BLOCK_LIMIT].map(|blocks| by_loads(blocks, 1)), [true, false]);
        assert_eq!([tokens - 1, tokens].map(|tokens| by_loads(128, tokens)), [true, false]);
    }
}
