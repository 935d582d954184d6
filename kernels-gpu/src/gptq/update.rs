//! Applies the residuals of a batch to all later columns: 128 × 128 sums per thread block, 8 × 8
//! per thread, in registers.
//!
//! Each sum takes the products in the order of positions, each by one fused operation.
//! Residuals and factors pass through two stages of shared memory, sixteen positions each. The next
//! stage's are loaded to registers while the present one is multiplied.

use microscale_kernels_abi::gptq::{
    BatchParams, FACTOR_TILE, GPTQ_BATCH, UPDATE_DEPTH, UPDATE_PITCH, UPDATE_THREADS, UPDATE_TILE,
};

use super::factor::entry;
use super::load::Matrices;
use crate::hardware::{ptx, shared, warp};

/// Rows and columns of sums per thread.
const SUMS: usize = 8;
/// Bytes of a stage's residuals, and of its factors.
const HALF_STAGE: u32 = UPDATE_DEPTH * UPDATE_PITCH * 4;
const STAGES: u32 = GPTQ_BATCH / UPDATE_DEPTH;
const _: () = assert!(UPDATE_TILE * UPDATE_DEPTH == UPDATE_THREADS * SUMS as u32);
const _: () = assert!(FACTOR_TILE as usize == SUMS);

/// The part of a stage that a thread loads: residuals of a row, and a row of a tile of the factor.
#[derive(Clone, Copy)]
struct Loaded {
    residuals: [[u32; 4]; 2],
    factors: [[u32; 4]; 2],
}

/// The addresses that a thread loads from.
struct Sources {
    residuals: *const f32,
    /// Null for columns after the last.
    factors: *const f32,
}

impl Sources {
    /// Loads the thread's part of a stage.
    ///
    /// # Safety
    /// The contract of the update.
    #[inline(always)]
    unsafe fn load(&self, stage: u32) -> Loaded {
        let residuals = self.residuals.wrapping_add((stage * UPDATE_DEPTH) as usize).cast::<u8>();
        // SAFETY: eight residuals of the batch, on 16 bytes.
        let residuals =
            unsafe { [ptx::load_16_here(residuals), ptx::load_16_here(residuals.wrapping_add(16))] };
        let mut factors = [[0; 4]; 2];
        if !self.factors.is_null() {
            let row = self.factors.wrapping_add((stage * UPDATE_DEPTH * FACTOR_TILE) as usize).cast::<u8>();
            // SAFETY: a row of a tile, 32 bytes on 16.
            factors = unsafe { [ptx::load_16_here(row), ptx::load_16_here(row.wrapping_add(16))] };
        }
        Loaded { residuals, factors }
    }
}

