//! The work tiles of the GEMV: which rows a group of warps multiplies, one work tile after the
//! other.
//!
//! Thread blocks are persistent. Their warps form groups. The warps of a group multiply the same
//! rows, each with its slice of K (sliced-K).

use microscale_kernels_abi::gemm::gemv::GemvParams;

/// The work tiles of a group of warps.
#[derive(Clone, Copy)]
pub(crate) struct WorkTiles {
    /// Rows of the matrix.
    pub(crate) rows: u64,
    /// Rows per work tile.
    pub(crate) each: u32,
    /// The group's first work tile.
    first: u32,
    /// Work tiles from one of the group's to its next.
    stride: u32,
    /// Work tiles of the group.
    pub(crate) count: u32,
}

impl WorkTiles {
    /// The work tiles of group `group` of thread block `block`, of `each` rows.
    #[inline(always)]
    pub(crate) fn new(params: &GemvParams, each: u32, block: u32, group: u32) -> Self {
        let first = group * params.row_blocks + block;
        Self {
            rows: params.shape.rows,
            each,
            first,
            stride: params.row_blocks * (params.warps >> params.slice_bits),
            count: params.work_tiles[0] + u32::from(first < params.work_tiles[1]),
        }
    }

    /// The first row that a work tile multiplies, and the first row that it stores. They differ in
    /// the last work tile of the matrix if it is not full: it starts with rows of the previous one.
    #[inline(always)]
    pub(crate) fn starts(&self, work_tile: u32) -> [u64; 2] {
        let each = u64::from(self.each);
        let own = u64::from(self.first + work_tile * self.stride) * each;
        [own.min(self.rows - self.rows.min(each)), own]
    }

    /// The row of the matrix with number `row_in_tile` in a work tile, if the work tile stores it.
    #[inline(always)]
    pub(crate) fn row(&self, work_tile: u32, row_in_tile: u32) -> Option<u64> {
        let [first, own] = self.starts(work_tile);
        let row = first + u64::from(row_in_tile);
        (work_tile < self.count && own <= row && row < self.rows).then_some(row)
    }
}
