//! The epilogue of the GEMM: adds up what several thread blocks have of a work tile, and has [`super::store`] do the rest.

use microscale_kernels_abi::experts::ExpertTile;
use microscale_kernels_abi::gemm::{MOST_ROW_TILES as MOST_TILES, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::scheduler::{Share, Work, place, sharers};
use super::store::{define, store};
use super::tasks::Task;
use crate::product::operand::Problem;
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// The number that a warp adds to a counter if tensor cores could not compute its part.
const UNUSUAL: u32 = 1 << 16;

/// The problem, and where its results and sums go.
pub(super) struct Output<'a> {
    pub(super) problem: &'a Problem,
    pub(super) work: Work<'a>,
    /// A counter for each tile of 16 rows of shared work tiles, and where thread blocks leave their sums of these.
    pub(super) counters: *mut u32,
    pub(super) left: *mut u8,
}

/// The offset, among a lane's sums of a warp's tiles, of four of a tile.
const fn fours<const SUMS: usize>(tile: usize, four: usize) -> usize {
    (tile * (SUMS / 4) + four) * WARP as usize * 16
}

/// Tokens of which a lane has `SUMS` sums.
const fn tokens_of_sums<const SUMS: usize>() -> u32 {
    SUMS as u32 * WARP / TILE_ROWS
}

/// Tiles of 16 rows in a work tile of which a lane has `SUMS` sums.
pub(super) const fn tiles_of_sums<const SUMS: usize>() -> u32 {
    if tokens_of_sums::<SUMS>() > 64 { MOST_TILES / 2 } else { MOST_TILES }
}

/// The tokens of a work tile of which a thread block has sums: all, or as one of a pair half of them.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The number of the part, and how many there are.
    rank: u32,
    of: u32,
}

impl Part {
    /// All tokens.
    pub(super) const ALL: Self = Self { rank: 0, of: 1 };

    /// Half of them.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn half(rank: u32) -> Self {
        Self { rank, of: 2 }
    }

    /// Returns whether no other thread blocks have sums of the part: if all that share a tile are those of a pair.
    #[inline(always)]
    fn is_all(self, work: &Work<'_>) -> bool {
        self.of > 1 && work.schedule.sharers.divisor == self.of
    }

    /// The first and the last thread block that have sums of the part of a shared work tile. From one to the next there are as many as parts.
    #[inline(always)]
    fn sharers(self, work: &Work<'_>, work_tile: u32) -> [u32; 2] {
        let [first, last] = sharers(work, work_tile);
        [first + self.rank, last + 1 - self.of + self.rank]
    }

    /// A task with the tokens of the part, of which a lane has so many sums.
    #[inline(always)]
    fn of<const SUMS: usize>(self, all: &Task) -> Task {
        if self.of == 1 {
            return *all;
        }
        let tokens = const { tokens_of_sums::<SUMS>() };
        let first = all.first + self.rank * tokens;
        Task { first, end: all.end.min(first + tokens), ..*all }
    }
}