/// Updates a tile.
///
/// # Safety
/// The contract of the update.
#[inline(always)]
pub(super) unsafe fn update(matrices: Matrices, feedback: *const f32, params: &BatchParams) {
    let thread = warp::thread();
    // At least 1, for the compiler.
    let row_tiles = params.row_tiles.max(1);
    let (col_tile, row_tile) = (warp::thread_block() / row_tiles, warp::thread_block() % row_tiles);
    let (first_row, first_col) = (row_tile * UPDATE_TILE, params.start + GPTQ_BATCH + col_tile * UPDATE_TILE);
    let row_at = |row: u32| (u64::from(first_row + row) * u64::from(params.pitch)) as usize;

    // Loads: a thread has eight positions of a row, and a row of a tile of the factor.
    let (load_row, load_depth) = (thread % UPDATE_TILE, thread / UPDATE_TILE * SUMS as u32);
    let (load_tile, load_position) = (thread / UPDATE_DEPTH, thread % UPDATE_DEPTH);
    let load_col = first_col + load_tile * FACTOR_TILE;
    let exists = load_col < params.positions;
    let sources = Sources {
        residuals: matrices.weights.wrapping_add(row_at(load_row) + (params.start + load_depth) as usize),
        factors: if exists {
            entry(feedback, params.start + load_position, load_col)
        } else {
            core::ptr::null()
        },
    };
    let memory = shared::address(warp::shared::<u8>());
    let store_residuals = memory + (load_depth * UPDATE_PITCH + load_row) * 4;
    let store_factors = memory + HALF_STAGE + (load_position * UPDATE_PITCH + load_tile * FACTOR_TILE) * 4;
    let store = |stage: u32, loaded: &Loaded| {
        let stage = stage % 2 * 2 * HALF_STAGE;
        // SAFETY: the thread's own words of a stage that no thread reads before the next barrier.
        unsafe {
            let mut i = 0;
            while i < SUMS {
                let word = loaded.residuals[i / 4][i % 4];
                shared::store(store_residuals + stage + i as u32 * UPDATE_PITCH * 4, word);
                i += 1;
            }
            shared::store_16(store_factors + stage, loaded.factors[0]);
            shared::store_16(store_factors + stage + 16, loaded.factors[1]);
        }
    };

    // Sums: rows and columns 4i to 4i + 3, and the same in the other half of the tile.
    let (row, col) = (thread / 16 * 4, thread % 16 * 4);
    let place = |i: usize, first: u32| first + i as u32 / 4 * (UPDATE_TILE / 2) + i as u32 % 4;
    let sums_at = |i: usize, half: u32| {
        let col = first_col + col + half * (UPDATE_TILE / 2);
        matrices.updated.wrapping_add(row_at(place(i, row)) + col as usize)
    };
    let mut sums = [[0.0f32; SUMS]; SUMS];
    let mut i = 0;
    while i < SUMS {
        // SAFETY: two times four sums of a row, on 16 bytes, that only this thread uses.
        let halves = unsafe {
            [ptx::load_16_written(sums_at(i, 0).cast()), ptx::load_16_written(sums_at(i, 1).cast())]
        };
        let mut j = 0;
        while j < SUMS {
            sums[i][j] = f32::from_bits(halves[j / 4][j % 4]);
            j += 1;
        }
        i += 1;
    }

    // SAFETY: the same contract.
    store(0, &unsafe { sources.load(0) });
    warp::barrier();
    let mut stage = 0;
    // A number that the compiler does not know, lest it unroll the loop.
    let stages = ptx::opaque(STAGES);
    while stage < stages {
        let more = stage + 1 < stages;
        // The last stage loads itself again, for nothing.
        // SAFETY: the same contract.
        let next = unsafe { sources.load(if more { stage + 1 } else { stage }) };
        let of_stage = memory + stage % 2 * 2 * HALF_STAGE;
        let mut k = 0;
        // Unrolled further, it takes registers of a second thread block.
        let depth = ptx::opaque(UPDATE_DEPTH);
        while k < depth {
            let line = of_stage + k * UPDATE_PITCH * 4;
            let load = |offset: u32| {
                // SAFETY: 16 bytes that were stored before the last barrier, on 16 bytes.
                unsafe { shared::load_16(line + offset) }.map(f32::from_bits)
            };
            let half = UPDATE_TILE / 2 * 4;
            let residuals = [load(row * 4), load(row * 4 + half)];
            let factors = [load(HALF_STAGE + col * 4), load(HALF_STAGE + col * 4 + half)];
            let mut i = 0;
            while i < SUMS {
                let mut j = 0;
                while j < SUMS {
                    sums[i][j] = ptx::fma_f32(-residuals[i / 4][i % 4], factors[j / 4][j % 4], sums[i][j]);
                    j += 1;
                }
                i += 1;
            }
            k += 1;
        }
        if more {
            // The other stage was read before the last barrier.
            store(stage + 1, &next);
        }
        warp::barrier();
        stage += 1;
    }
    let mut i = 0;
    while i < SUMS {
        let [a, b, c, d, e, f, g, h] = sums[i].map(f32::to_bits);
        // SAFETY: as when they were loaded.
        unsafe {
            ptx::store_16(sums_at(i, 0).cast(), [a, b, c, d]);
            ptx::store_16(sums_at(i, 1).cast(), [e, f, g, h]);
        }
        i += 1;
    }
}
