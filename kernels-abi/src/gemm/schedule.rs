//! The schedule of the GEMM: which thread block has which work tiles, whole or in part.

use crate::grid::Divider32;

/// Split-K is chosen if it keeps at least this fraction of the thread blocks busy. An idle eighth
/// costs less than reading the same weights at different times, as stream-K does.
const NEARLY: [u32; 2] = [7, 8];
/// Row tiles per group, at most, where token tiles share weights. With 32 row tiles of 128 rows,
/// about four token tiles of 256 tokens are multiplied at a time.
const MOST_ROW_TILES: u32 = 32;

/// The distribution of work tiles to persistent thread blocks.
///
/// All thread blocks have the same number of whole work tiles. The remaining tiles, fewer than
/// thread blocks, are split. If that keeps nearly all thread blocks busy, each tile is split
/// between the same number of thread blocks (split-K). Otherwise the K-iterations of all these
/// tiles, in their order, are divided between all thread blocks (stream-K). Split tiles are
/// multiplied at the same time, so that shared operands come from the L2 cache. Each thread block
/// stores its partial sums of a split tile. The last one to arrive adds them up in the order of K.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Schedule {
    /// Work tiles per group of row tiles: divides a work tile's number into the group's number.
    /// Thread blocks that run at the same time have several row tiles and several token tiles, so
    /// that less is read from memory.
    pub row_group: Divider32,
    /// Row tiles per group: divides a work tile's number in its group into the token tile's number.
    pub row_tiles: Divider32,
    /// Shared K-iterations per group of thread blocks: of one tile (split-K) or of all (stream-K).
    pub group: Divider32,
    /// Thread blocks per group.
    pub sharers: Divider32,
    /// Shared K-iterations per thread block. The last one of a group may have fewer.
    pub share: Divider32,
    /// All shared K-iterations.
    pub shared: u32,
    /// Thread blocks with work.
    pub thread_blocks: u32,
    /// Whole work tiles per thread block.
    pub waves: u32,
    /// The number of the first shared work tile.
    pub first_shared: u32,
    /// 1 with clusters of two thread blocks. After the exchange, each has the sums of half of the
    /// tokens.
    pub paired: u32,
}

impl Schedule {
    /// Schedules work tiles of `k_iterations` K-iterations, fewer than 2³¹ in all, for a GPU with
    /// room for `at_once` thread blocks.
    pub fn new(row_tiles: u32, token_tiles: u32, k_iterations: u32, at_once: u32) -> Self {
        // The largest power of two in the row tiles.
        let of_group = MOST_ROW_TILES.min(1 << row_tiles.trailing_zeros().min(u32::BITS - 1));
        Self::in_groups([row_tiles, of_group], token_tiles, k_iterations, at_once)
    }

    /// [`Self::new`] for experts' rows. Token tiles do not share weights, so a group has all row
    /// tiles of one token tile. A kernel calls it.
    #[inline(always)]
    pub fn of_experts(row_tiles: u32, token_tiles: u32, k_iterations: u32, at_once: u32) -> Self {
        Self::in_groups([row_tiles, row_tiles], token_tiles, k_iterations, at_once)
    }

    /// The schedule with `of_group` row tiles per group. It divides `row_tiles`.
    #[inline(always)]
    fn in_groups([row_tiles, of_group]: [u32; 2], token_tiles: u32, k_iterations: u32, at_once: u32) -> Self {
        let tiles = row_tiles * token_tiles;
        let waves = tiles / at_once.max(1);
        let left = tiles - waves * at_once;
        let shared = left * k_iterations;
        // Split-K: thread blocks per tile.
        let per_tile = (at_once / left.max(1)).min(k_iterations);
        let split = left * per_tile * NEARLY[1] >= at_once.min(shared) * NEARLY[0];
        let (group, sharers) = if split { (k_iterations, per_tile) } else { (shared, at_once.min(shared)) };
        let [group, sharers] = [group, sharers].map(|count| count.max(1));
        let thread_blocks = if waves > 0 { at_once } else { shared / group * sharers };
        let [row_group, share] = [token_tiles * of_group, group.div_ceil(sharers)];
        let [row_group, row_tiles, group, sharers, share] =
            [row_group, of_group, group, sharers, share].map(Divider32::new);
        let first_shared = waves * thread_blocks;
        Self {
            row_group,
            row_tiles,
            group,
            sharers,
            share,
            shared,
            thread_blocks,
            waves,
            first_shared,
            paired: 0,
        }
    }

    /// Schedules work tiles of `k_iterations` K-iterations, fewer than 2³¹ in all, for a GPU with
    /// room for `pairs` clusters of two. All work tiles are split between the same number of
    /// clusters. `None` if there are fewer clusters than work tiles, or a thread block would have
    /// no K-iteration.
    pub fn in_pairs(row_tiles: u32, token_tiles: u32, k_iterations: u32, pairs: u32) -> Option<Self> {
        let tiles = row_tiles.checked_mul(token_tiles).filter(|tiles| (1..=pairs).contains(tiles))?;
        // The fewest thread blocks with this share.
        let share = k_iterations.div_ceil(2 * (pairs / tiles));
        let sharers = k_iterations.div_ceil(share).next_multiple_of(2);
        let schedule = Self::new(row_tiles, token_tiles, k_iterations, tiles * sharers);
        let all_work = share * (sharers - 1) < k_iterations;
        let split = schedule.waves == 0 && schedule.sharers.divisor == sharers;
        (all_work && split).then_some(Self { paired: 1, ..schedule })
    }

