//! The epilogue of the GEMM: adds up what several thread blocks have of a work tile, scales, rounds and stores.

use microscale_formats::plan::power_of_two;
use microscale_kernels_abi::gemm::{FRONT_BYTES, GemmGrid, ROWS, TILES};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::weights::{QUAD, TILE_ROWS};

use super::scheduler::{Share, place, sharers};
use crate::product::operand::Problem;
use crate::product::tensor_cores::{Activations, Weights};
use crate::{ptx, warp};

/// Bytes of four sums of each lane.
const FOURS_BYTES: u32 = WARP * 16;
/// What a thread block adds to a counter if tensor cores could not compute its share.
const UNUSUAL: u32 = 1 << 16;

/// What is multiplied, and where its results go.
pub(super) struct Epilogue<'a> {
    pub(super) problem: &'a Problem,
    pub(super) grid: &'a GemmGrid,
    /// A counter for each shared work tile, and where thread blocks leave their sums of these.
    pub(super) counters: *mut u32,
    pub(super) left: *mut u8,
}

/// Tokens of a work tile of which a lane has so many sums of a tile of 16 rows.
const fn tile_tokens<const SUMS: usize>() -> u32 {
    SUMS as u32 * WARP / TILE_ROWS
}

impl Epilogue<'_> {
    /// Finishes a share, given the sums of some tiles of 16 rows: this warp's first one is `tile`. `usual` says whether tensor cores
    /// could compute what the warp has. `barrier` waits for all warps that multiply.
    ///
    /// # Safety
    /// The contract of the kernels; all warps that multiply take part, with the tiles of a work tile between them.
    #[inline(always)]
    pub(super) unsafe fn finish<F: Weights, D: Activations, const SUMS: usize, const OF_WARP: usize>(
        &self,
        share: &Share,
        tile: u32,
        mut sums: [[f32; SUMS]; OF_WARP],
        mut usual: bool,
        barrier: impl Fn(),
    ) {
        if !share.is_whole(self.grid) {
            let mut own = self.sums::<SUMS>(share.tile, warp::thread_block(), tile);
            for i in 0..OF_WARP {
                for j in 0..SUMS / 4 {
                    let four = [0, 1, 2, 3].map(|k| sums[i][4 * j + k].to_bits());
                    // SAFETY: the place is the thread block's, and these words of it the lane's.
                    unsafe { ptx::store_16(own, four) };
                    own = own.wrapping_add(FOURS_BYTES as usize);
                }
            }
            // SAFETY: the caller's promise.
            let Some(all_usual) = (unsafe { self.count(share.tile, usual, &barrier) }) else { return };
            usual = all_usual;
            sums = [[0.0; SUMS]; OF_WARP];
            let [mut block, last] = sharers(self.grid, share.tile);
            while block <= last {
                let mut from = self.sums::<SUMS>(share.tile, block, tile);
                for i in 0..OF_WARP {
                    for j in 0..SUMS / 4 {
                        // SAFETY: the thread block has stored them, and counted itself afterwards.
                        let more = unsafe { ptx::load_16_written(from) };
                        for k in 0..4 {
                            sums[i][4 * j + k] += f32::from_bits(more[k]);
                        }
                        from = from.wrapping_add(FOURS_BYTES as usize);
                    }
                }
                block += 1;
            }
        }
        let (row_tile, token_tile) = self.grid.token_tiles.divide_32(share.tile);
        let row = row_tile * ROWS + tile * TILE_ROWS;
        let token = token_tile * const { tile_tokens::<SUMS>() };
        // SAFETY: the caller's promise; no other warp has these rows and tokens.
        unsafe {
            if usual {
                for i in 0..OF_WARP {
                    self.store::<F, D, SUMS>(row + i as u32 * TILE_ROWS, token, &sums[i]);
                }
            } else {
                self.define::<F, D, SUMS>(row, OF_WARP as u32 * TILE_ROWS, token);
            }
        }
    }

    /// The lane's sums of a warp's first tile, as a thread block leaves them of a shared work tile.
    #[inline(always)]
    fn sums<const SUMS: usize>(&self, work_tile: u32, block: u32, tile: u32) -> *mut u8 {
        let tile_bytes = const { SUMS as u32 * WARP * 4 };
        let place = u64::from(place(self.grid, work_tile, block)) * u64::from(TILES * tile_bytes);
        let in_place = tile * tile_bytes + warp::lane() * 16;
        self.left.wrapping_add((place + u64::from(in_place)) as usize)
    }

    /// Counts this thread block among those that have left their sums of a work tile. The last one is told whether tensor cores
    /// could compute all shares.
    ///
    /// # Safety
    /// The contract of the kernels; all warps that multiply take part, and have stored their sums.
    #[inline(always)]
    unsafe fn count(&self, work_tile: u32, usual: bool, barrier: &impl Fn()) -> Option<bool> {
        let [first, last] = sharers(self.grid, work_tile);
        let counter = self.counters.wrapping_add((work_tile - self.grid.first_shared) as usize);
        let told = warp::shared::<u32>().wrapping_add(FRONT_BYTES as usize / 4 - 1);
        if !usual && warp::lane() == 0 {
            // SAFETY: there is a counter for each shared work tile.
            unsafe { ptx::count(counter, UNUSUAL) };
        }
        ptx::fence();
        barrier();
        if warp::thread() == 0 {
            // SAFETY: as above; nobody counts any more once all have. Nobody reads the word between the barriers.
            unsafe {
                let counted = ptx::count(counter, 1) + 1;
                let all = counted % UNUSUAL == last - first + 1;
                if all {
                    *counter = 0;
                }
                *told = if all { 1 + u32::from(counted < UNUSUAL) } else { 0 };
            }
        }
        barrier();
        // SAFETY: written before the barrier.
        let told = unsafe { *told };
        if told == 0 {
            return None;
        }
        // What the others stored is visible: they counted themselves behind a fence.
        ptx::fence();
        Some(told == 2)
    }

    /// Stores the results of a tile of 16 rows.
    ///
    /// # Safety
    /// The contract of the kernels; all lanes take part, and no other warp has these rows and tokens.
    #[inline(always)]
    unsafe fn store<F: Weights, D: Activations, const SUMS: usize>(
        &self,
        first_row: u32,
        first_token: u32,
        sums: &[f32; SUMS],
    ) {
        let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
        let (rows, tokens) = (self.problem.shape.rows as u32, self.grid.tokens);
        let row = first_row + of_eight;
        let lowered = f64::from(power_of_two(const { D::LOWERED[F::INDEX] }));
        // SAFETY: the slot is readable.
        let factor = unsafe { self.problem.weights.scaled(lowered) };
        let mut token = first_token + quarter * 2;
        for four in 0..SUMS / 4 {
            // Of two rows, eight apart, the sums of two tokens.
            for half in 0..2 {
                let row = row + half as u32 * (TILE_ROWS / 2);
                let [first, second] =
                    [0, 1].map(|i| (f64::from(sums[4 * four + 2 * half + i]) * factor) as f32);
                let pair = D::rounded(second, first);
                for i in 0..2 {
                    if row < rows && token + i < tokens {
                        let result = u64::from(token + i) * u64::from(rows) + u64::from(row);
                        let to = self.problem.out.cast::<u16>().wrapping_add(result as usize);
                        // SAFETY: the result exists, and is this lane's.
                        unsafe { *to = (pair >> (16 * i)) as u16 };
                    }
                }
            }
            token += 8;
        }
    }

    /// Computes and stores the results of some rows by the definition.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[inline(always)]
    unsafe fn define<F: Weights, D: Activations, const SUMS: usize>(
        &self,
        first_row: u32,
        count: u32,
        first_token: u32,
    ) {
        let tokens = [first_token, self.grid.tokens.min(first_token + const { tile_tokens::<SUMS>() })];
        let end = (self.problem.shape.rows as u32).min(first_row + count);
        let mut row = first_row;
        while row < end {
            // SAFETY: the caller's promise.
            unsafe { self.problem.define::<F, D>(u64::from(row), tokens) };
            row += 1;
        }
    }
}
