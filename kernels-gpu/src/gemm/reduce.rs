//! Reduces split work tiles: thread blocks store partial sums, and the last one adds them up.

use microscale_kernels_abi::gemm::{MOST_ROW_TILES, TILE_ROWS};
use microscale_kernels_abi::launch::WARP;

use super::epilogue::{store, store_reference};
use super::params::{Launch, Params};
use super::tile::{Array, Tile};
use super::tile_scheduler::{KRange, WorkTile};
use crate::hardware::{ptx, warp};
use crate::product::tensor_cores::{Activations, WeightFormat};

/// The amount that a warp adds to a semaphore besides 1 if its scales are out of range.
const OUT_OF_RANGE: u32 = 1 << 16;

/// The tokens of a work tile whose sums a warp has: all, or one of several slices.
#[derive(Clone, Copy)]
pub(super) struct TokenSlice {
    rank: u32,
    count: u32,
    /// The number of thread blocks that the slices of some K-iterations are in.
    blocks: u32,
}

impl TokenSlice {
    /// All tokens.
    pub(super) const ALL: Self = Self { rank: 0, count: 1, blocks: 1 };

    /// Half of the tokens, after the exchange in a cluster.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn of_cluster(rank: u32) -> Self {
        Self { rank, count: 2, blocks: 2 }
    }

    /// Half of the tokens, where two warp groups share rows. Their warps have two tiles each.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn of_warp_group(rank: u32) -> Self {
        Self { rank, count: 2, blocks: 1 }
    }

    /// The slice's number in its thread block.
    #[inline(always)]
    fn in_block(self) -> u32 {
        self.rank / self.blocks
    }

    /// Returns whether the work tile's thread blocks are one cluster: then no other has sums of the
    /// slice.
    #[inline(always)]
    fn is_complete(self, launch: &Launch<'_>) -> bool {
        self.blocks > 1 && launch.schedule.sharers.divisor == self.blocks
    }

    /// The first and the last thread block that have sums of the slice. They are `blocks` apart.
    #[inline(always)]
    fn sharers(self, launch: &Launch<'_>, tile: u32) -> [u32; 2] {
        let [first, last] = launch.sharers(tile);
        let rank = self.rank % self.blocks;
        [first + rank, last + 1 - self.blocks + rank]
    }

    /// The work tile with only the slice's tokens. `A` is a lane's array of accumulators for them.
    #[inline(always)]
    fn of<A: Array>(self, all: &WorkTile) -> WorkTile {
        if self.count == 1 {
            return *all;
        }
        let tokens = const { A::LEN as u32 * WARP / TILE_ROWS };
        let first_token = all.first_token + self.rank * tokens;
        WorkTile { first_token, end_token: all.end_token.min(first_token + tokens), ..*all }
    }
}

impl Launch<'_> {
    /// The first and the last thread block that share a split work tile.
    #[inline(always)]
    fn sharers(&self, tile: u32) -> [u32; 2] {
        let k_iterations = self.k_iterations();
        let first = (tile - self.schedule.first_shared) * k_iterations;
        [first, first + k_iterations - 1].map(|k_iteration| self.schedule.sharer(k_iteration))
    }

    /// The slot of a thread block's partial sums of a split work tile. Each has two: the first for
    /// the work tile where its K-iterations begin, the second for a later one that it does not
    /// finish.
    #[inline(always)]
    fn partial_sum_slot(&self, tile: u32, block: u32) -> u32 {
        let begins_in_tile = (tile - self.schedule.first_shared) * self.k_iterations()
            <= self.schedule.first_shared_k_iteration(block);
        2 * block + u32::from(!begins_in_tile)
    }
}

/// The exponent that has lowered the weights: only weights that are decoded to 16 bits are.
pub(super) const fn lowered<F: WeightFormat, D: Activations, T: Tile>() -> i32 {
    if T::CONFIG.mainloop.takes_16_bits() { D::LOWERED[F::INDEX] } else { 0 }
}

/// Returns whether the tensor cores may be unable to multiply with some scales: only where weights
/// are decoded to 16 bits.
pub(super) const fn may_be_out_of_range<F: WeightFormat, T: Tile>() -> bool {
    T::CONFIG.mainloop.takes_16_bits() && !F::ALWAYS_IN_RANGE
}