impl Output<'_> {
    /// The task of a share, for token tiles of so many at most.
    #[inline(always)]
    pub(super) fn task(&self, share: Share, tile_n: u32) -> Task {
        let [row_tile, token_tile] = self.work.schedule.row_and_token_tile(share.tile);
        let bits = tile_n.trailing_zeros();
        // SAFETY: the work tile exists, and so do its token tile and its expert's slot.
        unsafe {
            let tokens = self.problem.routed.tile(token_tile, bits, self.work.grid.tokens);
            let ExpertTile { expert, first, end, .. } = tokens;
            let scale = (*self.problem.weights.global.wrapping_add(expert as usize)).scale;
            Task { share, expert, first, end, row_tile, token_tile, scale }
        }
    }

    /// Finishes a warp's part of a task, given the sums of some tiles of 16 rows, of which the first is `tile`, and of all tokens or a part. A
    /// lane has `OF_TILE` sums of all. `usual` says whether tensor cores could compute it.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and no other warp of the thread block has these tiles.
    #[inline(always)]
    pub(super) unsafe fn finish<
        F: Weights,
        D: Activations,
        const OF_TILE: usize,
        const SUMS: usize,
        const OF_WARP: usize,
    >(
        &self,
        task: &Task,
        tile: u32,
        part: Part,
        mut sums: [[f32; SUMS]; OF_WARP],
        mut usual: bool,
    ) {
        let share = &task.share;
        if !share.is_whole(&self.work) && !part.is_all(&self.work) {
            let own = self.sums::<SUMS>(share.tile, warp::thread_block(), tile);
            for i in 0..OF_WARP {
                for j in 0..SUMS / 4 {
                    let four = [0, 1, 2, 3].map(|k| sums[i][4 * j + k].to_bits());
                    // SAFETY: the place is the thread block's, and these words of it the lane's.
                    unsafe { ptx::store_16(own.wrapping_add(fours::<SUMS>(i, j)), four) };
                }
            }
            // SAFETY: the caller's promise.
            let Some(all_usual) = (unsafe { self.count(share.tile, tile, part, usual) }) else { return };
            usual = all_usual;
            // SAFETY: all have left their sums.
            sums = unsafe {
                match SUMS {
                    ..=16 => self.left_sums::<SUMS, OF_WARP, 4>(share.tile, tile, part),
                    _ => self.left_sums::<SUMS, OF_WARP, 2>(share.tile, tile, part),
                }
            };
        }
        let problem = self.problem.of_expert::<F>(task.expert);
        let row = task.row_tile * const { tiles_of_sums::<OF_TILE>() * TILE_ROWS } + tile * TILE_ROWS;
        let task = part.of::<SUMS>(task);
        // SAFETY: the caller's promise; no other warp has these rows and tokens.
        unsafe {
            if usual {
                for i in 0..OF_WARP {
                    store::<F, D, SUMS>(&problem, row + i as u32 * TILE_ROWS, &task, &sums[i]);
                }
            } else {
                define::<F, D>(&problem, row, OF_WARP as u32 * TILE_ROWS, [task.first, task.end]);
            }
        }
    }

    /// The lane's sums of a warp's first tile, as a thread block leaves them of a shared work tile.
    #[inline(always)]
    fn sums<const SUMS: usize>(&self, work_tile: u32, block: u32, tile: u32) -> *mut u8 {
        let tile_bytes = const { SUMS as u32 * WARP * 4 };
        let place = u64::from(place(&self.work, work_tile, block))
            * u64::from(const { tiles_of_sums::<SUMS>() } * tile_bytes);
        let in_place = tile * tile_bytes + warp::lane() * 16;
        self.left.wrapping_add((place + u64::from(in_place)) as usize)
    }

    /// Adds up, in the order of K, what all thread blocks have left of the warp's part of a work tile, for `AT_ONCE` of which
    /// there are registers.
    ///
    /// # Safety
    /// The contract of the kernels; they have left it, and counted themselves afterwards.
    #[inline(always)]
    unsafe fn left_sums<const SUMS: usize, const OF_WARP: usize, const AT_ONCE: usize>(
        &self,
        work_tile: u32,
        tile: u32,
        part: Part,
    ) -> [[f32; SUMS]; OF_WARP] {
        let mut sums = [[0.0; SUMS]; OF_WARP];
        let [mut block, last] = part.sharers(&self.work, work_tile);
        while block <= last {
            let mut from = [self.left; AT_ONCE];
            for b in 0..AT_ONCE {
                from[b] = self.sums::<SUMS>(work_tile, (block + b as u32 * part.of).min(last), tile);
            }
            for i in 0..OF_WARP {
                for j in 0..SUMS / 4 {
                    let mut more = [[0; 4]; AT_ONCE];
                    for b in 0..AT_ONCE {
                        // SAFETY: the thread block has left them.
                        more[b] = unsafe { ptx::load_16_written(from[b].wrapping_add(fours::<SUMS>(i, j))) };
                    }
                    for b in 0..AT_ONCE {
                        for k in 0..4 {
                            // Nothing changes by −0.
                            let there = block + b as u32 * part.of <= last;
                            sums[i][4 * j + k] += if there { f32::from_bits(more[b][k]) } else { -0.0 };
                        }
                    }
                }
            }
            block += AT_ONCE as u32 * part.of;
        }
        sums
    }

    /// Counts this thread block among those whose warps have left their sums of a tile. The last one is told whether tensor cores
    /// could compute all of them.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and have left their sums.
    #[inline(always)]
    unsafe fn count(&self, work_tile: u32, tile: u32, part: Part, usual: bool) -> Option<bool> {
        let [first, last] = part.sharers(&self.work, work_tile);
        let of_tiles = (work_tile - self.work.schedule.first_shared) * part.of + part.rank;
        let number = of_tiles * MOST_TILES + tile;
        let counter = self.counters.wrapping_add(number as usize);
        let mut told = 0;
        // All lanes' stores come before the first one's counting.
        warp::sync();
        if warp::lane() == 0 {
            let amount = 1 + if usual { 0 } else { UNUSUAL };
            // SAFETY: there is a counter for each tile of a shared work tile. Nobody counts any more once all have.
            unsafe {
                let counted = ptx::count(counter, amount) + amount;
                let all = counted % UNUSUAL == (last - first) / part.of + 1;
                if all {
                    *counter = 0;
                    told = 1 + u32::from(counted < UNUSUAL);
                }
            }
        }
        let told = warp::shuffle(told, 0);
        // The others' stores are visible to the first lane, which has counted, and now to all.
        warp::sync();
        (told != 0).then_some(told == 2)
    }
}
