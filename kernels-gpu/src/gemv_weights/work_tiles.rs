//! The tile scheduler: which rows the warps of a thread block take, and which they take next.
//!
//! Thread blocks are persistent: each stays for as long as it has work tiles. Its warps form warp groups. The
//! warps of a group multiply the same rows, each with its slice of K (sliced-K), one work tile after the
//! other.

use microscale_kernels_abi::gemm::gemv::GemvParams as PipelinedGrid;
use microscale_kernels_abi::launch::WARP;

use crate::warp;

/// Divides a number by 2^`bits`: the quotient and the remainder.
#[inline(always)]
pub(crate) fn parts(number: u32, bits: u32) -> (u32, u32) {
    (number >> bits, number & ((1 << bits) - 1))
}

/// The number of the warp in its thread block. A shuffle tells the assembler that it is the same in all
/// lanes, so that whatever follows from it takes uniform registers.
#[inline(always)]
pub(crate) fn warp_number() -> u32 {
    warp::shuffle(warp::thread() / WARP, 0)
}

/// The work tiles of a warp group. Its warps multiply the rows of one at a time, then those of the next.
#[derive(Clone, Copy)]
pub(crate) struct WorkTiles {
    /// Rows of the matrix, and rows of a work tile.
    pub(crate) rows: u64,
    pub(crate) each: u32,
    /// The number of the group's first work tile in the matrix, and how far the next one is from each.
    first: u32,
    stride: u32,
    /// Work tiles of the group.
    pub(crate) count: u32,
}

impl WorkTiles {
    /// The work tiles of a warp group of a thread block, of so many rows each.
    #[inline(always)]
    pub(crate) fn new(grid: &PipelinedGrid, each: u32, block: u32, group: u32) -> Self {
        let first = group * grid.row_blocks + block;
        Self {
            rows: grid.shape.rows,
            each,
            first,
            stride: grid.row_blocks * (grid.warps >> grid.slice_bits),
            count: grid.work_tiles[0] + u32::from(first < grid.work_tiles[1]),
        }
    }

    /// The first row that is multiplied in a work tile, and the first that is the tile's own. They differ in
    /// the matrix' last work tile, if it is ragged: it begins with rows of the one before, so that it has as
    /// many as any other.
    #[inline(always)]
    pub(crate) fn starts(&self, work_tile: u32) -> [u64; 2] {
        let each = u64::from(self.each);
        let own = u64::from(self.first + work_tile * self.stride) * each;
        [own.min(self.rows - self.rows.min(each)), own]
    }

    /// A row of the matrix, given its number in a work tile, if it is the tile's own.
    #[inline(always)]
    pub(crate) fn row(&self, work_tile: u32, row_in_tile: u32) -> Option<u64> {
        let [first, own] = self.starts(work_tile);
        let row = first + u64::from(row_in_tile);
        (work_tile < self.count && own <= row && row < self.rows).then_some(row)
    }
}