/// The offset of four of a lane's sums of a tile, in the partial sums of a warp's tiles.
const fn four_offset<A: Array>(tile: usize, four: usize) -> usize {
    (tile * (A::LEN / 4) + four) * WARP as usize * 16
}

impl Params<'_> {
    /// Finishes a warp's tiles of a work tile: reduces the sums if the work tile is split, and
    /// stores the results. `sums` has `TILES` tiles of 16 rows from `tile` on, and the tokens of
    /// `slice`. `in_range` says that the tensor cores could compute them.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it, and no other warp of the thread block has these
    /// tiles.
    #[inline(always)]
    pub(super) unsafe fn finish<F: WeightFormat, D: Activations, T: Tile, A: Array, const TILES: usize>(
        &self,
        work_tile: &WorkTile,
        tile: u32,
        slice: TokenSlice,
        mut sums: [A; TILES],
        mut in_range: bool,
    ) {
        let k_range = &work_tile.k_range;
        if self.is_split(k_range, slice) {
            self.store_partial_sums::<T, A, TILES>(k_range.tile, tile, slice, &sums);
            // SAFETY: all lanes are here and have stored their sums.
            let Some(all_in_range) = (unsafe { self.arrive(k_range.tile, tile, slice, in_range) }) else {
                return;
            };
            in_range = all_in_range;
            // SAFETY: this thread block arrived last, so all have stored their sums.
            sums = unsafe { self.reduce_all::<T, A, TILES>(k_range.tile, tile, slice) };
        }
        let problem = self.problem.of_expert::<F>(work_tile.expert);
        let row = work_tile.row_tile * const { T::M } + tile * TILE_ROWS;
        let work_tile = slice.of::<A>(work_tile);
        let lowered = lowered::<F, D, T>();
        // SAFETY: all lanes are here; no other warp of the launch has these rows and tokens.
        unsafe {
            if !may_be_out_of_range::<F, T>() || in_range {
                for i in 0..TILES {
                    store::<D, A>(&problem, row + i as u32 * TILE_ROWS, &work_tile, &sums[i], lowered);
                }
            } else {
                let tokens = [work_tile.first_token, work_tile.end_token];
                store_reference::<F, D>(&problem, row, TILES as u32 * TILE_ROWS, tokens);
            }
        }
    }

    /// Returns whether other thread blocks have sums of the slice, too.
    #[inline(always)]
    pub(super) fn is_split(&self, k_range: &KRange, slice: TokenSlice) -> bool {
        !k_range.is_whole(&self.launch) && !slice.is_complete(&self.launch)
    }

    /// Stores the partial sums of a warp's tiles of a split work tile.
    #[inline(always)]
    pub(super) fn store_partial_sums<T: Tile, A: Array, const TILES: usize>(
        &self,
        work_tile: u32,
        tile: u32,
        slice: TokenSlice,
        sums: &[A; TILES],
    ) {
        let own = self.partial_sums::<T, A>(work_tile, T::worker(), tile, slice);
        for i in 0..TILES {
            for j in 0..A::LEN / 4 {
                let four = [0, 1, 2, 3].map(|k| sums[i].get(4 * j + k).to_bits());
                // SAFETY: the slot is the thread block's, and these 16 bytes are the lane's.
                unsafe { ptx::store_16(own.wrapping_add(four_offset::<A>(i, j)), four) };
            }
        }
    }

    /// Adds up all thread blocks' partial sums of the warp's tiles in the order of K.
    ///
    /// # Safety
    /// As for [`Self::reduce`].
    #[inline(always)]
    pub(super) unsafe fn reduce_all<T: Tile, A: Array, const TILES: usize>(
        &self,
        work_tile: u32,
        tile: u32,
        slice: TokenSlice,
    ) -> [A; TILES] {
        // SAFETY: the same contract.
        unsafe {
            match A::LEN {
                ..=16 => self.reduce::<T, A, TILES, 4>(work_tile, tile, slice),
                // With decoder warps, consumer warps have fewer registers.
                _ if T::CONFIG.mainloop.has_decoders() => {
                    self.reduce::<T, A, TILES, 1>(work_tile, tile, slice)
                }
                _ => self.reduce::<T, A, TILES, 2>(work_tile, tile, slice),
            }
        }
    }

    /// The address of the lane's partial sums of a tile, as thread block `block` stores them.
    #[inline(always)]
    fn partial_sums<T: Tile, A: Array>(
        &self,
        work_tile: u32,
        block: u32,
        tile: u32,
        slice: TokenSlice,
    ) -> *mut u8 {
        let tile_bytes = const { A::LEN as u32 * WARP * 4 };
        let slice_bytes = const { T::CONFIG.row_tiles() } * tile_bytes;
        let slot_bytes = slice_bytes * (slice.count / slice.blocks);
        let slot = u64::from(self.launch.partial_sum_slot(work_tile, block)) * u64::from(slot_bytes);
        let in_slot = slice.in_block() * slice_bytes + tile * tile_bytes + warp::lane() * 16;
        self.partial_sums.wrapping_add((slot + u64::from(in_slot)) as usize)
    }

    /// [`Self::reduce_all`], with `AT_ONCE` thread blocks' sums loaded at a time.
    ///
    /// # Safety
    /// The kernel's contract. All thread blocks that share the work tile have stored their sums and
    /// arrived.
    #[inline(always)]
    unsafe fn reduce<T: Tile, A: Array, const TILES: usize, const AT_ONCE: usize>(
        &self,
        work_tile: u32,
        tile: u32,
        slice: TokenSlice,
    ) -> [A; TILES] {
        let mut sums = [A::ZEROS; TILES];
        let [mut block, last] = slice.sharers(&self.launch, work_tile);
        while block <= last {
            let mut from = [self.partial_sums; AT_ONCE];
            for b in 0..AT_ONCE {
                let block = (block + b as u32 * slice.blocks).min(last);
                from[b] = self.partial_sums::<T, A>(work_tile, block, tile, slice);
            }
            for i in 0..TILES {
                for j in 0..A::LEN / 4 {
                    let mut more = [[0; 4]; AT_ONCE];
                    for b in 0..AT_ONCE {
                        // SAFETY: the thread block stored them before it arrived.
                        more[b] =
                            unsafe { ptx::load_16_written(from[b].wrapping_add(four_offset::<A>(i, j))) };
                    }
                    for b in 0..AT_ONCE {
                        for k in 0..4 {
                            // Adding −0 changes nothing.
                            let exists = block + b as u32 * slice.blocks <= last;
                            *sums[i].get_mut(4 * j + k) +=
                                if exists { f32::from_bits(more[b][k]) } else { -0.0 };
                        }
                    }
                }
            }
            block += AT_ONCE as u32 * slice.blocks;
        }
        sums
    }

    /// Arrives on the semaphore of a tile of a split work tile. In the last thread block, returns
    /// whether the scales of all are in range; `None` in the others.
    ///
    /// # Safety
    /// The kernel's contract. All lanes call it after they have stored their partial sums.
    #[inline(always)]
    pub(super) unsafe fn arrive(
        &self,
        work_tile: u32,
        tile: u32,
        slice: TokenSlice,
        in_range: bool,
    ) -> Option<bool> {
        let [first, last] = slice.sharers(&self.launch, work_tile);
        let index =
            (work_tile - self.launch.schedule.first_shared) * slice.blocks + slice.rank % slice.blocks;
        // A second slice of the thread block takes the semaphore of the warp's second tile.
        let index = index * MOST_ROW_TILES + tile + slice.in_block();
        let semaphore = self.semaphores.wrapping_add(index as usize);
        let mut outcome = 0;
        // All lanes' stores come before the first lane's arrival.
        warp::sync();
        if warp::lane() == 0 {
            let amount = 1 + if in_range { 0 } else { OUT_OF_RANGE };
            // SAFETY: there is a semaphore for each tile of a split work tile. After the last
            // arrival no other thread block uses it.
            unsafe {
                let count = ptx::fetch_add(semaphore, amount) + amount;
                let is_last = count % OUT_OF_RANGE == (last - first) / slice.blocks + 1;
                if is_last {
                    *semaphore = 0;
                    outcome = 1 + u32::from(count < OUT_OF_RANGE);
                }
            }
        }
        let outcome = warp::shuffle(outcome, 0);
        // The other thread blocks' stores are visible to the first lane, and now to all lanes.
        warp::sync();
        (outcome != 0).then_some(outcome == 2)
    }
}
