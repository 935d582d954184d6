//! The grids of the GEMM: how its kernels are launched, and what they are told.

use crate::gemm::{ARRANGE_THREADS, COLUMNS, COUNTERS, Edition, MOST_TILES, ScalePieces, TokenTile};
use crate::grid::Divider;
use crate::launch::WARP;
use crate::schedule::Schedule;
use crate::weights::{PIPELINED_COLUMN_LIMIT, TOKEN_LIMIT, WeightsShape};

/// How activations are arranged: images of each k-iteration of each token tile, in pieces of 16 bytes. Tokens and columns
/// that do not exist are zeros.
///
/// Weights are decoded eight at a time, to four pairs, and activations come in the same pairs. For warps, a piece has the pairs of
/// one token and chunk; pieces come by chunk, then token, then by the number of their eight in the chunk. For warp groups, a piece
/// has one of these pairs of each of the four chunks of a token, and eight tokens' pieces make a core matrix; these come by pair, then
/// by eight of the chunk, then by eight of tokens, so that the first tokens' are together.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrangeGrid {
    /// Columns: fewer than [`PIPELINED_COLUMN_LIMIT`].
    pub cols: u64,
    /// Images of a token tile, which divide the number of one among those of all.
    pub images: Divider,
    /// Tokens.
    pub tokens: u32,
    /// The exponent of the tokens of a tile.
    pub tile_bits: u32,
    /// Eights of tokens in all tiles, times images: a warp has one.
    pub eights: u32,
    /// 1 if every token's activations start on 16 bytes.
    pub aligned: u32,
    /// 1 for core matrices, as warp groups read them.
    pub core_matrices: u32,
    /// Thread blocks, whose warps take turns.
    pub thread_blocks: u32,
}

impl ArrangeGrid {
    /// Makes a grid, for a GPU with so many multiprocessors; `None` if there is nothing to arrange, or more than a launch can count.
    pub fn new(
        (edition, tile): (Edition, TokenTile),
        cols: u64,
        tokens: u64,
        aligned: bool,
        multiprocessors: u32,
    ) -> Option<Self> {
        if tokens == 0 || cols == 0 || tokens >= TOKEN_LIMIT || cols >= PIPELINED_COLUMN_LIMIT {
            return None;
        }
        let of_k_iteration = u64::from(edition.images(tile));
        let images = cols.div_ceil(u64::from(COLUMNS) * of_k_iteration) * of_k_iteration;
        let eights = tokens.next_multiple_of(u64::from(tile.tokens())) / 8;
        let eights = images.checked_mul(eights).filter(|eights| *eights < 1 << 31)?;
        let all = (eights as u32).div_ceil(ARRANGE_THREADS / WARP);
        Some(Self {
            cols,
            images: Divider::new(images),
            tokens: tokens as u32,
            tile_bits: tile.tokens().ilog2(),
            eights: eights as u32,
            aligned: u32::from(aligned),
            core_matrices: u32::from(edition == Edition::Wgmma),
            thread_blocks: if edition.starts_beside(tile) { all.min(multiprocessors) } else { all },
        })
    }

    /// Bytes of the arranged activations.
    pub const fn bytes(&self) -> u64 {
        self.eights as u64 * 8 * COLUMNS as u64 * 2
    }
}

/// A product of weights and tokens, or experts' rows, as its kernel is told.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GemmGrid {
    /// The weights, or those of an expert.
    pub shape: WeightsShape,
    /// K-iterations of a work tile, which divide the number of one among those of all shared tiles.
    pub k_iterations: Divider,
    /// The schedule. That of experts' rows is in their plan, and this one is what it would be if all token tiles existed.
    pub schedule: Schedule,
    /// Tokens.
    pub tokens: u32,
    /// Bytes of shared memory, in which are as many [`Stage`](crate::gemm::Stage)s as there is room for.
    pub shared: u32,
}

