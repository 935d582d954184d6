//! Quantized matrices times quantized vectors.

use crate::grid::Divider;
use crate::launch::{Converts, Launch, THREADS, WARP, kernel, kinds};

/// The first number of blocks that is too large for a row of a product's operand: kernels count
/// blocks in 32 bits, and a few k-iterations past the last.
pub const BLOCK_LIMIT: u64 = 1 << 26;

const ONE_ROW: Launch = (THREADS, THREADS / WARP, 0);
const TWO_ROWS: Launch = (THREADS, 2 * THREADS / WARP, 0);
const FOUR_ROWS: Launch = (THREADS, 4 * THREADS / WARP, 0);

kinds! {
    /// The kernels by format and rows per warp. All give the same bits.
    Gemv {
        /// NVFP4, a row.
        Nvfp4Rows1 "nvfp4_gemv_rows1" ONE_ROW E2m1;
        /// NVFP4, two rows.
        Nvfp4Rows2 "nvfp4_gemv_rows2" TWO_ROWS E2m1;
        /// NVFP4, four rows.
        Nvfp4Rows4 "nvfp4_gemv_rows4" FOUR_ROWS E2m1;
        /// NVFP4, a ragged row, which is not whole chunks.
        Nvfp4Ragged "nvfp4_gemv_ragged" ONE_ROW E2m1;
        /// MXFP4, a row. All its rows are whole chunks.
        Mxfp4Rows1 "mxfp4_gemv_rows1" ONE_ROW E2m1;
        /// MXFP4, two rows.
        Mxfp4Rows2 "mxfp4_gemv_rows2" TWO_ROWS E2m1;
        /// MXFP4, four rows.
        Mxfp4Rows4 "mxfp4_gemv_rows4" FOUR_ROWS E2m1;
    }
}

/// Parameters: the rows of two quantized tensors as matrices and vectors.
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
    /// Warps per matrix; fewer than 2³¹ for all matrices.
    pub groups: Divider,
}
