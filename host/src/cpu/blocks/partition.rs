//! Cuts matrices into runs of blocks that are contiguous in memory.

use crate::shape::Shape;

/// Blocks per task: about 128 KiB of 16-bit input, which fits the L2 cache of a core.
pub(in crate::cpu) const TASK_BLOCKS: usize = 2048;

/// A matrix as a sequence of blocks, which [`Self::runs`] cuts into contiguous runs.
pub(in crate::cpu) struct Partition {
    shape: Shape,
    pub(in crate::cpu) block: usize,
    blocks_per_row: usize,
}

/// A run of blocks: part of a row, or several rows without gaps and padding.
pub(in crate::cpu) struct Run {
    /// The offset of the first element in the slice.
    pub(in crate::cpu) start: usize,
    /// Elements.
    pub(in crate::cpu) len: usize,
    /// Blocks. The last one may be padded.
    pub(in crate::cpu) blocks: usize,
}

impl Partition {
    pub(in crate::cpu) fn of(shape: Shape, block: usize) -> Self {
        let flat = shape.row_stride == shape.cols && shape.cols.is_multiple_of(block);
        Self::by_row(if flat { Shape::new(1, shape.elements()) } else { shape }, block)
    }

    /// Cuts at the end of each row, even if rows have no gaps.
    pub(in crate::cpu) fn by_row(shape: Shape, block: usize) -> Self {
        Self { shape, block, blocks_per_row: shape.cols.div_ceil(block) }
    }

    /// Blocks of the whole matrix.
    pub(in crate::cpu) fn blocks(&self) -> usize {
        self.shape.rows * self.blocks_per_row
    }

    /// The runs of blocks `first .. first + count`.
    pub(in crate::cpu) fn runs(&self, first: usize, count: usize) -> impl Iterator<Item = Run> {
        let (mut next, end) = (first, first + count);
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let (row, col) = (next / self.blocks_per_row, next % self.blocks_per_row * self.block);
                let blocks = (self.blocks_per_row - next % self.blocks_per_row).min(end - next);
                next += blocks;
                let len = (blocks * self.block).min(self.shape.cols - col);
                Run { start: row * self.shape.row_stride + col, len, blocks }
            })
        })
    }
}
