//! GPTQ: quantizing the rows of a layer's weights with error feedback.
//!
//! Columns are at *positions*, in their order of quantization. Two matrices in f32 hold a pass over
//! some rows, `[rows, pitch]` each: `weights`, which become residuals, and `updated`, the weights
//! after all earlier columns, which become the weights that were rounded. A launch of a `Columns`
//! kernel quantizes one [batch](GPTQ_BATCH) of positions of all rows, and `Update` applies its
//! residuals to all later batches.
//!
//! The factor's quotients Rⱼₖ / Rₖₖ are in tiles of [`FACTOR_TILE`] columns: tile t has the columns
//! 8t to 8t + 7 of rows 0 to 8t + 7, eight entries for each row. Entries on and below the diagonal
//! are 0. Tiles follow each other without gaps.

use crate::grid::Divider;
use crate::launch::{Converts, Launch, THREADS, WARP, kernel, kinds};

/// Positions that are quantized per launch. Multiple of every format's block.
pub const GPTQ_BATCH: u32 = 128;
/// Rows and columns per thread block of the update. `pitch` and the rows of a pass are multiples.
pub const UPDATE_TILE: u32 = GPTQ_BATCH;
/// Positions of residuals that the update has in a stage of shared memory.
pub const UPDATE_DEPTH: u32 = 16;
/// Numbers from one position to the next in shared memory, so that stores meet different banks.
pub const UPDATE_PITCH: u32 = UPDATE_TILE + 4;
/// Threads per thread block of the update, each with 8 × 8 sums.
pub const UPDATE_THREADS: u32 = 256;
/// Lanes per row in the `Columns` kernels. Each tries another scale.
pub const ROW_LANES: u32 = 16;
/// Columns in a tile of the factor.
pub const FACTOR_TILE: u32 = 8;
/// Scale bytes in the tables.
pub const SCALE_BYTES: usize = 256;

/// Bytes of shared memory of the update: two stages of residuals and factors in f32.
const UPDATE_SHARED: u32 = 2 * 2 * UPDATE_DEPTH * UPDATE_PITCH * 4;

const ELEMENTS: Launch = (THREADS, THREADS, 0);
const ROWS: Launch = (THREADS, THREADS / ROW_LANES, 0);
const ROW_PER_WARP: Launch = (THREADS, THREADS / WARP, 0);
const UPDATE: Launch = (UPDATE_THREADS, 1, UPDATE_SHARED);

kinds! {
    /// The kernels of GPTQ.
    Gptq {
        /// Loads f32 in the order of positions: one element per thread.
        LoadF32 "gptq_load_f32" ELEMENTS Nothing;
        /// Loads f16.
        LoadF16 "gptq_load_f16" ELEMENTS Nothing;
        /// Loads bf16.
        LoadBf16 "gptq_load_bf16" ELEMENTS Nothing;
        /// Quantizes a batch of positions to MXFP4.
        Mxfp4Columns "gptq_columns_mxfp4" ROWS Nothing;
        /// Quantizes a batch of positions to NVFP4.
        Nvfp4Columns "gptq_columns_nvfp4" ROWS Nothing;
        /// Applies the residuals of a batch to all later batches: one tile per thread block.
        Update "gptq_update" UPDATE Nothing;
        /// Encodes all blocks in MXFP4: one element per thread.
        Mxfp4Encode "gptq_encode_mxfp4" ELEMENTS Nothing;
        /// Encodes all blocks in NVFP4.
        Nvfp4Encode "gptq_encode_nvfp4" ELEMENTS Nothing;
        /// Adds a batch's part of the squared norm of each row times the factor.
        Norms "gptq_norms" ROW_PER_WARP Nothing;
    }
}

/// Returns the number of the first entry of a tile of the factor.
#[inline(always)]
pub const fn factor_tile(tile: u64) -> u64 {
    // Tiles before it have 8, 16, … rows of 8 entries.
    (FACTOR_TILE * FACTOR_TILE / 2) as u64 * tile * (tile + 1)
}

/// The destination of loaded values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum GptqLoad {
    /// `weights` and `updated` become the values. In blocks that get the NaN scale, `weights`
    /// become NaN and `updated` 0. Counts NaN and infinities.
    Weights = 0,
    /// `weights` become the values, `updated` their negatives; both 0 in blocks that are not
    /// finite.
    Values = 1,
    /// As [`Self::Values`], for the values minus the previous `weights`.
    Differences = 2,
}

/// Parameters of loading.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LoadParams {
    /// Warps per row, each with 32 columns.
    pub row_warps: Divider,
    /// Elements from one row's start to the next's.
    pub row_stride: u64,
    /// Number of the first row in the whole matrix, for positions of non-finite values.
    pub first_row: u64,
    /// Rows of the pass.
    pub rows: u32,
    /// Columns without padding.
    pub cols: u32,
    /// Positions: the columns, padded to whole blocks.
    pub positions: u32,
    /// Elements from row to row of `weights` and `updated`.
    pub pitch: u32,
    /// Elements per block.
    pub block: u32,
    /// [`GptqLoad`] as a number.
    pub to: u32,
    /// 1 to replace ±Inf by the largest finite value and NaN by 0.
    pub saturate_non_finite: u32,
    /// Not used.
    pub padding: u32,
}

/// Parameters of the kernels that handle a batch of positions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchParams {
    /// Rows of the pass, without padding.
    pub rows: u32,
    /// Elements from row to row of `weights` and `updated`.
    pub pitch: u32,
    /// The first position of the batch, a multiple of [`GPTQ_BATCH`].
    pub start: u32,
    /// Positions of the batch: [`GPTQ_BATCH`], or fewer in the last one.
    pub count: u32,
    /// Positions in all.
    pub positions: u32,
    /// Blocks per row.
    pub row_blocks: u32,
    /// `Search` as a number.
    pub search: u32,
    /// 1 if scales are chosen already; 0 to choose them.
    pub fixed: u32,
    /// 1 if elements are divided by their scaling; 0 if they are multiplied.
    pub divides: u32,
    /// Tiles of rows, for the update.
    pub row_tiles: u32,
}

/// Bounds of the errors of a block of columns, which end a search.
pub use microscale_formats::search::gptq::BlockBounds;

/// The factors and the scalings of all scale bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScaleTable {
    /// Multiplies the values of codes.
    pub factors: [f32; SCALE_BYTES],
    /// Scales elements into the range of E2M1: a divisor or a factor.
    pub scalings: [f32; SCALE_BYTES],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_the_factor_have_no_gaps() {
        let mut entries = 0;
        for tile in 0..5000 {
            assert_eq!(factor_tile(tile), entries);
            entries += 64 * (tile + 1);
        }
    }

    #[test]
    fn a_batch_has_whole_blocks() {
        assert!(GPTQ_BATCH.is_multiple_of(32) && UPDATE_TILE == GPTQ_BATCH);
        assert!(GPTQ_BATCH.is_multiple_of(UPDATE_DEPTH));
        assert_eq!(UPDATE_THREADS * 64, UPDATE_TILE * UPDATE_TILE);
    }
}