    /// The row tile and the token tile of a work tile.
    #[inline(always)]
    pub fn row_and_token_tile(&self, work_tile: u32) -> [u32; 2] {
        let (group, rest) = self.row_group.divide(work_tile);
        let (token_tile, row_tile) = self.row_tiles.divide(rest);
        [group * self.row_tiles.divisor + row_tile, token_tile]
    }

    /// The first shared K-iteration of a thread block. Its last one precedes the next thread
    /// block's first.
    #[inline(always)]
    pub fn first_shared_k_iteration(&self, thread_block: u32) -> u32 {
        let (group, part) = self.sharers.divide(thread_block);
        let [of_group, share] = [self.group, self.share].map(|divider| divider.divisor);
        // Neither overflows: there are no more thread blocks than shared k-iterations, or counters.
        (group * of_group).saturating_add((part * share).min(of_group)).min(self.shared)
    }

    /// The thread block that has a shared K-iteration.
    #[inline(always)]
    pub fn sharer(&self, k_iteration: u32) -> u32 {
        let (group, rest) = self.group.divide(k_iteration);
        group * self.sharers.divisor + self.share.divide(rest).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_k_iteration_falls_to_one_thread_block() {
        for (row_tiles, token_tiles, k_iterations, at_once) in [
            (32, 1, 224, 132),
            (1, 1, 1, 132),
            (20, 4, 23, 7),
            (2, 5, 32, 10),
            (1, 10, 10, 5),
            (32, 8, 224, 132),
            (32, 32, 32, 132),
            (112, 1, 64, 132),
            (12, 1, 23, 132),
            (23, 27, 12, 132),
            (0, 3, 5, 4),
            (3, 0, 5, 4),
        ] {
            let args = (row_tiles, token_tiles, k_iterations, at_once);
            for schedule in
                [Schedule::new, Schedule::of_experts].map(|new| new(args.0, args.1, args.2, args.3))
            {
                let tiles = row_tiles * token_tiles;
                assert_eq!(schedule.waves * schedule.thread_blocks, schedule.first_shared);
                assert!(tiles - schedule.first_shared < at_once, "there are counters for all");
                let mut next = 0;
                // A launch may have more thread blocks than have work.
                for block in 0..at_once.max(schedule.thread_blocks) {
                    assert_eq!(
                        schedule.first_shared_k_iteration(block),
                        next,
                        "{row_tiles} {token_tiles} {k_iterations}"
                    );
                    let end = schedule.first_shared_k_iteration(block + 1);
                    assert!(end - next <= k_iterations, "parts of no more than two tiles");
                    assert!((next..end).all(|k_iteration| schedule.sharer(k_iteration) == block));
                    assert!(end - next <= schedule.share.divisor);
                    next = end;
                }
                assert_eq!(next, (tiles - schedule.first_shared) * k_iterations);
                for tile in 0..tiles {
                    let [row, token] = schedule.row_and_token_tile(tile);
                    assert!(row < row_tiles && token < token_tiles);
                    // The mapping can be inverted, so it is one to one.
                    let of_group = schedule.row_tiles.divisor;
                    let (group, in_group) = (row / of_group, row % of_group);
                    assert_eq!(tile, (group * token_tiles + token) * of_group + in_group);
                }
            }
        }
    }

    #[test]
    fn pairs_share_every_work_tile_evenly() {
        for (row_tiles, token_tiles, k_iterations, sharers) in [
            (16, 1, 16, 8),
            (56, 1, 16, 2),
            (32, 1, 112, 4),
            (64, 1, 32, 2),
            (2, 1, 1, 0),
            (16, 5, 16, 0),
            (20, 1, 20, 0),
        ] {
            let schedule = Schedule::in_pairs(row_tiles, token_tiles, k_iterations, 66);
            assert_eq!(schedule.map_or(0, |schedule| schedule.sharers.divisor), sharers);
            let Some(schedule) = schedule else { continue };
            assert_eq!([schedule.paired, schedule.waves, schedule.first_shared], [1, 0, 0]);
            assert_eq!(schedule.thread_blocks, row_tiles * token_tiles * sharers);
            for block in 0..schedule.thread_blocks {
                let [start, end] = [block, block + 1].map(|block| schedule.first_shared_k_iteration(block));
                assert!(
                    start < end,
                    "each has something to do, or the other of the pair would wait for ever"
                );
                assert_eq!(start / k_iterations, (end - 1) / k_iterations, "of one work tile");
                assert_eq!(start / k_iterations, block / sharers);
            }
        }
    }
}
