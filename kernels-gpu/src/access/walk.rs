//! The walk through a lane's chunks of the unquantized matrix, step by step.

use microscale_kernels_abi::BlockGrid;

use super::lane::{Lane, WarpPlace};
use crate::dtype::Dtype;
use crate::format::Blocks;

/// Walks the steps of a lane through the unquantized matrix.
pub(crate) struct Walk<'a> {
    grid: &'a BlockGrid,
    lane: &'a Lane,
    first: u32,
    row: u64,
    block_in_row: u64,
}

/// The position of a lane's chunk in the unquantized matrix.
pub(crate) struct Place {
    /// The index of the first element in the matrix.
    pub(super) index: u64,
    /// Its column.
    pub(super) col: u64,
    /// Elements of the chunk that the row has; 0 for a block past the end.
    pub(super) count: u32,
    /// The row has the whole next chunk too.
    pub(super) has_whole_after: bool,
}

impl<'a> Walk<'a> {
    /// Before step `first`.
    #[inline(always)]
    pub(crate) fn new(grid: &'a BlockGrid, lane: &'a Lane, place: &WarpPlace, first: u32) -> Self {
        // Possibly past the row's end: `place` puts it right.
        let block_in_row = place.block_in_row + u64::from(lane.group + first * lane.step);
        Self { grid, lane, first, row: place.row, block_in_row }
    }

    /// The chunk of step `j`; to be called for each step in turn. Divides again only where a row
    /// ends.
    #[inline(always)]
    pub(crate) fn place<D: Dtype, F: Blocks>(&mut self, j: u32) -> Place {
        if j > self.first {
            self.block_in_row += u64::from(self.lane.step);
        }
        if self.block_in_row >= self.grid.row_blocks.divisor {
            (self.row, self.block_in_row) = self.grid.row_blocks.divide(self.lane.block(j));
        }
        let col = self.block_in_row * u64::from(F::BLOCK) + u64::from(self.lane.part * D::CHUNK);
        let rest = if self.lane.block(j) < self.grid.blocks { self.grid.cols.saturating_sub(col) } else { 0 };
        Place {
            index: self.row * self.grid.row_stride + col,
            col,
            count: rest.min(u64::from(D::CHUNK)) as u32,
            has_whole_after: rest >= u64::from(2 * D::CHUNK),
        }
    }
}
