//! Mixtures of experts: routing rows of activations to experts' weights.
//!
//! Each token is multiplied by the weights of a few experts, and each pair of a token and an expert
//! has a row of results. A first kernel sorts the pairs by expert ([`RouteGrid`]). A second one
//! cuts each expert's rows into token tiles ([`PlanGrid`]). Kernels of [`crate::gemm`] multiply
//! each token tile by its expert's weights.

use crate::gemm::schedule::Schedule;
use crate::grid::{Divider, Divider32};
use crate::launch::{Converts, Launch, THREADS, WARP, kernel, kinds};

/// The first number of experts that is too large.
pub const EXPERT_LIMIT: u64 = 1 << 16;

const ROUTE: Launch = (THREADS, THREADS / WARP, 0);
const ONE_WARP: Launch = (WARP, WARP, 0);

kinds! {
    /// The kernels that run before products with experts' weights.
    Experts {
        /// Sorts pairs by expert: one warp per expert.
        Route "route_to_experts" ROUTE Nothing;
        /// Cuts experts' rows into token tiles and schedules them: one warp.
        Plan "plan_experts" ONE_WARP Nothing;
    }
}

/// A token tile: rows of activations and results of one expert. Empty if `end` is `first`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct ExpertTile {
    /// The expert.
    pub expert: u32,
    /// The first row.
    pub first: u32,
    /// The end of the rows.
    pub end: u32,
    /// Not used.
    pub padding: u32,
}

/// The head of a plan. Its [`ExpertTile`]s follow.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct Plan {
    /// The schedule of the GEMM.
    pub schedule: Schedule,
    /// Token tiles with rows. They come first.
    pub tiles: u32,
}

impl Plan {
    /// Bytes of a plan with `token_tiles` token tiles.
    pub const fn bytes(token_tiles: u64) -> u64 {
        (size_of::<Self>() + token_tiles as usize * size_of::<ExpertTile>()) as u64
    }
}

/// The sizes of a sorting. The plan is empty if the lists hold another sorting than requested: in a
/// captured stream they may be older.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sorted {
    /// Pairs.
    pub pairs: u32,
    /// Pairs of a token.
    pub top_k: u32,
}

/// Parameters of the sorting: pairs of a token and an expert by expert, then by number.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RouteGrid {
    /// Pairs per token: divides a pair's number into the token's.
    pub top_k: Divider,
    /// Pairs.
    pub pairs: u32,
    /// Experts.
    pub experts: u32,
}

/// Parameters of the plan: experts' rows are cut into token tiles.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlanGrid {
    /// The expected sorting. With another one, there are no token tiles.
    pub sorted: Sorted,
    /// Experts.
    pub experts: u32,
    /// Experts per lane.
    pub of_lane: u32,
    /// Consecutive rows per sorted pair: the terms of its activations in f32, or 1.
    pub of_pair: u32,
    /// Rows per token tile, at most.
    pub tile_rows: Divider32,
    /// Token tiles, at most. The plan has room for them; the last ones may be empty.
    pub most_tiles: u32,
    /// Row tiles of each expert's weights, for the schedule.
    pub row_tiles: u32,
    /// K-iterations per work tile.
    pub k_iterations: u32,
    /// Thread blocks that the GPU has room for.
    pub at_once: u32,
}

impl PlanGrid {
    /// Parameters for token tiles of `tile_rows` rows, with `of_pair` rows per sorted pair, and
    /// without a schedule. `None` if there are no rows or experts, or more than kernels can count.
    pub fn new(experts: u64, sorted: Sorted, of_pair: u32, tile_rows: u32) -> Option<Self> {
        let pairs = u64::from(sorted.pairs);
        let rows = pairs * u64::from(of_pair);
        if experts == 0 || experts >= EXPERT_LIMIT || rows == 0 || rows >= 1 << 31 {
            return None;
        }
        // Each expert that has rows may have one token tile that is not full.
        let not_full = experts.min(pairs);
        Some(Self {
            sorted,
            experts: experts as u32,
            of_lane: experts.div_ceil(u64::from(WARP)) as u32,
            of_pair,
            tile_rows: Divider32::new(tile_rows),
            most_tiles: (not_full + (rows - not_full) / u64::from(tile_rows.max(1))) as u32,
            row_tiles: 0,
            k_iterations: 1,
            at_once: 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_any_distribution() {
        let of_parts = |experts, pairs, parts, rows| {
            PlanGrid::new(experts, Sorted { pairs, top_k: 1 }, parts, rows).map(|grid| grid.most_tiles)
        };
        let grid = |experts, pairs, rows| of_parts(experts, pairs, 1, rows);
        let most = |experts, pairs, rows| grid(experts, pairs, rows).unwrap();
        // All pairs of one expert, one each, and in between.
        for (counts, rows) in
            [([64, 0, 0], 16), ([1, 1, 1], 16), ([17, 17, 30], 16), ([25, 49, 3], 24), ([5, 0, 2], 1)]
        {
            let tiles: u32 = counts.iter().map(|count| u32::div_ceil(*count, rows)).sum();
            assert!(tiles <= most(3, counts.iter().sum(), rows), "{counts:?}");
            let tiles: u32 = counts.iter().map(|count| u32::div_ceil(3 * count, rows)).sum();
            assert!(tiles <= of_parts(3, counts.iter().sum(), 3, rows).unwrap(), "{counts:?}");
        }
        assert_eq!([most(32, 4, 16), most(32, 64, 1), most(32, 64, 16)], [4, 64, 34]);
        assert!(grid(0, 1, 1).is_none() && grid(1, 0, 1).is_none());
        assert!(grid(EXPERT_LIMIT, 1, 1).is_none() && grid(1, 1 << 31, 1).is_none());
        assert!(of_parts(1, 1 << 30, 3, 1).is_none());
    }

    #[test]
    fn tiles_follow_the_plan() {
        assert_eq!(Plan::bytes(3), size_of::<Plan>() as u64 + 48);
        assert!(size_of::<Plan>().is_multiple_of(16));
    }
}