impl GemmGrid {
    /// Makes a grid, for a GPU that has room for so many thread blocks at once, with so many bytes of shared memory each.
    ///
    /// `None` if there is nothing to multiply, or more than kernels can count, or if there is no room for two stages.
    pub fn new(
        (edition, tile): (Edition, TokenTile),
        shape: WeightsShape,
        tokens: u64,
        at_once: u32,
        shared: u32,
    ) -> Option<Self> {
        if !shape.counts(tokens) || shape.cols == 0 || at_once == 0 || at_once > COUNTERS / MOST_TILES {
            return None;
        }
        let stage = edition.stage(tile, tokens as u32, ScalePieces::MOST);
        let token_tiles = tokens.div_ceil(u64::from(tile.tokens()));
        let k_iterations = shape.cols.div_ceil(u64::from(stage.images * COLUMNS));
        let row_tiles = shape.rows.div_ceil(u64::from(tile.rows()));
        let tiles = token_tiles.checked_mul(row_tiles)?;
        // K-iterations are counted in 32 bits, with room for a divider's estimate.
        if tiles.checked_mul(k_iterations).is_none_or(|all| all >= 1 << 31) || shape.rows >= 1 << 31 {
            return None;
        }
        Some(Self {
            shape,
            k_iterations: Divider::new(k_iterations),
            schedule: Schedule::new(row_tiles as u32, token_tiles as u32, k_iterations as u32, at_once),
            tokens: tokens as u32,
            shared,
        })
        .filter(|_| stage.count(shared) >= 2)
    }

    /// The grid with work tiles for pairs of thread blocks, of which there is room for so many at once; none if that does not do.
    pub fn in_pairs(self, (edition, tile): (Edition, TokenTile), pairs: u32) -> Option<Self> {
        let k_iterations = self.k_iterations.divisor as u32;
        let row_tiles = self.shape.rows.div_ceil(u64::from(tile.rows())) as u32;
        let token_tiles = self.tokens.div_ceil(tile.tokens());
        let schedule = Schedule::in_pairs(row_tiles, token_tiles, k_iterations, pairs)?;
        edition.has_pairs(tile).then_some(Self { schedule, ..self })
    }

    /// Tokens of the largest token tile.
    pub fn most_tokens(&self, tile: TokenTile) -> u32 {
        self.tokens.min(tile.tokens())
    }

    /// Work tiles of which a thread block has k-iterations, at most, if one that it shares is one of them.
    pub fn most_work_tiles(&self) -> u64 {
        u64::from(self.schedule.waves) + u64::from(self.schedule.shared != 0)
    }

    /// K-iterations that a thread block has, at most.
    pub fn most_k_iterations(&self) -> u64 {
        let Schedule { waves, shared, share, .. } = self.schedule;
        let shared = if shared == 0 { 0 } else { u64::from(share.divisor) };
        u64::from(waves) * self.k_iterations.divisor + shared
    }

    /// Thread blocks that share a work tile, at most; 1 if none is shared.
    pub fn most_sharers(&self) -> u64 {
        let Schedule { shared, share, .. } = self.schedule;
        if shared == 0 { 1 } else { self.k_iterations.divisor.div_ceil(u64::from(share.divisor)) }
    }
}

/// Bytes of the sums that so many thread blocks leave: each of its first shared tile, and of its last.
pub const fn left_bytes(thread_blocks: u32, tile: TokenTile) -> u64 {
    2 * thread_blocks as u64 * tile.sums_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::MOST_SHARED;

    fn grid(rows: u64, cols: u64, tokens: u64, at_once: u32) -> Option<GemmGrid> {
        let shape = WeightsShape { rows, cols, blocks: cols.div_ceil(32) };
        GemmGrid::new((Edition::Mma, TokenTile::N64), shape, tokens, at_once, MOST_SHARED)
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        assert!(grid(256, 128, 0, 4).is_none());
        assert!(grid(0, 128, 1, 4).is_none());
        assert!(grid(256, 0, 1, 4).is_none());
        assert!(grid(1 << 31, 128, 1, 4).is_none());
        assert!(grid(1 << 30, 1 << 20, 1 << 20, 4).is_none());
        let arranged = |cols, tokens| ArrangeGrid::new((Edition::Mma, TokenTile::N16), cols, tokens, true, 4);
        assert!(arranged(128, TOKEN_LIMIT).is_none());
        assert!(arranged(PIPELINED_COLUMN_LIMIT, 1).is_none());
        assert!(arranged(1 << 23, 1 << 20).is_none());
        assert_eq!(arranged(130, 17).unwrap().bytes(), 2 * 32 * 256);
    }
}
